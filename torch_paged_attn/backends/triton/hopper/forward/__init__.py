"""Attention for Hopper: `flash_varlen` and `blocksparse`."""
