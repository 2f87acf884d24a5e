"""The operators: schemas, checks and public functions, which importing this module registers.

Of the backends only the CPU's compiled library is loaded, if it was built.
"""

from typing import TYPE_CHECKING

from torch_paged_attn.ops import _flops, _library
from torch_paged_attn.ops import append_and_attend as append_and_attend  # internal: the import
from torch_paged_attn.ops import append_slots as append_slots  # registers the operator
from torch_paged_attn.ops import attend_cache as attend_cache  # internal: the import

if TYPE_CHECKING:  # the whole signatures, for type checkers and editors (tools/stubs.py)
    from torch_paged_attn.ops._typed import (
        blocksparse,
        blocksparse_backward,
        flash_varlen,
        flash_varlen_backward,
        flash_varlen_out,
        select_keys,
        selected_attention,
        selected_attention_backward,
        selected_mass,
    )
else:
    from torch_paged_attn.ops.blocksparse import blocksparse
    from torch_paged_attn.ops.blocksparse_backward import blocksparse_backward
    from torch_paged_attn.ops.flash_varlen import flash_varlen
    from torch_paged_attn.ops.flash_varlen_backward import flash_varlen_backward
    from torch_paged_attn.ops.flash_varlen_out import flash_varlen_out
    from torch_paged_attn.ops.select_keys import select_keys
    from torch_paged_attn.ops.selected_attention import selected_attention
    from torch_paged_attn.ops.selected_attention_backward import selected_attention_backward
    from torch_paged_attn.ops.selected_mass import selected_mass

from torch_paged_attn.ops.merge_states import merge_states
from torch_paged_attn.ops.merge_states_backward import merge_states_backward
from torch_paged_attn.ops.reshape_and_cache import reshape_and_cache

_library.bind_backends()
_flops.register_flops()

__all__ = [
    "blocksparse",
    "blocksparse_backward",
    "flash_varlen",
    "flash_varlen_backward",
    "flash_varlen_out",
    "merge_states",
    "merge_states_backward",
    "reshape_and_cache",
    "select_keys",
    "selected_attention",
    "selected_attention_backward",
    "selected_mass",
]
