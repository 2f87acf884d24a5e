"""Attention of selected units of keys for Hopper, each read once for all tokens that name it."""
