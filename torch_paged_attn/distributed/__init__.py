"""Attention over several devices: the operators and torch.distributed's collectives, put together.

Nothing here is imported by the package itself; import what you use:

    context_parallel    tokens cut over ranks: all-gather KV, ring, Ulysses; with gradients
    decode              a KV cache dealt out over ranks by position
    sharding            DTensor's rules for the operators

`docs/distributed.md` says which engine needs which.
"""
