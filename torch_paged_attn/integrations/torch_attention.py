"""CPU kernels for `torch.nn.attention.varlen`.

    import torch_paged_attn
    from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

    activate_flash_attention_impl("PAGED_ATTN")

`varlen_attn` and `varlen_attn_out`, for which PyTorch has no CPU kernel, then run with packed or
paged keys, GQA and windows, under torch.compile and with gradients.
`restore_flash_attention_impl()` removes the kernels. Importing `torch_paged_attn` only registers
the name.

The functions below are kernels of PyTorch's operators `aten::_flash_attention_forward`,
`_flash_attention_forward_no_dropout_inplace` and `_flash_attention_backward`, with their arguments
and results. Works with torch 2.11 to 2.15 (2.11 has neither pages nor `out=`).
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.ops import flash_varlen

KERNELS = {
    "_flash_attention_forward": "forward",
    "_flash_attention_forward_no_dropout_inplace": "forward_inplace",
    "_flash_attention_backward": "backward",
}


class Handle:
    """Keeps the kernels registered until `remove`."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library: torch.library.Library | None = library

    def remove(self) -> None:
        # a library removes its kernels when it is deleted
        self.library = None


def activate() -> Handle:
    """Register the kernels, for `torch.nn.attention.activate_flash_attention_impl`."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    for op, function in KERNELS.items():
        if hasattr(torch.ops.aten, op):  # torch 2.11 has no operator that writes in place
            library.impl(op, globals()[function], "CPU")
    return Handle(library)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_forward`.

    query: (total_q, num_heads, head_dim); without cum_seq_q (batch, seqlen_q, num_heads, head_dim)
    key, value: packed the same way, or with block_table in pages (num_pages, page_size,
        num_kv_heads, head_dim)

    Returns output like query, logsumexp (num_heads, total_q) or (batch, num_heads, seqlen_q)
    float32, the state of the random numbers (2,) uint64, and two empty tensors.
    """
    if return_debug_mask:
        raise NotImplementedError(
            "aten::_flash_attention_forward: PAGED_ATTN does not support return_debug_mask=True"
        )
    rng_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p > 0:
        rng_state = torch.randint(2**62, (2,), device=query.device)
    if options.get("block_table") is not None:
        key, value = key.transpose(1, 2), value.transpose(1, 2)
    dense, tensors = _as_packed(query, key, value, cum_seq_q, cum_seq_k)
    out, lse = flash_varlen(
        *tensors,
        max_seqlen_q=max_q,
        max_seqlen_k=max_k,
        dropout_p=dropout_p,
        rng_state=rng_state if dropout_p > 0 else None,
        **_options(is_causal, **options),
    )
    if dense:
        batch, seqlen = query.shape[:2]
        out = out.unflatten(0, (batch, seqlen))
        lse = lse.unflatten(1, (batch, seqlen)).transpose(0, 1).contiguous()
    nothing = query.new_empty(0)
    return out, lse, rng_state.view(torch.uint64), nothing, nothing.clone()


def forward_inplace(out: Tensor, query: Tensor, *args: Any, **options: Any) -> Tensor:
    """`aten::_flash_attention_forward_no_dropout_inplace`: writes to out, returns logsumexp."""
    result, lse, *_ = forward(query, *args, **options)
    out.copy_(result)
    return lse


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten::_flash_attention_backward`: the gradients of query, key and value."""
    dense, (q, k, v, cu_seqlens_q, cu_seqlens_k) = _as_packed(
        query, key, value, cum_seq_q, cum_seq_k
    )
    if dense:
        grad_out, out = grad_out.flatten(0, 1), out.flatten(0, 1)
        logsumexp = logsumexp.transpose(0, 1).flatten(1)
    gradients = torch.ops.paged_attn.flash_varlen_backward(
        grad_out,
        None,
        *(q, k, v, out, logsumexp, cu_seqlens_q, cu_seqlens_k, max_q, max_k),
        rng_state=rng_state.view(torch.int64) if dropout_p > 0 else None,
        dropout_p=dropout_p,
        output_mask=[True, True, True, False, False],
        **_options(is_causal, **options),
    )
    like = zip(gradients, (query, key, value), strict=False)
    dq, dk, dv = (gradient.view(x.shape) for gradient, x in like)
    return dq, dk, dv


def _as_packed(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None
) -> tuple[bool, tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]]:
    """Whether the tensors are (batch, seqlen, ...) instead of packed; and q, k, v, cu_seqlens_q and
    cu_seqlens_k for `flash_varlen`.
    """
    if cum_seq_q is not None:
        return False, (query, key, value, cum_seq_q, cum_seq_k)
    cu_seqlens_q = _constants.multiples(query.shape[1], query.shape[0], query)
    cu_seqlens_k = _constants.multiples(key.shape[1], query.shape[0], query)
    packed = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
    return True, (*packed, cu_seqlens_q, cu_seqlens_k)


def _options(
    is_causal: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    num_splits: int | None = None,
    **tensors: Tensor | None,
) -> dict[str, Any]:
    """PyTorch's options as keyword arguments of `flash_varlen`. num_splits is ignored: it does not
    change results.
    """
    return {
        "softmax_scale": scale,
        "causal": is_causal,
        "window_size_left": -1 if window_size_left is None else window_size_left,
        "window_size_right": -1 if window_size_right is None else window_size_right,
        **{name: tensor for name, tensor in tensors.items() if tensor is not None},
    }
