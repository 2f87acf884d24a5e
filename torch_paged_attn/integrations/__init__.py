"""Adapters: other projects' functions and attention backends, implemented with the operators.

`import torch_paged_attn` imports none of them.
"""
