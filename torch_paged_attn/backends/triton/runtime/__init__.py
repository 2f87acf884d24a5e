"""The GPU's properties, launches of kernels, the cache of plans and launches, and workspace."""
