"""From torch to JAX: the ops on torch tensors, and the ways to the device."""
