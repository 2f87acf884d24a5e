"""Starting kernels: the chip, the launch, its memory, and the cache of launches."""
