"""Contract of `paged_attn::blocksparse_backward`: the gradients of `blocksparse`'s inputs."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops._gradients import OnceDifferentiable
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_gradients import check_backward
from torch_paged_attn.ops.blocksparse import check_layout, check_layout_values
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    call = BackwardCall.blocksparse(*args, **kwargs)
    check_backward(call)
    check_layout(call.named_forward())


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and layout entries out of range. Reads tensors on the host."""
    check_layout_values(BackwardCall.blocksparse(*args, **kwargs).named_forward())


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Empty results of the op's shapes and dtypes."""
    return BackwardCall.blocksparse(*args, **kwargs).new_results()


_blocksparse_backward = operator_of(
    define(
        schema("blocksparse_backward"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=BackwardCall.blocksparse,
        derivative=OnceDifferentiable("blocksparse_backward"),
    )
)


@public
@described
def blocksparse_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`flash_varlen_backward` over a block-sparse layout: the gradients of `blocksparse`'s inputs.

    Cost follows the number of listed blocks. The layout itself has no gradient.

    Args:
        {arguments}

    Results are those of `flash_varlen_backward`; errors too, and those of `blocksparse` for
    layouts.
    """
    layout = crow_indices, col_indices
    first = dout, dlse, q, k, v, *layout, out, softmax_lse, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, None, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, *tensors
    return call_operator(_blocksparse_backward, args, options)
