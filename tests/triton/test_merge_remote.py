"""Parts put into other ranks' slots and merged: all ranks of a group one after the other, here."""

import itertools
import os
import subprocess
import sys

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.backends.triton.merges.merge_remote import Slots, merge_remote
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
        self.missing = torch.zeros(1, dtype=torch.int32, pin_memory=device.type == "cuda")
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
                *(*part, self.calls[rank], self.missing, self.memory, self.flags),
                rank=rank,
                out_dtype=out_dtype,
                seconds=1.0,
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


def merge_alone(device):
    """What a rank merges whose group does not come, and the number of who is missing, and 1."""
    group = Group(2, 3, TOKENS, device)
    out, lse = torch.ones(3, 6, DIM, device=device), torch.zeros(6, 3, device=device)
    given = out, lse, group.calls[0], group.missing, group.memory, group.flags
    found = merge_remote(*given, rank=0, out_dtype=torch.float32, seconds=3e-6)
    return found, group.missing


def test_waiting_ends(device):
    """Who finds itself alone says who is missing, and nothing of what it merged counts."""
    if device.type == "cpu":
        found, missing = merge_alone(device)
        assert missing.item() == 1 + 1
        assert all(x.isnan().all() for x in found)
    else:  # where the kernel stops the device for the whole process
        done = subprocess.run([sys.executable, __file__], capture_output=True, text=True)
        assert done.stdout == "missing 2, AcceleratorError\n", done.stdout + done.stderr


if __name__ == "__main__":
    _, missing = merge_alone(torch.device("cuda"))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"missing {missing.item()}, {type(error).__name__}", flush=True)
        os._exit(0)  # nothing can be freed
