"""Batches of sequences of many queries and of few over keys of 8 bits and int4: which launch takes
which sequence, and what the workspace holds. In place of Hopper's kernel, which no interpreter
runs, the formula stands.
"""

import dataclasses
import itertools

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dispatch import unpacked
from torch_paged_attn.testing import Problem, assert_accurate, build

bf16, i8, i4, e4m3 = torch.bfloat16, torch.int8, torch.uint8, torch.float8_e4m3fn
# with 2 heads to a KV head, sequences of at least 16 queries have many
SEQS = ((20, 95), (16, 0), (3, 130), (0, 5), (1, 99), (33, 64), (15, 2), (1, 0))
IS_MANY = (True, True, False, False, False, True, False, False)


def by_the_formula(taken):
    """In place of `hopper.plan.plan_launches`: what it returns notes in `taken` which sequences a
    launch takes."""

    def plan_launches(part, out, form, skips):
        assert skips
        names = list(part.given_tensors())

        def start(tensors, addresses, out, lse):
            given = dict(zip(names, tensors, strict=True))
            assert addresses == [x.data_ptr() for x in tensors]
            used = given["seqused_k"].clone()
            taken.append((given["k"].dtype, (used >= 0).tolist()))
            call = dataclasses.replace(part, **given | {"seqused_k": used.clamp(min=0)})
            found = reference.flash_varlen(**call.given(), precision=reference.BASELINE)
            stops = call.cu_seqlens_q.tolist()
            for b, (first, stop) in enumerate(itertools.pairwise(stops)):
                if used[b] >= 0:
                    out[first:stop] = found[0][first:stop]
                    lse[:, first:stop] = found[1][:, first:stop]
            out[stops[-1] :] = 0
            lse[:, stops[-1] :] = float("-inf")

        return start

    return plan_launches


def poison(monkeypatch):
    """What is not written of a workspace holds NaN, or a number of keys that no cache has."""
    made = unpacked._Workspace.__call__

    def poisoned(self):
        tensors = made(self)
        for x in tensors:
            x.fill_(float("nan") if x.dtype.is_floating_point else 9999)
        return tensors

    monkeypatch.setattr(unpacked._Workspace, "__call__", poisoned)


INT8 = dict(kv_dtype=i8, descale="tokens", page_size=16)


@pytest.mark.parametrize(
    "stored, room, width",
    [
        (INT8, 9999, 256),
        (INT8, 128, 4),
        (dict(kv_dtype=i4, descale="tokens", page_size=16, sinks=True), 192, 4),
        (dict(kv_dtype=e4m3, descale="tokens", page_size=48, padding_rows=3), 9999, 4),
        (dict(kv_dtype=i8, descale="batch", page_size=16, cache_layout="nhd"), 128, 256),
        (dict(kv_dtype=e4m3, page_size=64), 9999, 4),
    ],
    ids=str,
)
def test_agrees(stored, room, width, monkeypatch):
    """Whether a workspace has room for all keys of sequences of many queries, or for those of one
    or two of them."""
    problem = Problem("unpacked", SEQS, 4, 2, 64, dtype=bf16, **stored)
    call = AttentionCall.flash_varlen(**build(problem).args)
    taken = []
    monkeypatch.setattr(unpacked.hopper, "plan_launches", by_the_formula(taken))
    monkeypatch.setattr(
        unpacked, "capacity_of", lambda call: room // unpacked.BLOCK * unpacked.BLOCK
    )
    monkeypatch.setattr(unpacked, "WIDTH", width)
    poison(monkeypatch)
    plan = unpacked.plan_attention(call)
    found = plan(tuple(call.given_tensors().values()), None)
    assert_accurate(*found, build(problem).truth())
    *rest, (dtype, copied) = taken
    assert dtype == bf16
    if room == 9999:
        assert copied == list(IS_MANY)
    else:
        # 115 keys, 64, and 97: two blocks of 64, one, two
        assert copied == [b < room // 64 - 1 for b in range(len(SEQS))]
        [(dtype, left)] = rest
        assert dtype == call.k.dtype
        assert left == [x and not y for x, y in zip(IS_MANY, copied, strict=True)]


def test_writes_into_out(monkeypatch):
    """A plan of `flash_varlen_out` returns the caller's tensor."""
    problem = Problem("unpacked", SEQS, 4, 2, 64, dtype=bf16, **INT8)
    call = AttentionCall.flash_varlen(**build(problem).args)
    monkeypatch.setattr(unpacked.hopper, "plan_launches", by_the_formula([]))
    out = torch.full_like(call.q, float("nan"))
    into = dataclasses.replace(call, out=out)
    found, lse = unpacked.plan_attention(into)(tuple(into.given_tensors().values()), None)
    assert found is out
    assert_accurate(out, lse, build(problem).truth())
