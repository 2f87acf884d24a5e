"""`blocksparse` on GPUs: the attention kernels walk a list of blocks instead of a range.

Tiles of queries start at positions that are multiples of their size. In the portable kernel a tile
never needs two rows of a layout; Hopper's reads the union of its rows' lists
(`hopper/block_lists.py`).
Nothing is planned on the host.
"""

from torch_paged_attn.backends.triton.flash_varlen import AttentionOp
from torch_paged_attn.ops.blocksparse import check_call

blocksparse = AttentionOp("blocksparse", check_call)
