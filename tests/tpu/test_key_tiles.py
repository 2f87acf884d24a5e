"""Tiles of keys: each names the tiles of queries that see one of its keys, and no others."""

import hypothesis
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from torch_paged_attn.backends.tpu.tiles import Lengths, Window, cut_keys, cut_queries

TILE_Q, TILE_K = 4, 8
# all plans have these sizes, so that nothing is compiled for each
BATCH, TOTAL_Q, TOTAL_K = 3, 40, 72


@hypothesis.given(
    lengths=st.lists(
        st.tuples(st.integers(0, 13), st.integers(0, 21)), min_size=BATCH, max_size=BATCH
    ),
    gaps=st.integers(0, 3),
    left=st.integers(-1, 9),
    right=st.integers(-1, 9),
    num_cores=st.sampled_from([1, 2]),
)
@hypothesis.settings(deadline=None, max_examples=12)
def test_key_tiles(lengths, gaps, left, right, num_cores):
    query, key = (np.array(x, np.int32) for x in zip(*lengths, strict=True))
    first_query, first_key = np.cumsum(query) - query, np.cumsum(key + gaps) - (key + gaps)
    given = Lengths(*(jnp.asarray(x, jnp.int32) for x in (first_query, query, key)))
    sizes = dict(tile_q=TILE_Q, window=Window(left, right), num_cores=num_cores)
    cut = cut_queries(given, TOTAL_Q, **sizes)
    keys = cut_keys(given, jnp.asarray(first_key), TOTAL_K, tile_k=TILE_K, **sizes)

    # by hand: which tokens of q see which rows of k
    sees = np.zeros((TOTAL_Q, TOTAL_K), bool)
    for b, (lq, lk) in enumerate(lengths):
        for i in range(lq):
            position = lk - lq + i
            start = 0 if left < 0 else max(0, position - left)
            stop = lk if right < 0 else max(0, min(lk, position + right + 1))
            sees[first_query[b] + i, first_key[b] + start : first_key[b] + max(start, stop)] = True

    pairs = np.zeros((len(keys.tiles.sequence), len(cut.tiles.sequence)), bool)
    for tile, (first, num) in enumerate(
        zip(keys.tiles.first_tile, keys.tiles.num_visits, strict=True)
    ):
        pairs[tile, int(first) : int(first) + int(num)] = True
    wanted = np.zeros_like(pairs)
    queries, rows = np.nonzero(sees)
    wanted[np.array(keys.tile_of)[rows], np.array(cut.tile_of)[queries]] = True
    assert (pairs == wanted).all()

    # every key is in its place, and only those count
    live = np.zeros(TOTAL_K, bool)
    for b, (_, lk) in enumerate(lengths):
        live[first_key[b] : first_key[b] + lk] = True
    assert (np.array(keys.is_token) == live).all()
    token = np.array(keys.token)[keys.tile_of, keys.place_of]
    assert (token[live] == np.flatnonzero(live)).all()
    num_tiles = len(keys.tiles.sequence)
    is_busy = np.array(keys.tiles.num_visits) > 0
    for tile in range(num_tiles + num_cores):
        later = (t for t in range(tile, num_tiles, num_cores) if is_busy[t])
        assert int(keys.tiles.next_nonempty[tile]) == next(later, num_tiles)
