"""`blocksparse_backward` on GPUs: the kernel of dQ loops over the blocks of a layout's row, as the
forward does, that of dK and dV over those of a column (`common/transposed_lists.py`).
"""

from torch_paged_attn.backends.triton.flash_varlen_backward import BackwardOp, plan_dense
from torch_paged_attn.ops.blocksparse_backward import check

blocksparse_backward = BackwardOp("blocksparse", check, plan_dense)
