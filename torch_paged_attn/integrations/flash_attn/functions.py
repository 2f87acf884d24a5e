"""`flash_attn_func` and `flash_attn_varlen_func`, by `flash_varlen`."""

from torch import Tensor

from torch_paged_attn.integrations._arguments import (
    Window,
    check_tensors,
    flash_varlen_arguments,
    of_equal_lengths,
    one_of,
    refuse,
)
from torch_paged_attn.integrations._storages import with_whole_rows
from torch_paged_attn.integrations.flash_attn._results import (
    Result,
    check_out,
    lse_per_sequence,
    returned,
)
from torch_paged_attn.ops import flash_varlen


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention over a batch of equally long sequences.

    q: (batch, seqlen_q, num_heads, head_dim)
    k, v: (batch, seqlen_k, num_kv_heads, head_dim), (..., head_dim_v)
    qv: (batch, seqlen_q, num_heads, head_dim_v), q's latents of MLA: adds qv . v to q . k
    Any strides; a tensor whose last dimension is not contiguous is copied.

    Returns out (batch, seqlen_q, num_heads, head_dim_v); with return_softmax_lse also softmax_lse
    (batch, num_heads, seqlen_q); with return_attn_probs (out, softmax_lse, None).
    """
    refuse("flash_attn_func", attention_chunk=attention_chunk)
    if learnable_sink is not None:  # the name in FlashAttention-4
        s_aux = one_of("flash_attn_func", s_aux=s_aux, learnable_sink=learnable_sink)
    given = {"q": q, "k": k, "v": v} | ({} if qv is None else {"qv": qv})
    check_tensors("flash_attn_func", **given)
    for name, tensor in given.items():
        if tensor.dim() != 4 or tensor.shape[0] != q.shape[0]:
            raise ValueError(
                f"flash_attn_func: {name} must be (batch, seqlen, heads, head_dim) with q's batch, "
                f"got shape {tuple(tensor.shape)}"
            )
    q = with_whole_rows("flash_attn_func", "q", q)
    k = with_whole_rows("flash_attn_func", "k", k)
    v = with_whole_rows("flash_attn_func", "v", v)
    batch, seqlen_q = q.shape[:2]
    check_out("flash_attn_func", out, q, v)
    extra = s_aux if qv is None or not qv.requires_grad else qv
    arguments = flash_varlen_arguments(
        "flash_attn_func",
        **of_equal_lengths(q, k, v, extra),
        qv=None if qv is None else with_whole_rows("flash_attn_func", "qv", qv).flatten(0, 1),
        out=out,
        dropout_p=dropout_p,
        deterministic=deterministic,
        window_size=window_size,
        s_aux=s_aux,
        return_attn_probs=return_attn_probs,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
    )
    result, lse = flash_varlen(**arguments)
    result = result.reshape(batch, seqlen_q, *result.shape[1:])
    if return_attn_probs or return_softmax_lse:
        lse = lse_per_sequence(lse, batch, seqlen_q)
    return returned(result, lse, out, return_attn_probs, return_softmax_lse)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Tensor | None = None,
    s_aux: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Tensor | None = None,
    seqused_q: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    qv: Tensor | None = None,
    attention_chunk: int = 0,
    learnable_sink: Tensor | None = None,
) -> Result:
    """Attention over a packed batch of sequences, with packed or paged keys.

    q: (total_q, num_heads, head_dim); rows past cu_seqlens_q[-1] are padding
    k, v: (total_k, num_kv_heads, head_dim), or with block_table (batch, max_pages) int32 pages
        (num_pages, page_size, num_kv_heads, head_dim); v may have a head_dim of its own
    cu_seqlens_q, cu_seqlens_k: (batch + 1,) int32
    seqused_k: (batch,) int32, the number of keys of each sequence, if it is not the difference of
        cu_seqlens_k
    qv: (total_q, num_heads, head_dim_v), q's latents of MLA: adds qv . v to q . k
    Any strides; q, k or v whose last dimension is not contiguous is copied, pages too.

    Returns out (total_q, num_heads, head_dim_v); with return_softmax_lse also softmax_lse
    (num_heads, total_q); with return_attn_probs (out, softmax_lse, None).
    """
    refuse(
        "flash_attn_varlen_func",
        seqused_q=seqused_q,
        leftpad_k=leftpad_k,
        attention_chunk=attention_chunk,
    )
    if learnable_sink is not None:  # the name in FlashAttention-4
        s_aux = one_of("flash_attn_varlen_func", s_aux=s_aux, learnable_sink=learnable_sink)
    check_tensors("flash_attn_varlen_func", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q)
    if qv is not None:
        check_tensors("flash_attn_varlen_func", qv=qv)
        qv = with_whole_rows("flash_attn_varlen_func", "qv", qv)
    q = with_whole_rows("flash_attn_varlen_func", "q", q)
    k, v = (
        with_whole_rows("flash_attn_varlen_func", "k", k),
        with_whole_rows("flash_attn_varlen_func", "v", v),
    )
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    check_out("flash_attn_varlen_func", out, q, v)
    arguments = flash_varlen_arguments(
        "flash_attn_varlen_func",
        q,
        k,
        v,
        out=out,
        qv=qv,
        dropout_p=dropout_p,
        deterministic=deterministic,
        window_size=window_size,
        s_aux=s_aux,
        return_attn_probs=return_attn_probs,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
    )
    result, lse = flash_varlen(**arguments)
    return returned(result, lse, out, return_attn_probs, return_softmax_lse)
