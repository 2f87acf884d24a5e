"""Block-sparse layouts for `torch_paged_attn.blocksparse`: the class, and functions that build it.

>>> layout = layouts.local_strided(32, max_seqlen=8192, block_size=64, local_blocks=16)
>>> out, lse = blocksparse(q, k, v, cu_seqlens_q=cu_seqlens_q, **layout.arguments())
"""

from torch_paged_attn.layouts.flex import from_block_mask
from torch_paged_attn.layouts.layout import BLOCK_SIZES, BlockSparseLayout, from_dense_mask
from torch_paged_attn.layouts.patterns import bigbird, local_strided, sliding_window

__all__ = [
    "BLOCK_SIZES",
    "BlockSparseLayout",
    "bigbird",
    "from_block_mask",
    "from_dense_mask",
    "local_strided",
    "sliding_window",
]
