"""What kernels for every GPU and those for Hopper both use: mostly device code."""
