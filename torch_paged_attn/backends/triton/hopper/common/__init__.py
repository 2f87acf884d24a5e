"""What several of Hopper's kernels are made of."""
