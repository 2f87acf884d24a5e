"""Every byte that the attention kernels move is one that somebody needs, or is named here."""

import aot
import jax.numpy as jnp
import numpy as np
import pytest
from contenders import config_for
from generations import GENERATIONS
from jax import ShapeDtypeStruct

from torch_paged_attn.backends.tpu.functions import flash_varlen

# XLA leaves all operands in HBM here; chips with more VMEM get some of them there
GENERATION = GENERATIONS["tpu7x"]
HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
TOKEN = KV_HEADS * HEAD_DIM * 2  # bytes of one token's keys, or values
WORD = 4


def _counts(query_lens, key_lens, **options):
    """The DMA bytes of each kernel that runs a tile of this batch, by kind."""
    batch, max_pages = len(key_lens), -(-max(key_lens) // PAGE)
    total_q = sum(query_lens)
    array = ShapeDtypeStruct
    arguments = (
        array((total_q, HEADS, HEAD_DIM), jnp.bfloat16),
        array((2, batch * max_pages, KV_HEADS, PAGE, HEAD_DIM), jnp.bfloat16),
        np.append(0, np.cumsum(query_lens)).astype(np.int32),
        np.array(key_lens, np.int32),
        np.arange(batch * max_pages, dtype=np.int32).reshape(batch, max_pages),
    )

    def call(q, cache, cu_seqlens_q, seqused_k, block_table):
        return flash_varlen(
            q, cache, None, cu_seqlens_q, None, seqused_k, block_table,
            max_seqlen_q=max(query_lens), causal=True, config=config_for(GENERATION), **options,
        )  # fmt: skip

    kernels = aot.compile_kernels(call, arguments, GENERATION)
    return [kernel.counts(GENERATION).dma_bytes for kernel in kernels]


def _pages(first_key, stop):
    """Bytes of the pages that hold keys from `first_key` up to `stop`, and their values."""
    return 2 * TOKEN * PAGE * (-(-stop // PAGE) - first_key // PAGE)


@pytest.mark.parametrize("window", [-1, 300], ids=["all", "window"])
def test_decode_reads_live_pages_once(window):
    lengths = [1, 16, 17, 1000, 0, 1024, 2500]
    [moved] = _counts([1] * len(lengths), lengths, window_size_left=window)
    first = [0 if window < 0 else max(0, n - 1 - window) for n in lengths]
    live = sum(_pages(*keys) for keys in zip(first, lengths, strict=True))
    q = len(lengths) * HEADS * HEAD_DIM * 2
    assert moved["hbm_to_vmem"] == live + q
    # the logarithms of a token's heads fill 128 lanes
    lse = len(lengths) * 128 * WORD
    assert moved["vmem_to_hbm"] == q + lse


def test_a_prefill_tile_reads_the_pages_that_it_sees():
    tile_q, lengths = 256, [600, 1024]
    *_, moved = _counts(lengths, lengths)
    tiles = [(n, first) for n in lengths for first in range(0, n, tile_q)]
    live = sum(_pages(0, min(n, first + tile_q)) for n, first in tiles)
    q = sum(lengths) * HEADS * HEAD_DIM * 2
    assert moved["hbm_to_vmem"] == live + q
    assert moved["vmem_to_hbm"] == q + sum(lengths) * 128 * WORD
