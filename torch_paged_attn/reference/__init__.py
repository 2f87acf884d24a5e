"""The reference: every operator as a plain PyTorch formula, slow, in float64 if asked for."""

from torch_paged_attn.reference.attention import (
    BASELINE,
    GOLDEN,
    Precision,
    Sums,
)
from torch_paged_attn.reference.attention_backward import BackwardSums
from torch_paged_attn.reference.blocksparse import blocksparse
from torch_paged_attn.reference.blocksparse_backward import blocksparse_backward
from torch_paged_attn.reference.flash_varlen import flash_varlen
from torch_paged_attn.reference.flash_varlen_backward import flash_varlen_backward
from torch_paged_attn.reference.flash_varlen_out import flash_varlen_out
from torch_paged_attn.reference.merge_states import merge_states
from torch_paged_attn.reference.merge_states_backward import merge_states_backward
from torch_paged_attn.reference.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_quantize,
    reshape_and_cache_split,
)
from torch_paged_attn.reference.select_keys import select_keys
from torch_paged_attn.reference.selected_attention import selected_attention
from torch_paged_attn.reference.selected_attention_backward import selected_attention_backward
from torch_paged_attn.reference.selected_mass import selected_mass

__all__ = [
    "BASELINE",
    "GOLDEN",
    "BackwardSums",
    "Precision",
    "Sums",
    "blocksparse",
    "blocksparse_backward",
    "flash_varlen",
    "flash_varlen_backward",
    "flash_varlen_out",
    "merge_states",
    "merge_states_backward",
    "reshape_and_cache",
    "reshape_and_cache_quantize",
    "reshape_and_cache_split",
    "select_keys",
    "selected_attention",
    "selected_attention_backward",
    "selected_mass",
]
