"""flash-attn's functions that take q, k and v, or k and v, in one tensor. Nothing is copied."""

from typing import Any

from torch import Tensor

from torch_paged_attn.integrations._arguments import check_tensors
from torch_paged_attn.integrations.flash_attn._results import Result
from torch_paged_attn.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_varlen_func,
)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim)."""
    _check("flash_attn_qkvpacked_func", "qkv", qkv, "(batch, seqlen, 3, num_heads, head_dim)")
    q, k, v = qkv.unbind(2)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of q and kv (batch, seqlen_k, 2, num_kv_heads, head_dim)."""
    _check("flash_attn_kvpacked_func", "kv", kv, "(batch, seqlen_k, 2, num_kv_heads, head_dim)")
    k, v = kv.unbind(2)
    return flash_attn_func(
        q, k, v,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of qkv (total, 3, num_heads, head_dim); cu_seqlens (batch + 1,)
    int32 is that of queries and of keys.
    """
    _check("flash_attn_varlen_qkvpacked_func", "qkv", qkv, "(total, 3, num_heads, head_dim)")
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` of q and kv (total_k, 2, num_kv_heads, head_dim)."""
    _check("flash_attn_varlen_kvpacked_func", "kv", kv, "(total_k, 2, num_kv_heads, head_dim)")
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def _check(op: str, name: str, packed: Any, shape: str) -> None:
    """Raise unless `packed` has the number of dimensions of `shape`, and its third dimension from
    the end is 3 (name "qkv") or 2 ("kv").
    """
    check_tensors(op, **{name: packed})
    parts = len(name)
    if packed.dim() != shape.count(",") + 1 or packed.shape[-3] != parts:
        raise ValueError(f"{op}: {name} must be {shape}, got shape {tuple(packed.shape)}")
