"""`blocksparse` on GPUs: the attention kernels walk a list of blocks instead of a range.

Tiles of queries start at positions that are multiples of their size. In the portable kernel a tile
never needs two rows of a layout; Hopper's reads the union of its rows' lists
(`hopper/block_lists.py`).
Nothing is planned on the host.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.flash_varlen import answer
from torch_paged_attn.ops.blocksparse import check


def blocksparse(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`."""
    # the two hints come after q, k, v, the layout and the lengths
    return answer(AttentionCall.blocksparse, check, 7, args, kwargs)
