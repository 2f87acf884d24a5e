"""flash-attn's functions below autograd, which ring attention and trainers call.

`_flash_attn_forward`, `_flash_attn_varlen_forward` and their backwards, with the arguments and
results of flash-attn 2.8. A row that sees no key has a softmax_lse of -inf here, where flash-attn
has +inf; `merge_states` takes both. `zero_tensors` changes nothing.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._arguments import flash_varlen_arguments, refuse
from torch_paged_attn.integrations.flash_attn._results import lse_per_sequence
from torch_paged_attn.ops import flash_varlen, flash_varlen_backward

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention over a batch of equally long sequences: q (batch, seqlen_q, num_heads, head_dim).

    Returns out, softmax_lse (batch, num_heads, seqlen_q), an empty tensor and rng_state (2,).
    """
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    out, lse, nothing, rng_state = _flash_attn_varlen_forward(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        _constants.multiples(seqlen_q, batch, q),
        _constants.multiples(seqlen_k, batch, q),
        seqlen_q,
        seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        return_softmax,
    )
    lse = lse_per_sequence(lse, batch, seqlen_q)
    return out.unflatten(0, (batch, seqlen_q)), lse, nothing, rng_state


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same over a packed batch: q (total_q, num_heads, head_dim).

    Returns out, softmax_lse (num_heads, total_q), an empty tensor and rng_state (2,).
    """
    refuse("_flash_attn_varlen_forward", leftpad_k=leftpad_k)
    if block_table is not None:
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    arguments = flash_varlen_arguments(
        "_flash_attn_varlen_forward",
        q,
        k,
        v,
        out=None,
        window_size=(window_size_left, window_size_right),
        s_aux=None,
        return_attn_probs=return_softmax,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        seqused_k=seqused_k,
        block_table=block_table,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        dropout_p=dropout_p,
    )
    out, lse = flash_varlen(**arguments)
    rng_state = arguments.get("rng_state")
    if rng_state is None:
        rng_state = torch.zeros(2, dtype=torch.int64, device=q.device)
    return out, lse, q.new_empty(0), rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Write the gradients to dq, dk and dv, shaped like q, k and v; one that is None is not
    computed. softmax_lse is that of the forward, (batch, num_heads, seqlen_q), or of more keys.

    Returns the sums of dout * out, (batch, num_heads, seqlen_q) float32.
    """
    (batch, seqlen_q), seqlen_k = q.shape[:2], k.shape[1]
    results = [x if x is None else torch.empty_like(x.flatten(0, 1)) for x in (dq, dk, dv)]
    sums = _flash_attn_varlen_backward(
        dout.flatten(0, 1),
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        out.flatten(0, 1),
        softmax_lse.transpose(0, 1).flatten(1),
        results[0],
        results[1],
        results[2],
        _constants.multiples(seqlen_q, batch, q),
        _constants.multiples(seqlen_k, batch, q),
        seqlen_q,
        seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state,
    )
    for given, result in zip((dq, dk, dv), results, strict=True):
        if given is not None and result is not None:
            given.copy_(result.view(given.shape))
    return lse_per_sequence(sums, batch, seqlen_q)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor,
    max_seqlen_k: int | Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """The same of a packed batch; softmax_lse and the result are (num_heads, total_q)."""
    options: dict[str, Any] = {}
    if dropout_p > 0:
        options = {"dropout_p": dropout_p, "rng_state": rng_state}
    found = flash_varlen_backward(
        *(dout, None, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k),
        q.shape[0] if isinstance(max_seqlen_q, Tensor) else max_seqlen_q,
        k.shape[0] if isinstance(max_seqlen_k, Tensor) else max_seqlen_k,
        alibi_slopes=alibi_slopes,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size_left=window_size_left,
        window_size_right=window_size_right,
        softcap=softcap,
        deterministic=deterministic,
        output_mask=(dq is not None, dk is not None, dv is not None, False, False),
        **options,
    )
    for given, gradient in zip((dq, dk, dv), found, strict=False):
        if given is not None:
            given.copy_(gradient)
    return (dout.float() * out.float()).sum(-1).T.contiguous()
