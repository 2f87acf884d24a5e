"""Parts put into other ranks' slots and merged: all ranks of a group one after the other, here."""

import itertools

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.backends.triton.merge_remote import Slots, merge_remote
from torch_paged_attn.testing import Truth, assert_accurate

TOKENS, DIM = 20, 24
RAISED = 2**30


class Group:
    """Ranks whose memory is this process'."""

    def __init__(self, size, heads, max_tokens, device):
        self.slots = Slots.of(size, max_tokens * heads, DIM)
        self.size, self.device = size, device
        self.memory = [torch.full((self.slots.elements,), float("nan")) for _ in range(size)]
        self.memory = [x.to(device) for x in self.memory]
        zeros = torch.zeros(self.slots.flags, dtype=torch.int32, device=device)
        self.flags = [zeros.clone() for _ in range(size)]
        self.calls = [zeros[: self.slots.programs].clone() for _ in range(size)]

    def merge(self, parts, out_dtype):
        """Each rank's result. A rank alone would wait for the others: at first all flags are raised
        by hand, and what is merged is not looked at."""
        calls = [x.clone() for x in self.calls]
        flags = [x.clone() for x in self.flags]
        for mine in self.flags:
            mine.fill_(RAISED)
        self._run(parts, out_dtype)
        for mine, before in zip(self.flags, flags, strict=True):
            mine.copy_(torch.where(mine == RAISED, before, mine))
        for mine, before in zip(self.calls, calls, strict=True):
            mine.copy_(before)
        return self._run(parts, out_dtype)

    def _run(self, parts, out_dtype):
        return [
            merge_remote(
                *(*part, self.calls[rank], self.memory, self.flags), rank=rank, out_dtype=out_dtype
            )
            for rank, part in enumerate(parts)
        ]


@pytest.mark.parametrize("size, heads, dtype", [(2, 3, torch.bfloat16), (4, 1, torch.float32)])
def test_merges_what_is_put(size, heads, dtype, device):
    group = Group(size, heads, TOKENS, device)
    for call, tokens in enumerate((TOKENS, 3, TOKENS, 0)):
        g = torch.Generator().manual_seed(call)
        parts = []
        for rank in range(size):
            out = torch.randn(tokens, size * heads, DIM, generator=g)
            lse = 3 * torch.randn(size * heads, tokens, generator=g)
            lse[:, rank::3] = float("-inf")  # of no key; some of none on any rank
            lse[:, 1:2] = float("-inf")
            out[(lse == float("-inf")).mT] = float("nan")
            parts.append((out.to(device), lse.to(device)))
        found = group.merge(parts, dtype)
        given = zip(*[(out.cpu(), lse.cpu()) for out, lse in parts], strict=True)
        truth = Truth.of(reference.merge_states, *map(list, given), out_dtype=dtype)
        outs, lses = zip(*[(out.cpu(), lse.cpu()) for out, lse in found], strict=True)
        assert_accurate(torch.cat(outs, 1), torch.cat(lses), truth)
        # every flag says how often its program has put something
        for flags, rank in itertools.product(group.flags, range(size)):
            assert flags.view(size, -1)[rank].tolist() in (
                group.calls[rank].tolist(),
                [0] * group.slots.programs,  # of its own rows
            )
    assert group.calls[0][0] == 3 and group.calls[0][-1] == 2
