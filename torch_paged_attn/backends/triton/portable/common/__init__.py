"""What the kernels of several ops are made of."""
