"""Contract of `paged_attn::reshape_and_cache`: write keys and values into a paged KV cache."""

import functools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_paged_attn.attention_call import numbers_of
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.checks import (
    FLOAT,
    INT4,
    QUANTISED,
    check_devices,
    check_dim,
    check_dtype,
    check_rows,
    check_shape,
    fail,
    names,
)
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public

OP = "reshape_and_cache"
# making `tuple | list` anew takes longer than asking
PAIRS = (tuple, list)


def check_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    cache_names: tuple[str, str] = ("k_cache", "v_cache"),
) -> None:
    """Raise for metadata that the contract forbids. Errors call the caches by `cache_names`."""
    stored = (key.dtype, *QUANTISED) if isinstance(key, Tensor) else QUANTISED
    _check_rows(key, value, k_cache, v_cache, slot_mapping, stored, cache_names)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is None:
            continue
        check_dtype(OP, name, scale, (torch.float32,))
        if scale.shape not in ((), (key.shape[1],)):
            expected = f"() or (num_kv_heads) = ({key.shape[1]},)"
            if scale.dim() == 3:
                expected += " (quantize=True writes a scale for each token)"
            fail(OP, name, f"shape {tuple(scale.shape)}", expected)
        if k_cache.dtype not in QUANTISED:
            fail(OP, name, "a tensor", f"None for a cache of {names((k_cache.dtype,))}")
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _check_devices(key, value, k_cache, v_cache, slot_mapping, scales, cache_names)


def _check_rows(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    stored: tuple[torch.dtype, ...],
    cache_names: tuple[str, str],
) -> None:
    """Raise for tokens, caches and slots that do not fit. `stored`: dtypes of a cache."""
    check_dim(OP, "key", key, "(num_tokens, num_kv_heads, head_dim)")
    check_dim(OP, "value", value, "(num_tokens, num_kv_heads, head_dim_v)")
    check_dtype(OP, "key", key, FLOAT)
    check_dtype(OP, "value", value, (key.dtype,))
    if value.shape[:2] != key.shape[:2]:
        fail(
            OP,
            "value",
            f"shape {tuple(value.shape)}",
            f"{tuple(key.shape[:-1])} + (head_dim,), as key",
        )
    caches = ((cache_names[0], k_cache, "key", key), (cache_names[1], v_cache, "value", value))
    for name, cache, source_name, source in caches:
        check_dim(OP, name, cache, "(num_pages, num_kv_heads, page_size, head_dim)")
        check_dtype(OP, name, cache, stored)
        if cache.shape[1] != source.shape[1] or numbers_of(cache) != source.shape[2]:
            num_heads, head_dim = source.shape[1:]
            fail(
                OP,
                f"{name}'s num_kv_heads and head_dim",
                f"{cache.shape[1]} and {numbers_of(cache)}",
                f"{num_heads} and {head_dim}, as {source_name}",
            )
        if 0 in cache.shape[1:]:
            fail(
                OP,
                name,
                f"shape {tuple(cache.shape)}",
                "at least 1 in num_kv_heads, page_size and head_dim",
            )
        check_rows(OP, name, cache)
        check_rows(OP, source_name, source)
    if v_cache.dtype != k_cache.dtype or v_cache.shape[:3] != k_cache.shape[:3]:
        fail(
            OP,
            cache_names[1],
            f"{tuple(v_cache.shape)} of {v_cache.dtype}",
            f"{(*k_cache.shape[:-1],)} + (head_dim,) of {k_cache.dtype}, as {cache_names[0]}",
        )
    check_dim(OP, "slot_mapping", slot_mapping, "(<= num_tokens)")
    check_dtype(OP, "slot_mapping", slot_mapping, (torch.int32, torch.int64))
    if slot_mapping.shape[0] > key.shape[0]:
        fail(
            OP,
            "slot_mapping",
            slot_mapping.shape[0],
            f"at most num_tokens = {key.shape[0]} slots",
        )


def _check_devices(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    scales: Mapping[str, Tensor | None],
    cache_names: tuple[str, str],
) -> None:
    caches = dict(zip(cache_names, (k_cache, v_cache), strict=True))
    tensors = {"value": value, **caches, "slot_mapping": slot_mapping, **scales}
    check_devices(OP, key.device, tensors)


def _check_halves(kv_cache: Tensor) -> None:
    shape = "(2, num_pages, num_kv_heads, page_size, head_dim)"
    check_dim(OP, "kv_cache", kv_cache, shape)
    if kv_cache.shape[0] != 2:
        fail(OP, "kv_cache", f"shape {tuple(kv_cache.shape)}", shape)


def check_values_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *_scales: Tensor,
) -> None:
    """Raise for slots past the end of the cache. Reads slot_mapping."""
    num_slots = k_cache.shape[0] * k_cache.shape[2]
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_slots:
            expected = f"below num_pages * page_size = {num_slots} (negative: skip)"
            fail(OP, f"slot_mapping[{i}]", slot, expected, IndexError)


