"""The rules that `flash_varlen` and `blocksparse` share, and the one text of every error.

`check_attention` looks at metadata only (it runs under FakeTensor and inside compiled graphs);
`check_attention_values` reads tensors on the host. Both raise on the first rule that is broken.
"""

import itertools
import math
from typing import NoReturn

import torch
from torch import Tensor

FLOAT = (torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
QUERY = FLOAT + FLOAT8
QUANTISED = (*FLOAT8, torch.int8)


def fail(
    op: str, argument: str, came: str, allowed: str, error: type[Exception] = ValueError
) -> NoReturn:
    """Raise `error` in the one form every refusal has: op, argument, what came, what is allowed."""
    raise error(f"paged_attn::{op}: {argument} {came}; allowed: {allowed}")


def names(dtypes: tuple[torch.dtype, ...]) -> str:
    """`(torch.float32, torch.int8)` as `float32, int8`."""
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_dim(op: str, name: str, tensor: Tensor, shape: str) -> None:
    """`shape` spells the dimensions, as in `(total_q, num_heads, head_dim)`."""
    if tensor.dim() != shape.count(",") + 1:
        fail(op, name, f"has shape {tuple(tensor.shape)}", shape)


def check_dtype(op: str, name: str, tensor: Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if tensor.dtype not in allowed:
        fail(op, name, f"has dtype {names((tensor.dtype,))}", names(allowed))


def check_shape(op: str, name: str, tensor: Tensor, shape: tuple, meaning: str) -> None:
    if tensor.shape != shape:
        fail(op, name, f"has shape {tuple(tensor.shape)}", f"{meaning} = {tuple(shape)}")


def check_rows(op: str, name: str, tensor: Tensor) -> None:
    """Kernels read whole rows: only the last dimension has to be contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        fail(op, name, f"has strides {tensor.stride()}", "any strides whose last one is 1")


def check_devices(op: str, device: torch.device, tensors: dict[str, Tensor | None]) -> None:
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            fail(op, name, f"is on {tensor.device}", f"the device of the first tensor, {device}")


def check_lengths(op: str, name: str, tensor: Tensor, batch: int, meaning: str) -> None:
    """One int32 vector of lengths or bounds per sequence."""
    check_dtype(op, name, tensor, (torch.int32,))
    check_shape(op, name, tensor, (batch,), meaning)


def check_per_head(
    op: str, name: str, tensor: Tensor, heads_name: str, heads: int, batch: int, or_else: str = ""
) -> None:
    """One float32 number per head, or per sequence and head."""
    check_dtype(op, name, tensor, (torch.float32,))
    if tensor.shape not in ((heads,), (batch, heads)):
        fail(
            op,
            name,
            f"has shape {tuple(tensor.shape)}",
            f"{or_else}({heads_name}) = ({heads},) or (batch, {heads_name}) = ({batch}, {heads})",
        )


def check_attention(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    out_scale: Tensor | None = None,
    rng_state: Tensor | None = None,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    out_dtype: torch.dtype | None = None,
) -> None:
    """Raise for shapes, dtypes, devices and options that no backend may accept."""
    check_dim(op, "q", q, "(total_q, num_heads, head_dim)")
    paged = block_table is not None
    for name, tensor in (("k", k), ("v", v)):
        if paged:
            check_dim(
                op, name, tensor, "(num_pages, num_kv_heads, page_size, head_dim) with block_table"
            )
        else:
            check_dim(op, name, tensor, "(total_k, num_kv_heads, head_dim) without block_table")
    check_dtype(op, "q", q, QUERY)
    if k.dtype != q.dtype:
        check_dtype(op, "k", k, tuple(dict.fromkeys((q.dtype, *QUANTISED))))
    check_dtype(op, "v", v, (k.dtype,))
    if v.shape[:-1] != k.shape[:-1]:
        fail(op, "v", f"has shape {tuple(v.shape)}", f"k's {tuple(k.shape)} in all but head_dim")
    num_heads, head_dim = q.shape[1], q.shape[2]
    num_kv_heads = k.shape[1]
    for name, size in (
        ("q's num_heads", num_heads),
        ("q's head_dim", head_dim),
        ("k's num_kv_heads", num_kv_heads),
        ("v's head_dim", v.shape[-1]),
        ("k's page_size", k.shape[-2] if paged else 1),
    ):
        if size == 0:
            fail(op, name, "is 0", "at least 1")
    if num_heads > 65535:  # dropout counts heads in 16 bits
        fail(op, "q's num_heads", f"is {num_heads}", "at most 65535")
    if num_heads % num_kv_heads:
        fail(
            op,
            "q's num_heads",
            f"is {num_heads}",
            f"a multiple of k's num_kv_heads, {num_kv_heads}",
        )
    if k.shape[-1] != head_dim:
        fail(op, "k", f"has head_dim {k.shape[-1]}", f"q's head_dim, {head_dim}")
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        check_rows(op, name, tensor)

    check_dim(op, "cu_seqlens_q", cu_seqlens_q, "(batch + 1)")
    check_dtype(op, "cu_seqlens_q", cu_seqlens_q, (torch.int32,))
    if cu_seqlens_q.shape[0] == 0:
        fail(op, "cu_seqlens_q", "is empty", "(batch + 1) entries, the first of them 0")
    batch = cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is not None:
        check_lengths(op, "cu_seqlens_k", cu_seqlens_k, batch + 1, "(batch + 1)")
    if seqused_k is not None:
        check_lengths(op, "seqused_k", seqused_k, batch, "(batch)")
    if block_table is not None:
        check_dim(op, "block_table", block_table, "(batch, max_pages)")
        check_dtype(op, "block_table", block_table, (torch.int32,))
        if block_table.shape[0] != batch:
            fail(
                op, "block_table", f"has {block_table.shape[0]} rows", f"one per sequence, {batch}"
            )
        if seqused_k is None and cu_seqlens_k is None:
            fail(
                op,
                "seqused_k",
                "is None",
                "key lengths by seqused_k or cu_seqlens_k with block_table",
            )
    for name, size in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if size < 0:
            fail(op, name, f"is {size}", "at least 0")

    if attn_bias is not None:
        check_dim(op, "attn_bias", attn_bias, "(1 or num_heads, total_q, max Lk)")
        check_dtype(op, "attn_bias", attn_bias, (*FLOAT, torch.bool))
        if attn_bias.shape[0] not in (1, num_heads):
            fail(
                op, "attn_bias", f"has {attn_bias.shape[0]} heads", f"1 or num_heads = {num_heads}"
            )
        if attn_bias.shape[1] != q.shape[0]:
            fail(op, "attn_bias", f"has {attn_bias.shape[1]} rows", f"total_q = {q.shape[0]}")
    if alibi_slopes is not None:
        check_per_head(op, "alibi_slopes", alibi_slopes, "num_heads", num_heads, batch)
    if sinks is not None:
        check_dtype(op, "sinks", sinks, (torch.float32,))
        check_shape(op, "sinks", sinks, (num_heads,), "(num_heads)")
    for name, scale in (
        ("q_descale", q_descale),
        ("k_descale", k_descale),
        ("v_descale", v_descale),
    ):
        if scale is not None and scale.shape != ():
            check_per_head(op, name, scale, "num_kv_heads", num_kv_heads, batch, "(), ")
        elif scale is not None:
            check_dtype(op, name, scale, (torch.float32,))
    out_dtype = out_dtype or q.dtype
    if out_dtype not in QUERY:
        fail(op, "out_dtype", f"is {names((out_dtype,))}", names(QUERY))
    if out_scale is not None:
        check_dtype(op, "out_scale", out_scale, (torch.float32,))
        if out_scale.shape not in ((), (1,)):
            fail(op, "out_scale", f"has shape {tuple(out_scale.shape)}", "() or (1,)")
        if out_dtype not in FLOAT8:
            fail(
                op,
                "out_scale",
                f"came with a {names((out_dtype,))} output",
                f"an output of {names(FLOAT8)}",
            )

    if softmax_scale is not None and not math.isfinite(softmax_scale):
        fail(op, "softmax_scale", f"is {softmax_scale}", "a finite number")
    for name, size in (
        ("window_size_left", window_size_left),
        ("window_size_right", window_size_right),
    ):
        if size < -1:
            fail(op, name, f"is {size}", "-1 (unbounded) or more")
    if not 0.0 <= softcap < math.inf:
        fail(op, "softcap", f"is {softcap}", "0 (off) or a positive finite number")
    if not 0.0 <= dropout_p < 1.0:
        fail(op, "dropout_p", f"is {dropout_p}", "a number in [0, 1)")
    if dropout_p > 0.0 and rng_state is None:
        fail(op, "rng_state", "is None", "a (2,) int64 tensor (seed, offset) when dropout_p > 0")
    if rng_state is not None:
        check_dtype(op, "rng_state", rng_state, (torch.int64,))
        check_shape(op, "rng_state", rng_state, (2,), "(seed, offset)")
    check_devices(
        op,
        q.device,
        {
            "k": k,
            "v": v,
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "seqused_k": seqused_k,
            "block_table": block_table,
            "attn_bias": attn_bias,
            "alibi_slopes": alibi_slopes,
            "sinks": sinks,
            "q_descale": q_descale,
            "k_descale": k_descale,
            "v_descale": v_descale,
            "out_scale": out_scale,
            "rng_state": rng_state,
        },
    )


def key_lengths(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor | None, seqused_k: Tensor | None
) -> Tensor:
    """Lk of every sequence, int32 `(batch,)`, wherever the call says it."""
    if seqused_k is not None:
        return seqused_k
    return (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).diff()


def visible_keys(
    query_len: int, key_len: int, causal: bool, window_size_left: int, window_size_right: int
) -> tuple[int, int]:
    """The half-open range of keys that some query of a sequence sees (masks by bias aside)."""
    if query_len == 0:
        return 0, 0
    past = key_len - query_len
    right = 0 if causal else window_size_right
    start = 0 if window_size_left < 0 else max(0, past - window_size_left)
    stop = key_len if right < 0 else min(key_len, past + query_len + right)
    return (start, stop) if start < stop else (0, 0)


def check_attention_values(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    attn_bias: Tensor | None = None,
    *_tensors: Tensor | None,
    causal: bool = False,
    window_size_left: int = -1,
    window_size_right: int = -1,
    **_scalars: object,
) -> None:
    """Raise for lengths, bounds and page ids that point outside the tensors. Reads tensors."""
    _check_bounds(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "total_q")
    if cu_seqlens_k is not None:
        last = None if block_table is not None else k.shape[0]
        _check_bounds(op, "cu_seqlens_k", cu_seqlens_k, last, "total_k")
    elif block_table is None:
        _check_bounds(op, "cu_seqlens_k (None: cu_seqlens_q)", cu_seqlens_q, k.shape[0], "total_k")
    query_lens = cu_seqlens_q.diff().tolist()
    key_lens = key_lengths(cu_seqlens_q, cu_seqlens_k, seqused_k).tolist()
    if seqused_k is not None and block_table is None:
        slots = key_lengths(cu_seqlens_q, cu_seqlens_k, None).tolist()
    else:
        slots = key_lens
    for b, (query_len, key_len, slot) in enumerate(zip(query_lens, key_lens, slots, strict=True)):
        if key_len < 0:
            fail(op, f"seqused_k[{b}]", f"is {key_len}", "at least 0")
        if key_len > slot:
            fail(op, f"seqused_k[{b}]", f"is {key_len}", f"at most the {slot} keys of cu_seqlens_k")
        if attn_bias is not None and query_len and key_len > attn_bias.shape[2]:
            fail(
                op,
                "attn_bias",
                f"has {attn_bias.shape[2]} columns",
                f"at least Lk[{b}] = {key_len}",
            )
        if block_table is not None:
            keys = visible_keys(query_len, key_len, causal, window_size_left, window_size_right)
            _check_pages(op, block_table[b], b, key_len, keys, k.shape[0], k.shape[2])


def _check_bounds(op: str, name: str, bounds: Tensor, total: int | None, total_name: str) -> None:
    values = bounds.tolist()
    if values[0] != 0:
        fail(op, f"{name}[0]", f"is {values[0]}", "0")
    for i, (before, after) in enumerate(itertools.pairwise(values), start=1):
        if after < before:
            fail(
                op, f"{name}[{i}]", f"is {after}, below {before} before it", "nondecreasing bounds"
            )
    if total is not None and values[-1] > total:
        fail(op, f"{name}[-1]", f"is {values[-1]}", f"at most {total_name} = {total}")


def _check_pages(
    op: str,
    pages: Tensor,
    b: int,
    key_len: int,
    keys: tuple[int, int],
    num_pages: int,
    page_size: int,
) -> None:
    needed = -(-key_len // page_size)
    if needed > pages.shape[0]:
        fail(
            op,
            "block_table",
            f"has {pages.shape[0]} pages of {page_size} for Lk[{b}] = {key_len}",
            f"at least {needed} columns",
            RuntimeError,
        )
    start, stop = keys[0] // page_size, -(-keys[1] // page_size)
    for i, page in enumerate(pages[start:stop].tolist(), start=start):
        if not 0 <= page < num_pages:
            fail(
                op,
                f"block_table[{b}, {i}]",
                f"is {page}",
                f"pages 0 to {num_pages - 1}",
                IndexError,
            )
