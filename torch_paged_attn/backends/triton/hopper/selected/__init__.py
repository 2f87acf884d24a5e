"""Attention by lists of latent keys, and scores of index keys, for Hopper."""
