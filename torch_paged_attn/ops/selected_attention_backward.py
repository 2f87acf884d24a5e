"""Contract of `paged_attn::selected_attention_backward`: gradients of `selected_attention`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops._gradients import OnceDifferentiable
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.attention_gradients import check_backward
from torch_paged_attn.ops.checks import fail
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.selected_checks import check_selected, check_selected_values
from torch_paged_attn.ops.signature import described, schema


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    call = BackwardCall.selected_attention(*args, **kwargs)
    forward = call.named_forward()
    if forward.is_slots:
        came = f"shape {tuple(forward.k.shape)}"
        fail(call.op, "k", came, "packed keys (total_k, num_kv_heads, head_dim)")
    check_selected(forward)
    check_backward(call)


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths and lists out of range. Reads tensors on the host."""
    check_selected_values(BackwardCall.selected_attention(*args, **kwargs).named_forward())


def fake(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Empty results of the op's shapes and dtypes."""
    return BackwardCall.selected_attention(*args, **kwargs).new_results()


_selected_attention_backward = operator_of(
    define(
        schema("selected_attention_backward"),
        check=check,
        check_values=check_values,
        fake=fake,
        call=BackwardCall.selected_attention,
        derivative=OnceDifferentiable("selected_attention_backward"),
    )
)


@public
@described
def selected_attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_indices: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> tuple[Tensor, ...]:
    """`flash_varlen_backward` over selected keys: the gradients of `selected_attention`'s inputs.

    Cost follows the number of selected keys. Keys are packed. The lists have no gradient, and keys
    that no list names get 0. A token with nothing selected has gradients 0, whatever dout holds.

    Args:
        {arguments}

    Results are those of `flash_varlen_backward`, with an empty dbias: there is no attn_bias. Errors
    too, and those of `selected_attention` for lists.
    """
    first = dout, dlse, q, k, v, key_indices, out, softmax_lse, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, None, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, *tensors
    return call_operator(_selected_attention_backward, args, options)
