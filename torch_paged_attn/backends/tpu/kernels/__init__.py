"""The Pallas kernels of attention and of its gradients, and their launches."""
