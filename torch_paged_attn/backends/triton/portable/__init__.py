"""The kernels for every GPU that Triton knows."""
