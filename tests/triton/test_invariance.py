"""`batch_invariant`: the bits of a query depend on its sequence alone."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from covering import every_other

from torch_paged_attn.testing import Call, Problem, build
from torch_paged_attn.testing.inputs import cumulative

HAS_GPU = torch.cuda.is_available()

# a piece of keys, twice over and a little more: chunks and decodes begin and end anywhere
PIECE = 2048 if HAS_GPU else 64
LENGTH = 2 * PIECE + 13
CHUNKS = ((0, PIECE + 1), (PIECE + 1, PIECE + 2), (PIECE + 2, LENGTH), (LENGTH - 1, LENGTH))

# heads, KV heads and head_dim
HEADS = (8, 4, 64) if HAS_GPU else (2, 1, 16)
OPTIONS = {
    "window_sinks": (HEADS, {"window_size_left": PIECE + 9, "sinks": True}),
    "bias": (HEADS, {"bias": "float"}),
}
if HAS_GPU:
    OPTIONS |= {
        "plain": (HEADS, {}),
        "sinks": (HEADS, {"sinks": True}),
        "small_window": (HEADS, {"window_size_left": 99}),
        "d128": ((8, 2, 128), {}),
        "d128_window": ((8, 1, 128), {"window_size_left": 700}),
        "d256": ((8, 1, 256), {}),
        "group_of_7": ((7, 1, 128), {}),
        "group_of_3": ((6, 2, 64), {}),
        "group_of_5": ((10, 2, 128), {}),
        "group_of_6": ((12, 2, 128), {}),
        "softcap": ((16, 4, 128), {"softcap": 20.0}),
        "alibi": ((8, 8, 96), {"alibi": "heads"}),
        "full": ((32, 8, 128), {"causal": False}),
        "int8": ((8, 2, 128), {"kv_dtype": torch.int8, "descale": "heads"}),
    }

# of pages of other sizes, and of packed keys
SAME_ELSEWHERE = ("window_sinks",)
PAGE_SIZES = (0, 1, 16, 128)
# where stretches of keys begin, and around
CUTS = (0, 1, 100, LENGTH)
if HAS_GPU:
    SAME_ELSEWHERE += ("plain", "d128", "d128_window", "d256", "softcap")
    CUTS = (0, 1, 63, 511, 512, 513, 1500, 2047, 2048, 4096, LENGTH - 1, LENGTH)


def products_row_by_row(a, b, dtype=None):
    """NumPy's rows are rounded one way or another by their place in the matrix; a GPU's are not."""
    found = np.einsum("...ik,...kj->...ij", a, b, optimize=False)
    return found if dtype is None else found.astype(dtype)


def prompt(name):
    """A long sequence and a short one."""
    (heads, kv_heads, dim), options = OPTIONS[name]
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    return build(
        Problem(
            "invariant",
            ((LENGTH, 0), (3, 40)),
            heads,
            kv_heads,
            dim,
            dtype=dtype,
            page_size=16,
            batch_invariant=True,
            **options,
        )
    )


def chunk_of(call, start, stop):
    """Queries [start, stop) of a call's one sequence; without a causal mask they see all keys."""
    chunk, device = dict(call.args), call.args["q"].device
    chunk["q"] = chunk["q"][start:stop]
    chunk["cu_seqlens_q"] = cumulative([stop - start]).to(device)
    if chunk["causal"]:
        chunk["seqused_k"] = torch.tensor([stop], dtype=torch.int32, device=device)
    if chunk.get("attn_bias") is not None:
        chunk["attn_bias"] = chunk["attn_bias"][:, start:stop]
    return Call(call.op, chunk)


def elsewhere(call, page_size):
    """The same call with its keys in pages of another size, in another order, or packed (0)."""
    given, keys = dict(call.args), int(call.args["seqused_k"])
    device = given["q"].device
    for name in ("k", "v"):
        number = -(-keys // given[name].shape[2])
        pages = given[name][given["block_table"][0, :number].long()]  # (pages, heads, slots, dim)
        rows = pages.transpose(1, 2).flatten(0, 1)[:keys]
        if page_size:
            number = -(-keys // page_size)
            cache = torch.full(
                (number * page_size, *rows.shape[1:]), torch.nan, dtype=rows.dtype, device=device
            )
            cache[:keys] = rows
            rows = cache.unflatten(0, (number, page_size)).flip(0).transpose(1, 2)
        given[name] = rows
    if page_size:
        order = torch.arange(len(given["k"]) - 1, -1, -1, dtype=torch.int32, device=device)
        given["block_table"] = order[None]
    else:
        given["cu_seqlens_k"] = cumulative([keys]).to(device)
        given["block_table"] = given["seqused_k"] = None
    return Call(call.op, given)


def check(found, whole, start, stop, what):
    out, lse = whole
    for x, y in zip(found, (out[start:stop], lse[:, start:stop]), strict=True):
        assert torch.equal(x, y), (start, stop, what, int((x != y).sum()))


@pytest.mark.parametrize("name", every_other(OPTIONS))
def test_chunks_and_decodes_have_the_bits_of_the_whole_prompt(name, run, device, monkeypatch):
    from torch_paged_attn.backends.triton.portable.forward import splits

    monkeypatch.setattr(splits, "FIXED_KEYS", PIECE)
    whole = prompt(name).to(device)
    with mock.patch.object(np, "matmul", products_row_by_row):
        wanted = run(whole)
        alone = whole.alone(0)
        for start, stop in CHUNKS:
            check(run(chunk_of(alone, start, stop)), wanted, start, stop, "chunk")


@pytest.mark.parametrize("name", SAME_ELSEWHERE)
def test_bits_do_not_depend_on_where_keys_lie_or_on_who_else_is_in_the_batch(
    name, run, device, monkeypatch
):
    from torch_paged_attn.backends.triton.portable.forward import splits

    monkeypatch.setattr(splits, "FIXED_KEYS", PIECE)
    monkeypatch.setattr(np, "matmul", products_row_by_row)
    whole = prompt(name).to(device)
    wanted, alone = run(whole), whole.alone(0)
    for i, (start, stop) in enumerate(itertools.pairwise(CUTS)):
        page_size = PAGE_SIZES[i % len(PAGE_SIZES)]
        chunk = elsewhere(chunk_of(alone, start, stop), page_size)
        check(run(chunk), wanted, start, stop, page_size)
    # decodes of all lengths in a batch, which fill the chip
    lengths = torch.arange(1, LENGTH, 31)
    batch = dict(alone.args)
    batch["q"] = alone.args["q"][(lengths - 1).to(device)]
    batch["cu_seqlens_q"] = cumulative([1] * len(lengths)).to(device)
    batch["seqused_k"] = lengths.int().to(device)
    batch["block_table"] = alone.args["block_table"].expand(len(lengths), -1).contiguous()
    out, lse = run(Call(whole.op, batch))
    at = (lengths - 1).to(device)
    assert torch.equal(out, wanted[0][at]) and torch.equal(lse, wanted[1][:, at])
