"""Attention over several devices, made of the operators and torch.distributed's collectives.

The package itself imports nothing of this; import what you use:

    context_parallel    each rank has some of the tokens: all-gather, ring, Ulysses; with gradients
    decode              each rank has some positions of the KV cache
    sharding            sharding rules for DTensor

`docs/distributed.md` says which of them an engine needs.
"""
