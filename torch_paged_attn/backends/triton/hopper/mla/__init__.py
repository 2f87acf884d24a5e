"""Latent attention (MLA) for Hopper, with keys of 16 and of 8 bits."""
