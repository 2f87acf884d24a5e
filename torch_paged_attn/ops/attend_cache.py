"""The operator `paged_attn::attend_cache`: `flash_attn_with_kvcache` without new tokens, on a GPU.

It is internal, as `append_and_attend` is, and for the same reason: it takes the arguments as they
are. To make of them the views and bounds that `flash_varlen` takes, in Python, takes longer on the
host than that call. `out` has q's shape, but v's head_dim.

With `k_start` it is a decoding step of Transformers: one query in each row, over contiguous keys
(batch, num_kv_heads, length, head_dim). Each head of a row's keys is then a sequence of one head,
and cu_seqlens_q, cache_seqlens and k_start, in rows of head_dim numbers, are those of all heads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import numbers_of
from torch_paged_attn.ops._library import LIBRARY
from torch_paged_attn.ops.backend import serving
from torch_paged_attn.ops.checks import check_dim, fail, refuse
from torch_paged_attn.ops.repeated import remember

OP = "attend_cache"


def rows_of(q: Tensor, k_cache: Tensor, v_cache: Tensor, cu_seqlens_q: Tensor | None) -> Tensor:
    """q as rows `(total_q, num_heads, head_dim)`, or ValueError for shapes and strides of which
    there is no view.
    """
    pages = "(num_pages, page_size, num_kv_heads, head_dim)"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_dim(OP, name, x, pages)
    if q.dtype.itemsize == 1:
        fail(OP, "q", q.dtype, "a dtype that out may have")
    if cu_seqlens_q is not None:
        check_dim(OP, "q", q, "(total_q, num_heads, head_dim)")
        return q
    check_dim(OP, "q", q, "(batch, seqlen_q, num_heads, head_dim)")
    rows = q.flatten(0, 1)
    if rows.data_ptr() != q.data_ptr():
        fail(OP, "q", f"strides {q.stride()}", "contiguous over batch and sequence")
    return rows


def rows_of_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of a step with `k_start` as `flash_varlen` takes them, or ValueError."""
    for name, x in (("q", q), ("k_cache", k), ("v_cache", v)):
        check_dim(OP, name, x, "(batch, heads, length, head_dim)")
        if not x.is_contiguous():
            fail(OP, name, f"strides {x.stride()}", "contiguous")
    batch, heads, _, dim = k.shape
    if q.shape[2] != 1 or q.shape[0] != batch or not heads or q.shape[1] % heads:
        fail(OP, "q", f"shape {tuple(q.shape)}", f"one query for each row of k {tuple(k.shape)}")
    if v.shape[:3] != k.shape[:3]:
        fail(OP, "v_cache", f"shape {tuple(v.shape)}", f"{tuple(k.shape[:3])} + (head_dim_v,)")
    rows = q.view(batch * heads, q.shape[1] // heads, q.shape[3])
    return rows, k.view(-1, 1, dim), v.view(-1, 1, v.shape[3])


def fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """What the operator returns, in shape and dtype."""
    if args[8:] and args[8] is not None:
        heads = q.shape[0] * k_cache.shape[1]
        out = q.new_empty((heads, q.shape[1] // k_cache.shape[1], v_cache.shape[3]))
        return out, q.new_empty((out.shape[1], heads), dtype=torch.float32)
    total, num_heads = q.shape[:-2].numel(), q.shape[-2]
    out = q.new_empty((*q.shape[:-1], numbers_of(v_cache)))
    return out, q.new_empty((num_heads, total), dtype=torch.float32)


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    backend, reason = serving("CUDA")
    if backend is None:
        refuse(OP, reason)
    if (recent := backend.recent(OP)) is not None:
        remember(attend_cache, recent)
    return backend.function(OP)


def _on_gpu(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _kernel()(*args, **options)


LIBRARY.define(
    f"{OP}(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens,"
    " Tensor? block_table=None, Tensor? cu_seqlens_q=None, Tensor? alibi_slopes=None,"
    " Tensor? sinks=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None,"
    " Tensor? k_start=None, *, int max_seqlen_q=0, int max_seqlen_k=0, float? softmax_scale=None,"
    " bool causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0.0)"
    " -> (Tensor out, Tensor softmax_lse)"
)
torch.library.register_fake(f"paged_attn::{OP}", fake, lib=LIBRARY)
LIBRARY.impl(OP, _on_gpu, "CUDA")
# its caller has checked that no input requires grad
LIBRARY.impl(OP, torch.library.fallthrough_kernel, "Autograd")
attend_cache = torch.ops.paged_attn.attend_cache.default
