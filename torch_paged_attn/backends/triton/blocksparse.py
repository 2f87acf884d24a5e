"""`blocksparse` on GPUs: the attention kernels walk a list of blocks instead of a range.

Tiles of queries start at positions that are multiples of their size. In the portable kernel a tile
never needs two rows of a layout; Hopper's reads what its rows list together (`block_lists.py`).
Nothing is planned on the host.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import recipes
from torch_paged_attn.backends.triton.attention import batch_invariant
from torch_paged_attn.backends.triton.flash_varlen import answer
from torch_paged_attn.ops.blocksparse import check


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
    layout = crow_indices, col_indices
    attention: tuple[Any, ...] = (q, k, v, cu_seqlens_q, *args)
    kwargs |= {"q_block_size": q_block_size, "k_block_size": k_block_size, "causal": causal}
    mode = batch_invariant(), *map(recipes.describe, layout)
    key = recipes.key_of("blocksparse", 5, mode, attention, kwargs)
    if (recipe := recipes.recall(key)) is not None:
        return recipe(*attention, layout=layout, **kwargs)
    whole: tuple[Any, ...] = (q, k, v, *layout, cu_seqlens_q, *args)
    check(*whole, **kwargs)
    return answer(AttentionCall.blocksparse(*whole, **kwargs), key)
