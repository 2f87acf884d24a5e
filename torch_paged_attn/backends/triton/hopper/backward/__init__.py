"""The backward of attention for Hopper."""
