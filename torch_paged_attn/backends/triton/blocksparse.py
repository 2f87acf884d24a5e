"""`blocksparse` on GPUs: the attention kernels loop over a list of blocks instead of a range of
keys.

Tiles of queries start at positions that are multiples of their size. In the portable kernel a tile
is in one row of the layout; in Hopper's it may be in several, and uses the union of their lists
(`hopper/schedule/block_lists.py`). The host reads nothing of the layout.
"""

from torch_paged_attn.backends.triton.flash_varlen import AttentionOp
from torch_paged_attn.ops.blocksparse import check_call

blocksparse = AttentionOp("blocksparse", check_call)
