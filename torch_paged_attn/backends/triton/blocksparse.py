"""`blocksparse` on GPUs: the attention kernel walks a row's list of blocks instead of a range.

Tiles of queries start at positions that are multiples of their size, so that one tile never needs
two rows of a layout; nothing is sorted or planned on the host.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.attention import attend
from torch_paged_attn.backends.triton.values import values_are_checked
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
    kwargs |= {"q_block_size": q_block_size, "k_block_size": k_block_size, "causal": causal}
    check(*call, **kwargs)
    if values_are_checked():
        check_values(*call, **kwargs)
    attention: tuple[Any, ...] = (q, k, v, cu_seqlens_q, *args)
    return attend(*attention, layout=(crow_indices, col_indices), **kwargs)
