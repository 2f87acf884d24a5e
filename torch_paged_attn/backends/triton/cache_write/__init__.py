"""The kernels that write new tokens into a cache."""
