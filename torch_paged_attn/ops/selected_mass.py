"""Contract of `paged_attn::selected_mass`: how much attention each selected unit got."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.checks import check_devices, check_dtype, check_shape
from torch_paged_attn.ops.flash_varlen import fill_hints
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public
from torch_paged_attn.ops.selected_checks import check_selected, check_selected_values
from torch_paged_attn.ops.signature import described, schema
from torch_paged_attn.selection_calls import MassCall


def check(*args: Any, **kwargs: Any) -> None:
    """Raise for metadata that the contract forbids."""
    check_call(MassCall.of(*args, **kwargs))


def check_call(call: MassCall) -> None:
    """The same of a call that was made of the arguments."""
    forward = call.attention
    check_selected(forward)
    lse, shape = call.softmax_lse, (forward.num_heads, forward.total_q)
    check_dtype(forward.op, "softmax_lse", lse, (torch.float32,))
    check_shape(forward.op, "softmax_lse", lse, shape, "(num_heads, total_q)")
    check_devices(forward.op, forward.q.device, {"softmax_lse": lse})


def check_values(*args: Any, **kwargs: Any) -> None:
    """Raise for lengths, lists and page ids out of range. Reads tensors on the host."""
    check_selected_values(MassCall.of(*args, **kwargs).attention)


def fake(*args: Any, **kwargs: Any) -> Tensor:
    """An empty result of the op's shape and dtype."""
    return MassCall.of(*args, **kwargs).new_result()


_selected_mass = operator_of(
    define(
        schema("selected_mass"), check=check, check_values=check_values, fake=fake, autocast=True
    )
)


@public
@described
def selected_mass(
    q: Tensor,
    k: Tensor,
    softmax_lse: Tensor,
    key_indices: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    *tensors: Tensor | None,
    **options: Any,
) -> Tensor:
    """The probability mass of each unit that `key_indices` names, summed over heads.

    With the logits `s` of `selected_attention`, in float32:

        mass[t, g, i] = sum over heads h of group g, keys j of unit key_indices[t, g, i] that the
                        token sees, of exp(s[h, t, j] - softmax_lse[h, t])

    The heads of a group are those of KV head g, or all heads if `key_indices` has one list a token.
    Entries that select nothing have mass 0, and so have rows whose `softmax_lse` is -inf. It is
    what the loss of an indexer needs, or a rule that evicts keys. It has no gradient.

    Args:
        {arguments}

    Returns:
        `(total_q, G, K)` float32.

    Raises:
        Those of `selected_attention`; NotImplementedError if an input requires grad.

    Source: DeepSeek-V3.2, section 2.1: the indexer's KL loss over selected keys.
    """
    first = q, k, softmax_lse, key_indices, cu_seqlens_q, cu_seqlens_k
    hints = fill_hints(q, k, block_table, max_seqlen_q, max_seqlen_k)
    args = *first, *hints, seqused_k, block_table, *tensors
    return call_operator(_selected_mass, args, options)
