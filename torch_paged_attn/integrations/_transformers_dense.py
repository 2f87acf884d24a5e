"""Attention to the keys of a dense cache of Transformers, (batch, heads, length, head_dim).

A cache that is a tensor of its own is read where it is: its tokens are rows of one list, some of
which no sequence owns, and `k_start` says where each sequence's keys start. No number of such a
call is compiled into a kernel, and nothing is copied.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._arguments import asks_gradient
from torch_paged_attn.integrations._kvcache import ATTENDING, in_one_call
from torch_paged_attn.integrations._transformers_batching import rows
from torch_paged_attn.integrations._transformers_short import ShortMask
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops.attend_cache import OP as ATTEND
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.repeated import repeat


@functools.cache
def _has_k_start(device_type: str) -> bool:
    """Whether the backend that serves a device reads packed keys from any row on."""
    backend, _ = serving_device(torch.device(device_type))
    return backend is not None and "k_start" not in backend.lacks


def attend_short(
    query: Tensor, key: Tensor, value: Tensor, mask: ShortMask, options: dict[str, Any]
) -> Tensor:
    """Attention under a mask of `make_mask`, to keys that are no padding."""
    batch, _, query_len, _ = query.shape
    window = mask.window
    # a window beyond all keys would only keep fast kernels away
    if window >= max(mask.written, query_len):
        window = -1
    options = options | {"causal": mask.causal, "window_size_left": window}
    options["window_size_right"] = window
    if mask.cu_seqlens is not None:
        q, k, v = rows(query), rows(key), rows(value)
        return flash_varlen(q, k, v, mask.cu_seqlens, **options)[0]
    if mask.keys is None:
        return attend_dense(query, key, value, mask.written, options)
    ranges = mask.ranges()
    # without a causal mask or window no position matters
    fits = ranges is not None and (ranges.end_together or not (mask.causal or mask.window >= 0))
    is_read_in_place = fits and _has_k_start(key.device.type)
    if ranges is None or not is_read_in_place or wants_gradient(query, key, value, options):
        return _packed(query, key, value, mask, options)
    k, v, apart = token_rows(key, value)
    return flash_varlen(
        rows(query),
        k,
        v,
        _constants.multiples(query_len, batch, query),
        None,
        query_len,
        mask.written,
        seqused_k=ranges.lengths,
        k_start=_constants.multiples(apart, batch, key)[:-1] + ranges.first,
        **options,
    )[0]


def attend_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: ShortMask,
    softmax_scale: float | None,
    softcap: float,
) -> Tensor | None:
    """Attention of one query in each row, of all its heads: (batch, 1, num_heads, head_dim_v). None
    if the cache is not contiguous, or the call is of another kind: the caller has other ways.

    Each head of a row's keys is a sequence of one head. A cache that grows by a token has other
    strides in each step, but not its rows of head_dim numbers, so that the host plans a step in
    half the time; and the layers of a step share all tensors of lengths.
    """
    kind = query.shape, key.shape, value.shape, softmax_scale, softcap
    if (known := mask.steps.get(kind)) is not None:
        # an earlier layer's call, whose guard checks all that is not in `kind`
        behind, options, shape = known
        results = repeat(ATTEND, (query, key, value, *behind), options)
        if results is not NotImplemented:
            return results[0].view(shape)
    batch, num_heads, query_len, dim = query.shape
    rows_shape = batch, heads, apart, dim_v = value.shape
    are_rows = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    if query_len != 1 or mask.cu_seqlens is not None or not are_rows:
        return None
    if key.shape[:3] != rows_shape[:3] or asks_gradient(query, key, value):
        return None
    if not _has_k_start(key.device.type):
        return None
    rows_of = mask.of_heads(batch, heads, apart)
    if rows_of is None:
        return None
    window = mask.window if mask.window < mask.written else -1
    options = {
        "max_seqlen_q": 1,
        "max_seqlen_k": mask.written,
        "softmax_scale": softmax_scale,
        "softcap": softcap,
        "causal": mask.causal,
        "window_size_left": window,
        "window_size_right": window,
    }
    shape = batch, 1, num_heads, dim_v
    others = None, rows_of.cu_seqlens_q, None, None, None, None, None, rows_of.first
    args = query, key, value, rows_of.lengths, *others
    found = in_one_call(ATTENDING, args, options)
    if found is not None:
        mask.steps[kind] = (rows_of.lengths, *others), options, shape
    else:
        found = flash_varlen(
            query.view(batch * heads, num_heads // heads, dim),
            key.view(-1, 1, dim),
            value.view(-1, 1, dim_v),
            rows_of.cu_seqlens_q,
            None,
            seqused_k=rows_of.lengths,
            k_start=rows_of.first,
            **options,
        )
    return found[0].view(shape)


def attend_dense(
    query: Tensor, key: Tensor, value: Tensor, length: int, options: dict[str, Any]
) -> Tensor:
    """Attention to the first `length` keys of each row."""
    batch, _, query_len, _ = query.shape
    bounds = _constants.multiples(query_len, batch, query)
    is_self = query_len == length == key.shape[2]
    if is_self and (_is_token_major(key, value) or wants_gradient(query, key, value, options)):
        q, k, v = rows(query), rows(key), rows(value)
        return flash_varlen(q, k, v, bounds, None, query_len, length, **options)[0]
    lengths = _constants.repeated(length, batch, key)
    return attend_rows(query, key, value, lengths, options, length)


def attend_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Tensor,
    options: dict[str, Any],
    longest: int | None = None,
    attend: Callable[..., tuple[Tensor, Tensor]] = flash_varlen,
) -> Tensor:
    """Attention to the first `lengths` (batch,) int32 keys of each row; `longest`: a bound;
    `attend`: a function with the arguments of `flash_varlen`.
    """
    batch, _, query_len, _ = query.shape
    longest = key.shape[2] if longest is None else longest
    q, bounds = rows(query), _constants.multiples(query_len, batch, query)
    hints = query_len, longest
    if wants_gradient(query, key, value, options):
        k, v = rows(key), rows(value)
        key_bounds = _constants.multiples(key.shape[2], batch, key)
        return attend(q, k, v, bounds, key_bounds, *hints, seqused_k=lengths, **options)[0]
    if torch.compiler.is_compiling() or not _has_k_start(key.device.type):
        # a compiler may lay tensors out anew; each row is one page
        table = _constants.row_numbers(batch, key)
        return attend(q, key, value, bounds, None, *hints, lengths, block_table=table, **options)[0]
    k, v, apart = token_rows(key, value)
    start = _constants.multiples(apart, batch, key)[:-1]
    return attend(q, k, v, bounds, None, *hints, lengths, k_start=start, **options)[0]


def token_rows(key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, int]:
    """key and value as (tokens, heads, head_dim), and by how many rows sequences lie apart.
    Nothing is copied if both have their tokens the same number of rows apart.
    """
    apart = _rows_apart(key)
    if apart is None or apart != _rows_apart(value) or not _has_k_start(key.device.type):
        return rows(key), rows(value), key.shape[2]
    return _token_rows(key, apart), _token_rows(value, apart), apart


def _rows_apart(x: Tensor) -> int | None:
    batch, _, length, _ = x.shape
    of_batch, _, of_token, of_number = x.stride()
    if of_number != 1 or of_token <= 0 or length < 2:
        return None
    if batch == 1:
        return length
    return of_batch // of_token if of_batch % of_token == 0 else None


def _token_rows(x: Tensor, apart: int) -> Tensor:
    batch, heads, length, dim = x.shape
    _, of_head, of_token, _ = x.stride()
    shape = (batch - 1) * apart + length, heads, dim
    return x.as_strided(shape, (of_token, of_head, 1))


def _is_token_major(*tensors: Tensor) -> bool:
    """Whether `rows` copies none of the tensors."""
    if torch.compiler.is_compiling():
        return True
    return all(_rows_apart(x) in (None, x.shape[2]) for x in tensors)


def wants_gradient(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> bool:
    """Whether the result needs a gradient, which a view of overlapping rows would make slow."""
    extra = (options.get("attn_bias"), options.get("sinks"))
    return any(asks_gradient(query, key, value, x) for x in extra)


def _packed(
    query: Tensor, key: Tensor, value: Tensor, mask: ShortMask, options: dict[str, Any]
) -> Tensor:
    """Tokens that are no padding, end to end. Other queries' results are 0."""
    tokens = mask.packing(query.shape[2])
    q = rows(query)
    # a static cache is longer than its written part
    k, v = (rows(x[:, :, : mask.written])[tokens.keys] for x in (key, value))
    bounds = tokens.cu_seqlens_q, tokens.cu_seqlens_k
    packed = flash_varlen(q[tokens.queries], k, v, *bounds, **options)[0]
    out = packed.new_zeros(q.shape[0], *packed.shape[1:])  # under autocast of packed's type
    return out.index_copy(0, tokens.queries, packed)
