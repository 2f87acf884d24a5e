"""`blocksparse` on Neuron: the same kernel, over items whose keys are those of listed blocks."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.neuron.attention import attend
from torch_paged_attn.backends.neuron.values import values_are_checked
from torch_paged_attn.ops.blocksparse import check, check_values


def blocksparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    cu_seqlens_q: Tensor,
    *args: Any,
    q_block_size: int = 64,
    k_block_size: int = 64,
    causal: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`."""
    call: tuple[Any, ...] = (q, k, v, crow_indices, col_indices, cu_seqlens_q, *args)
    kwargs["causal"] = causal
    check(*call, q_block_size=q_block_size, k_block_size=k_block_size, **kwargs)
    if values_are_checked():
        check_values(*call, q_block_size=q_block_size, k_block_size=k_block_size, **kwargs)
    layout = crow_indices, col_indices, q_block_size, k_block_size
    attention: tuple[Any, ...] = (q, k, v, cu_seqlens_q, *args)
    return attend("blocksparse", *attention, layout=layout, **kwargs)
