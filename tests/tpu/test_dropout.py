"""The mask that kernels draw is the reference's, whichever way scores lie."""

import types

import pytest
import torch

from torch_paged_attn.reference.philox import dropout_keep

TILE_Q, GROUP, KEYS, FIRST_KEY, SEQUENCE, FIRST_QUERY = 8, 2, 256, 128, 3, 5


@pytest.mark.parametrize("paired", [1, 2])
@pytest.mark.parametrize("query_axis", [0, 1], ids=["queries_stay", "keys_stay"])
def test_kernels_keep_what_the_reference_keeps(query_axis, paired):
    import jax.numpy as jnp
    import numpy as np

    from torch_paged_attn.backends.tpu.scores import Scores

    seed, offset, p = 0x1234_5678_9ABC, 7, 0.3
    words = (seed & 0xFFFFFFFF, seed >> 32, offset)
    tiles = types.SimpleNamespace(
        first_query=jnp.array([FIRST_QUERY]), sequence=jnp.array([SEQUENCE])
    )
    refs = types.SimpleNamespace(rng=[jnp.uint32(x) for x in words], tiles=tiles)
    options = types.SimpleNamespace(
        tile_q=TILE_Q, paired=paired, group_size=GROUP, first_head=0, dropout_p=p, fold=1
    )
    sizes = (TILE_Q * GROUP, KEYS)
    piece = Scores.of_piece(refs, options, 0, jnp.int32(FIRST_KEY), sizes, query_axis)
    kept = torch.from_numpy(np.array(piece.keep(1)))  # of the second KV head
    kept = kept if query_axis == 0 else kept.T
    pairs = kept.reshape(GROUP // paired, TILE_Q, paired, KEYS)
    heads = pairs.transpose(1, 2).reshape(GROUP, TILE_Q, KEYS)
    state = torch.tensor([seed, offset])
    query_len, key_len = FIRST_QUERY + TILE_Q, FIRST_KEY + KEYS
    expected = dropout_keep(state, p, SEQUENCE, 2 * GROUP, query_len, key_len)
    assert torch.equal(heads, expected[GROUP:, FIRST_QUERY:, FIRST_KEY:])


def test_high_halves_from_pieces():
    import jax.numpy as jnp
    import numpy as np

    from torch_paged_attn.backends.tpu.wide_products import _of_pieces

    numbers = np.array([0, 1, 0xFFFF, 0x10000, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF], np.uint32)
    for a in (1, 0xD2511F53, 0xFFFFFFFF):
        high = np.asarray(_of_pieces(a, jnp.asarray(numbers)))
        assert high.tolist() == [a * int(x) >> 32 for x in numbers]
