"""`blocksparse_backward` on GPUs: dQ walks the lists of a layout's rows, as the forward does, dK
and dV those of its columns (`portable/transposed_lists.py`).
"""

from torch_paged_attn.backends.triton.flash_varlen_backward import BackwardOp
from torch_paged_attn.ops.blocksparse_backward import check

blocksparse_backward = BackwardOp("blocksparse", check)
