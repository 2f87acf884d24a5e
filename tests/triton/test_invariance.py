"""`batch_invariant`: the bits of a query depend on its sequence alone."""

from unittest import mock

import numpy as np
import pytest
import torch

from torch_paged_attn.testing import Problem, build
from torch_paged_attn.testing.inputs import cumulative

HAS_GPU = torch.cuda.is_available()

# a piece of keys, twice over and a little more: chunks and decodes begin and end anywhere
PIECE = 2048 if HAS_GPU else 64
LENGTH = 2 * PIECE + 13
CHUNKS = ((0, PIECE + 1), (PIECE + 1, PIECE + 2), (PIECE + 2, LENGTH), (LENGTH - 1, LENGTH))

OPTIONS = {
    "window_sinks": {"window_size_left": PIECE + 9, "sinks": True},
    "bias": {"bias": "float"},
}
if HAS_GPU:
    OPTIONS |= {"plain": {}, "sinks": {"sinks": True}, "small_window": {"window_size_left": 99}}


def products_row_by_row(a, b, dtype=None):
    """NumPy's rows are rounded one way or another by their place in the matrix; a GPU's are not."""
    found = np.einsum("...ik,...kj->...ij", a, b, optimize=False)
    return found if dtype is None else found.astype(dtype)


@pytest.mark.parametrize("name", OPTIONS)
def test_chunks_and_decodes_have_the_bits_of_the_whole_prompt(name, run, device, monkeypatch):
    from torch_paged_attn.backends.triton.portable import splits

    monkeypatch.setattr(splits, "FIXED_KEYS", PIECE)
    heads = 8 if HAS_GPU else 2
    dtype = torch.bfloat16 if HAS_GPU else torch.float32
    problem = Problem(
        "invariant", ((LENGTH, 0), (3, 40)), heads, heads // 2, 64 if HAS_GPU else 16, dtype=dtype,
        page_size=16, batch_invariant=True, **OPTIONS[name],
    )  # fmt: skip
    whole = build(problem).to(device)
    with mock.patch.object(np, "matmul", products_row_by_row):
        out, lse = run(whole)
        for start, stop in CHUNKS:
            chunk = dict(whole.alone(0).args)
            chunk["q"] = chunk["q"][start:stop]
            chunk["cu_seqlens_q"] = cumulative([stop - start]).to(device)
            chunk["seqused_k"] = torch.tensor([stop], dtype=torch.int32, device=device)
            if chunk.get("attn_bias") is not None:
                chunk["attn_bias"] = chunk["attn_bias"][:, start:stop]
            found, found_lse = run(type(whole)(whole.op, chunk))
            assert torch.equal(found, out[start:stop]), (start, stop)
            assert torch.equal(found_lse, lse[:, start:stop]), (start, stop)
