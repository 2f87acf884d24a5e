"""Arguments of a call by name, as the dispatcher hands them to a kernel."""

import torch


def dispatched(op, given):
    """What the schema has by position, and the rest by name."""
    given = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | given
    schema = getattr(torch.ops.paged_attn, op).default._schema
    names = [a.name for a in schema.arguments if not a.kwarg_only]
    return [given.pop(name, None) for name in names], given