def check_quantize(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Raise for metadata that the contract forbids."""
    cache_names, stored = ("k_cache", "v_cache"), (*QUANTISED, INT4)
    _check_rows(key, value, k_cache, v_cache, slot_mapping, stored, cache_names)
    sizes = "(num_pages, num_kv_heads, page_size)"
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_dtype(OP, name, scale, (torch.float32,))
        check_shape(OP, name, scale, k_cache.shape[:3], sizes)
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _check_devices(key, value, k_cache, v_cache, slot_mapping, scales, cache_names)


def check_values_quantize(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Raise for slots past the end of the cache. Reads slot_mapping."""
    check_values_split(key, value, k_cache, v_cache, slot_mapping)


def check(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Raise for metadata that the contract forbids."""
    _check_halves(kv_cache)
    k_cache, v_cache = kv_cache.unbind(0)
    halves = ("kv_cache", "kv_cache")
    check_split(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, cache_names=halves)


def check_values(
    key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor, *_scales: Tensor
) -> None:
    """Raise for slots past the end of the cache. Reads slot_mapping."""
    check_values_split(key, value, *kv_cache.unbind(0), slot_mapping)


def fake(*_args: Tensor) -> None:
    """The op returns nothing."""


_reshape_and_cache = operator_of(
    define(
        "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) kv_cache, Tensor slot_mapping,"
        " Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
        check=check,
        check_values=check_values,
        fake=fake,
        autocast=True,
    )
)
_reshape_and_cache_split = operator_of(
    define(
        "reshape_and_cache.split(Tensor key, Tensor value, Tensor(a!) k_cache, Tensor(b!) v_cache,"
        " Tensor slot_mapping, Tensor? k_scale=None, Tensor? v_scale=None) -> ()",
        check=functools.partial(check_split),
        check_values=check_values_split,
        fake=fake,
        autocast=True,
    )
)
_reshape_and_cache_quantize = operator_of(
    define(
        "reshape_and_cache.quantize(Tensor key, Tensor value, Tensor(a!) k_cache,"
        " Tensor(b!) v_cache, Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor slot_mapping) -> ()",
        check=functools.partial(check_quantize),
        check_values=check_values_quantize,
        fake=fake,
        autocast=True,
    )
)
# scales are written: no copy in another dtype may take their place
_reshape_and_cache_quantize = _reshape_and_cache_quantize._replace(positions=(), others=frozenset())


@public
def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor | tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    quantize: bool = False,
) -> None:
    """Write one key and one value row per token into its slot of a paged cache, in place.

    Slot `s` is offset `s % page_size` of page `s // page_size`. A negative slot writes nothing.
    Rows of `key` and `value` past the end of `slot_mapping` are padding. If two tokens have the
    same slot, the whole row of one of them is stored (on the CPU that of the later one). An 8-bit
    cache stores the number divided by its scale, rounded to nearest even and saturated.

    `quantize=True` computes a scale for the row of each token and head and writes it at the token's
    slot: the largest magnitude of the row divided by the largest number of the format (448 for
    float8_e4m3fn, 57344 for float8_e5m2, 127 for int8, 7 for int4), 1 where that is 0. Attention
    takes such scales as `k_descale` and `v_descale`. Scales of other slots are not touched.

    Args:
        key, value: `(num_tokens, num_kv_heads, head_dim)` float32, bfloat16 or float16, any strides
            whose last one is 1.
        kv_cache: `(2, num_pages, num_kv_heads, page_size, head_dim)`, or a pair
            `(k_cache, v_cache)` of `(num_pages, num_kv_heads, page_size, head_dim)` whose
            head_dim may differ. Of key's dtype, float8_e4m3fn, float8_e5m2 or int8; any strides
            whose last one is 1, by which no two slots share memory.
        slot_mapping: `(<= num_tokens,)` int32 or int64.
        k_scale, v_scale: `()` or `(num_kv_heads,)` float32, for 8-bit caches; 1 when omitted. With
            `quantize` `(num_pages, num_kv_heads, page_size)` float32 of any strides, written.
        quantize: whether scales are written. `kv_cache` is of float8 or int8 then, or of uint8 with
            `head_dim / 2` bytes: int4, the even number in the low bits, two's complement.

    Raises:
        TypeError: an argument of the wrong type, such as a list for a tensor.
        ValueError: a shape, dtype, device or stride outside the above.
        IndexError: (CPU) a slot past the end of the cache; nothing has been written. Accelerators
            skip that token.
    """
    caches: Sequence[Tensor]
    if isinstance(kv_cache, Tensor):
        operator, caches = _reshape_and_cache, (kv_cache,)
    elif isinstance(kv_cache, PAIRS) and len(kv_cache) == 2:
        operator, caches = _reshape_and_cache_split, kv_cache
    else:
        fail(OP, "kv_cache", type(kv_cache).__name__, "a tensor, or a pair (k_cache, v_cache)")
    if quantize:
        if isinstance(kv_cache, Tensor):
            _check_halves(kv_cache)
            caches = kv_cache.unbind(0)
        operator = _reshape_and_cache_quantize
        call_operator(operator, (key, value, *caches, k_scale, v_scale, slot_mapping), {})
        return
    call_operator(operator, (key, value, *caches, slot_mapping, k_scale, v_scale), {})
