"""The mask that kernels draw is the reference's, whichever way scores lie."""

import types

import pytest
import torch

from torch_paged_attn.reference.philox import dropout_keep

GROUP, FIRST_KEY, SEQUENCE, FIRST_QUERY = 2, 128, 3, 5
OTHERS = (128, 256), (256, 512)


@pytest.mark.parametrize(
    "tile_q, keys",
    [
        (8, 256),
        pytest.param(64, 512, marks=pytest.mark.device_suite),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in OTHERS),
    ],
)
@pytest.mark.parametrize("query_axis", [0, 1], ids=["queries_stay", "keys_stay"])
def test_kernels_keep_what_the_reference_keeps(query_axis, tile_q, keys):
    import jax.numpy as jnp
    import numpy as np

    from torch_paged_attn.backends.tpu.kernels.scores import Scores

    seed, offset, p = 0x1234_5678_9ABC, 7, 0.3
    words = (seed & 0xFFFFFFFF, seed >> 32, offset)
    tiles = types.SimpleNamespace(
        first_query=jnp.array([FIRST_QUERY]), sequence=jnp.array([SEQUENCE])
    )
    refs = types.SimpleNamespace(rng=[jnp.uint32(x) for x in words], tiles=tiles)
    options = types.SimpleNamespace(
        tile_q=tile_q, group_size=GROUP, first_head=0, dropout_p=p, fold=1
    )
    sizes = (tile_q * GROUP, keys)
    piece = Scores.of_piece(refs, options, 0, jnp.int32(FIRST_KEY), sizes, query_axis)
    kept = torch.from_numpy(np.array(piece.keep(1)) != 0)  # of the second KV head
    kept = kept if query_axis == 0 else kept.T
    heads = kept.reshape(GROUP, tile_q, keys)
    state = torch.tensor([seed, offset])
    query_len, key_len = FIRST_QUERY + tile_q, FIRST_KEY + keys
    expected = dropout_keep(state, p, SEQUENCE, 2 * GROUP, query_len, key_len)
    assert torch.equal(heads, expected[GROUP:, FIRST_QUERY:, FIRST_KEY:])


def test_high_halves_of_low_ones():
    import jax.numpy as jnp
    import numpy as np

    from torch_paged_attn.backends.tpu.kernels.dropout import MULTIPLIERS, mulhilo

    edges = np.array([0, 1, 0xFFFF, 0x10000, 0x10001, 0x7FFFFFFF, 0x80000000], np.uint32)
    drawn = np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)
    # every sum of a carry and an estimate is near a multiple of 2**16 for some of these
    numbers = np.concatenate([edges, ~edges, drawn, drawn << 16, drawn >> 16, drawn | 0xFFFF])
    # the two halves' sum, which decides between two ways, up to 2**16 and above it
    for a in (*MULTIPLIERS, 0, 1, 0x7FFF8001, 0x80008000, 0x80008001, 0xFFFF0001, 0xFFFFFFFF):
        high, low = mulhilo(a, jnp.asarray(numbers))
        whole = a * numbers.astype(np.uint64)
        assert np.array_equal(np.asarray(high), whole >> 32)
        assert np.array_equal(np.asarray(low), whole & 0xFFFFFFFF)
