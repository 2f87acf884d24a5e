"""What flash-attn's functions return, and their argument `out`."""

from typing import TypeAlias

from torch import Tensor

from torch_paged_attn.integrations._storages import check_storages, readable

Result: TypeAlias = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, None]


def check_out(name: str, out: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raise ValueError unless `out`, if given, has the result's shape and its storage."""
    if out is not None and out.shape != (shape := (*q.shape[:-1], v.shape[-1])):
        raise ValueError(f"{name}: out must have shape {shape}, got {tuple(out.shape)}")
    if out is not None and readable(q):
        check_storages(name, out=out)


def returned(
    result: Tensor,
    lse: Tensor,
    out: Tensor | None,
    return_attn_probs: bool,
    return_softmax_lse: bool,
) -> Result:
    """What a function returns: the result, in `out` if that is given, and softmax_lse as asked."""
    if out is not None:
        result = out.copy_(result)
    if return_attn_probs:
        return result, lse, None
    return (result, lse) if return_softmax_lse else result


def lse_per_sequence(lse: Tensor, batch: int, seqlen: int) -> Tensor:
    """lse (num_heads, batch * seqlen) as (batch, num_heads, seqlen)."""
    return lse.reshape(lse.shape[0], batch, seqlen).transpose(0, 1).contiguous()
