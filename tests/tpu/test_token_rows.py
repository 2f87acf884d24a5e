"""Every call reads queries, and a bias, where they lie; heads and lanes are filled before it."""

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

# each is a program, which takes seconds to compile
CASES = {
    "layouts_of_heads_and_biases": {
        "layout": Layout(32, 64, "all"), "bias": "float", "bias_heads": "all"
    },
    "mask_float32": {"bias": "bool", "causal": False, **FLOAT32},
    "layouts_of_kv_heads": {"layout": Layout(64, 16, "kv", True), **WINDOW, **FLOAT32},
    # seven heads to a KV head, whose rows are no whole registers' in a decode
    "layouts_of_odd_groups": {
        "layout": Layout(32, 32, "all", density=0.3), "num_heads": 14, "sinks": True,
        "alibi": "heads",
    },
    "layout_and_bias": {"layout": Layout(32, 64, "one"), "bias": "float"},
    "wide_keys": {"head_dim": 256, "head_dim_v": 128, **FLOAT32},
    "few_heads": {"num_heads": 4, "num_kv_heads": 2, "bias": "float"},
    # heads that fill no words, lanes or registers
    "odd_heads": {"num_heads": 3, "num_kv_heads": 3},
    "one_narrow_head_of_each_kv_head": {
        "num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "page_size": 32, "alibi": "batch"
    },
    "biases_of_odd_groups": {
        "num_heads": 6, "head_dim": 64, "bias": "float", "bias_heads": "all"
    },
    # pairs of heads of 16 bits are of two KV heads
    "heads_of_their_own": {"num_heads": 8, "num_kv_heads": 8, "sinks": True},
}  # fmt: skip
# one of the above has each part of these
OTHER_CASES = {
    "bias": {"bias": "float"},
    "bias_of_heads": {"bias": "float", "bias_heads": "all"},
    "layout": {"layout": Layout(16, 32, "one")},
    "layouts_of_sequences": {"layout": Layout(64, 16, "one", True), **WINDOW, **FLOAT32},
    "layouts_of_heads": {"layout": Layout(16, 32, "all", density=0.3)},
    "odd_groups": {"num_heads": 14, "sinks": True, "alibi": "heads"},
    "four_odd_groups": {
        "layout": Layout(32, 32, "all", density=0.3), "num_heads": 28, "num_kv_heads": 4
    },
    "layouts_of_kv_heads_stacked": {
        "layout": Layout(32, 32, "kv", density=0.3), "num_heads": 8, "num_kv_heads": 4
    },
    "layouts_of_one_kv_head": {
        "layout": Layout(32, 128, "all", density=0.3), "num_heads": 8, "num_kv_heads": 1
    },
    "wide": {"head_dim": 256, "bias": "float"},
    "wide_values": {"head_dim": 64, "head_dim_v": 128},
    "slopes_of_sequences": {"alibi": "batch", "num_heads": 6},
    "narrow_layout": {"head_dim": 64, "layout": Layout(16, 32, "kv")},
    "narrow_dropout": {"head_dim": 64, "dropout_p": 0.3},
    # more than there are lanes for their lse, of one KV head
    "many_heads": {"num_heads": 130, "num_kv_heads": 1, "seqs": ((1, 90), (1, 5), (0, 9))},
}  # fmt: skip


def cases(some, others):
    """All of them: one, the rest of `some` left to the TPU's own suite, the others to `make
    thorough`.
    """
    first, *rest = some
    left = [(case, pytest.mark.device_suite) for case in rest]
    left += [(case, pytest.mark.thorough) for case in others]
    return [first, *(pytest.param(case, marks=mark) for case, mark in left)]


@pytest.mark.device_suite  # of few tokens in the sample
@pytest.mark.parametrize("case", cases(CASES, OTHER_CASES))
def test_tokens_are_read_where_they_lie(case, run):
    call = build(dataclasses.replace(MIXED, **(CASES | OTHER_CASES)[case]))
    assert_accurate(*run(call, "on_wait"), call.truth())


@pytest.mark.device_suite
@pytest.mark.parametrize("seqs", cases([((8, 40), (9, 3))], [((1, 30),), ((17, 4),)]), ids=str)
def test_a_bias_of_few_tokens(seqs, run):
    """Fewer than a copy has rows; one token more than whole tiles of memory."""
    call = build(dataclasses.replace(MIXED, seqs=seqs, bias="float"))
    assert_accurate(*run(call, "on_wait"), call.truth())


@pytest.mark.device_suite
def test_rows_of_a_layout_have_launches_of_their_own(run, monkeypatch):
    """Where its words do not fit the scalar core's memory."""
    from torch_paged_attn.backends.tpu.kernels import layout_mask

    monkeypatch.setattr(layout_mask, "MOST_WORDS", layout_mask.ROUNDED + 400)
    sparse = Layout(16, 32, "all", density=0.5)
    seqs = (70, 200), (1, 90), (20, 30)
    call = build(dataclasses.replace(MIXED, num_heads=4, seqs=seqs, layout=sparse))
    assert_accurate(*run(call, "on_wait"), call.truth())


@pytest.mark.device_suite  # a shape that is planned, not run
def test_a_layout_of_60_000_tokens_has_room_on_v4():
    """Beside the blocks of its tiles there is room for some of its rows at a time."""
    import jax
    import jax.numpy as jnp

    from torch_paged_attn.backends.tpu.functions import blocksparse
    from torch_paged_attn.backends.tpu.tile_sizes import CHIPS

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


@pytest.mark.parametrize("longest", cases([4], [2]))
def test_sequences_of_few_tokens_are_read_where_they_lie(longest, run):
    """Speculation: up to so many tokens of each sequence."""
    seqs = ((longest, 300), (1, 17), (0, 5), (2, 30))
    call = build(dataclasses.replace(MIXED, seqs=seqs, sinks=True))
    assert_accurate(*run(call, "on_wait"), call.truth())


PARTS = {
    "everything": {
        "layout": Layout(32, 32, "all"), "bias": "float", "bias_heads": "all", "dropout_p": 0.3,
        "sinks": True, "alibi": "heads",
    }
}  # fmt: skip
OTHER_PARTS = {
    "plain": {"sinks": True, "alibi": "heads"},
    "bias_of_heads": {"bias": "float", "bias_heads": "all"},
    "dropout": {"dropout_p": 0.3},
    "layout": {"layout": Layout(32, 32, "one")},
}


@pytest.mark.device_suite
@pytest.mark.parametrize("case", cases(PARTS, OTHER_PARTS))
def test_heads_that_do_not_fit_together_have_launches_of_their_own(case, run):
    """As 128 KV heads of DeepSeek's prefill do not on v4."""
    from torch_paged_attn.backends.tpu.tile_sizes import Config, forward_bytes

    wide = {"num_heads": 8, "num_kv_heads": 4, "head_dim": 192, "head_dim_v": 128}
    call = build(dataclasses.replace(MIXED, **wide, **(PARTS | OTHER_PARTS)[case]))
    small = Config(block_k=128, step_k=128, tile_rows=64, num_buffers=2, vmem_bytes=3 << 19)
    of_heads = (functools.partial(forward_bytes, n, (256, 128), (2, 2), (0, 1), 1) for n in (4, 2))
    assert [small.fits(bytes_of) for bytes_of in of_heads] == [False, True]
    assert_accurate(*run(call, "on_wait", config=small), call.truth())
