"""FlashAttention-3's module `flash_attn_interface`, with its arguments in its order.

As there, `return_attn_probs` and `return_softmax_lse` give (out, softmax_lse). These arguments do
not change results: `num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`.
"""

import torch
from torch import Tensor

from torch_paged_attn.integrations._arguments import Window, check_tensors
from torch_paged_attn.integrations._storages import check_storages, readable
from torch_paged_attn.integrations.flash_attn import functions, with_kvcache
from torch_paged_attn.integrations.flash_attn._results import Result
from torch_paged_attn.ops import merge_states

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn.flash_attn_func` of q (batch, seqlen_q, num_heads, head_dim), and k and v."""
    return functions.flash_attn_func(
        *(q, k, v),
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        return_softmax_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` of qkv (batch, seqlen, 3, num_heads, head_dim), or with num_heads_q of
    (batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim).
    """
    name = "flash_attn_qkvpacked_func"
    check_tensors(name, qkv=qkv)
    q: Tensor
    if num_heads_q is None:
        if qkv.dim() != 5 or qkv.shape[2] != 3:
            raise ValueError(
                f"{name}: qkv must be (batch, seqlen, 3, num_heads, head_dim), got shape"
                f" {tuple(qkv.shape)}"
            )
        q, k, v = qkv.unbind(2)
    else:
        rest = qkv.shape[2] - num_heads_q if qkv.dim() == 4 else -1
        if rest < 2 or rest % 2:
            raise ValueError(
                f"{name}: qkv must be (batch, seqlen, num_heads_q + 2 * num_kv_heads, head_dim),"
                f" got shape {tuple(qkv.shape)} and num_heads_q {num_heads_q}"
            )
        q, k, v = qkv.split([num_heads_q, rest // 2, rest // 2], 2)
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size),
        *(attention_chunk, softcap),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn.flash_attn_varlen_func` of q (total_q, num_heads, head_dim), and k and v."""
    return functions.flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        softmax_scale=softmax_scale,
        causal=causal,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        return_softmax_lse=return_attn_probs,
    )


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """`flash_attn.flash_attn_with_kvcache`; pages are page_table (batch, max_pages) int32."""
    return with_kvcache.flash_attn_with_kvcache(
        *(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin),
        *(cache_seqlens, cache_batch_idx, cache_leftpad),
        qv=qv,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new,
        max_seqlen_q=max_seqlen_q,
        rotary_seqlens=rotary_seqlens,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        rotary_interleaved=rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
    )


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint key sets into attention over their union.

    out_partial: (parts, batch, seqlen, num_heads, head_dim) float32
    lse_partial: (parts, batch, seqlen, num_heads) float32
    out: (batch, seqlen, num_heads, head_dim), to which the result is written
    out_dtype: of the result; None: that of `out`, or of out_partial

    Returns out and softmax_lse (batch, seqlen, num_heads) float32.
    """
    name = "flash_attn_combine"
    check_tensors(name, out_partial=out_partial, lse_partial=lse_partial)
    if out_partial.dim() != 5 or not len(out_partial):
        raise ValueError(
            f"{name}: out_partial must be (parts, batch, seqlen, num_heads, head_dim), got shape"
            f" {tuple(out_partial.shape)}"
        )
    if lse_partial.shape != out_partial.shape[:4]:
        raise ValueError(
            f"{name}: lse_partial must have shape {tuple(out_partial.shape[:4])}, got"
            f" {tuple(lse_partial.shape)}"
        )
    if out is not None and readable(out):
        check_storages(name, out=out)
    batch, seqlen = out_partial.shape[1:3]
    outs = out_partial.flatten(1, 2).unbind(0)
    lses = lse_partial.flatten(1, 2).transpose(1, 2).unbind(0)
    merged, lse = outs[0], lses[0]
    for part, part_lse in zip(outs[1:], lses[1:], strict=True):
        merged, lse = merge_states(merged, lse, part, part_lse)
    dtype = out_dtype or (out_partial.dtype if out is None else out.dtype)
    merged = merged.unflatten(0, (batch, seqlen)).to(dtype)
    lse = lse.transpose(0, 1).unflatten(0, (batch, seqlen))
    return (merged if out is None else out.copy_(merged)), lse
