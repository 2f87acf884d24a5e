"""Keys of 8 bits and int4 that are converted once: what the workspace holds, and that parts of
heads are put together. In place of Hopper's kernel, which no interpreter runs, the formula stands.
"""

import dataclasses

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dispatch import unpacked
from torch_paged_attn.testing import Problem, assert_accurate, build

bf16, i8, i4, e4m3 = torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn
SEQS = ((20, 45), (33, 0), (3, 130), (0, 5))


def by_the_formula(part, out, form):
    """In place of `hopper.attention.plan_launches`."""
    names = list(part.given_tensors())

    def start(tensors, addresses, out, lse):
        given = dict(zip(names, tensors, strict=True))
        assert addresses == tuple(x.data_ptr() for x in tensors)
        assert given["k"].dtype == given["v"].dtype == bf16
        call = dataclasses.replace(part, **given)
        found = reference.flash_varlen(**call.given(), precision=reference.BASELINE)
        out.copy_(found[0])
        lse.copy_(found[1])

    return start


@pytest.mark.parametrize(
    "heads, stored",
    [
        (2, dict(kv_dtype=i8, descale="tokens", page_size=16)),
        (1, dict(kv_dtype=i4, descale="tokens", page_size=16, sinks=True)),
        (1, dict(kv_dtype=e4m3, descale="tokens", page_size=48, cache_layout="nhd")),
        (1, dict(kv_dtype=i8, descale="batch", page_size=16)),
        (2, dict(kv_dtype=e4m3, page_size=64)),
    ],
    ids=str,
)
def test_agrees(heads, stored, monkeypatch):
    problem = Problem("unpacked", SEQS, 4, 2, 64, dtype=bf16, **stored)
    call = AttentionCall.flash_varlen(**build(problem).args)
    monkeypatch.setattr(unpacked.hopper, "plan_launches", by_the_formula)
    monkeypatch.setattr(unpacked.kernels, "way_of", lambda *_: None)
    room = call.batch * call.block_table.shape[1] * call.page_size
    monkeypatch.setattr(unpacked, "MOST_BYTES", heads * room * (2 * 2 * 64 + 8))
    assert unpacked.heads_at_once(call) == heads
    made = unpacked._Workspace.__call__

    def poisoned(self):
        """What is not written holds NaN, or a page that is not there."""
        tensors = made(self)
        for x in tensors:
            x.fill_(float("nan") if x.dtype.is_floating_point else 99)
        return tensors

    monkeypatch.setattr(unpacked._Workspace, "__call__", poisoned)
    plan = unpacked.plan_attention(call)
    found = plan(tuple(call.given_tensors().values()), None)
    assert_accurate(*found, build(problem).truth())
