"""Paged attention for PyTorch: `torch.ops.paged_attn.*`, one schema and one meaning per device."""

from torch_paged_attn.ops import blocksparse, flash_varlen, merge_states, reshape_and_cache

__version__ = "0.1.0"

__all__ = ["blocksparse", "flash_varlen", "merge_states", "reshape_and_cache"]
