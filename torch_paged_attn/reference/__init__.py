"""What the operators mean, in formulas a person can check: slow, plain, float64-capable."""

from torch_paged_attn.reference.attention import (
    BASELINE,
    GOLDEN,
    Precision,
    Sums,
)
from torch_paged_attn.reference.blocksparse import blocksparse
from torch_paged_attn.reference.flash_varlen import flash_varlen
from torch_paged_attn.reference.merge_states import merge_states
from torch_paged_attn.reference.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_split,
)

__all__ = [
    "BASELINE",
    "GOLDEN",
    "Precision",
    "Sums",
    "blocksparse",
    "flash_varlen",
    "merge_states",
    "reshape_and_cache",
    "reshape_and_cache_split",
]
