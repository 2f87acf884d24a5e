"""Calls with a bias or a layout read queries, and the bias, where they lie."""

import dataclasses
import functools

import pytest
import torch

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build
from torch_paged_attn.testing.problem import Layout

# sequences of one token, and longer ones that begin and end anywhere, in several tiles
SEQS = ((1, 300), (37, 91), (1, 5), (0, 17), (21, 1))
MIXED = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], seqs=SEQS)
WINDOW = {"window_size_left": 60}
FLOAT32 = {"dtype": torch.float32, "page_size": 8}

CASES = {
    "bias": {"bias": "float"},
    "bias_of_heads": {"bias": "float", "bias_heads": "all"},
    "mask_float32": {"bias": "bool", "causal": False, **FLOAT32},
    "layout": {"layout": Layout(16, 32, "one")},
    "layouts_of_sequences": {"layout": Layout(64, 16, "one", True), **WINDOW, **FLOAT32},
    "layout_and_bias": {"layout": Layout(32, 64, "one"), "bias": "float"},
    "wide": {"head_dim": 256, "bias": "float"},
    "wide_keys": {"head_dim": 256, "head_dim_v": 128, **FLOAT32},
    # pairs of heads of 16 bits are of two KV heads
    "heads_of_their_own": {"num_heads": 8, "num_kv_heads": 8, "sinks": True},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_read_where_they_lie(case, run, monkeypatch):
    from torch_paged_attn.backends.tpu import attention

    # what lays tiles out around the kernel
    monkeypatch.delattr(attention, "attend_tiles")
    call = build(dataclasses.replace(MIXED, **CASES[case]))
    assert_accurate(*run(call, "on_wait"), call.truth())


def test_a_bias_of_few_tokens(run):
    """Fewer than a copy has rows; one token more than whole tiles of memory."""
    for seqs in (((1, 30),), ((17, 4),), ((8, 40), (9, 3))):
        call = build(dataclasses.replace(MIXED, seqs=seqs, bias="float"))
        assert_accurate(*run(call, "on_wait"), call.truth())


def test_a_layout_without_room_for_its_words_goes_by_tiles():
    """On v4, whose tables of a layout of 60,000 tokens leave no room for words beside them."""
    import jax
    import jax.numpy as jnp

    from torch_paged_attn.backends.tpu.blocksparse import blocksparse
    from torch_paged_attn.backends.tpu.config import CHIPS

    tokens, block = 60000, 128
    rows = -(-tokens // block)
    queries, keys = (jax.ShapeDtypeStruct((tokens, n, 128), jnp.bfloat16) for n in (32, 8))
    crow, col, cu_seqlens = (
        jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, rows + 1), (1, rows * rows), (2,))
    )
    call = functools.partial(
        blocksparse, q_block_size=block, k_block_size=block, max_seqlen_q=tokens, causal=True,
        config=CHIPS["TPU v4"],
    )  # fmt: skip
    out, _ = jax.eval_shape(call, queries, keys, keys, crow, col, cu_seqlens)
    assert out.shape == queries.shape
