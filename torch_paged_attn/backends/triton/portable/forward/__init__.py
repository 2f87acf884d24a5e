"""Attention: `flash_varlen` and `blocksparse`."""
