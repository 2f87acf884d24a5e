"""The producer for keys in order instead of lists: each query of a sequence sees its keys from the
first on, up to its own position with a causal mask. No list is in memory.

A unit of work is a pair of blocks of keys. The units of all tokens are dealt out by the sequences'
lengths, as in `mla/shares.py`; `mla/combine.py` adds up the parts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.forward.producer import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from torch_paged_attn.backends.triton.hopper.mla.arguments import MlaParams, MlaSizes
from torch_paged_attn.backends.triton.hopper.mla.pipeline import KEYS
from torch_paged_attn.backends.triton.hopper.mla.shares import first_share, rest_of, tile_of
from torch_paged_attn.backends.triton.hopper.selected.producer import (
    TokenList,
    copied_layout,
    copy_block,
    end_tiles,
    load_queries,
    rows_of,
)


@gluon.jit
def _keys_of(tile, context_len, OPTIONS: gl.constexpr):
    """The keys that the token of a tile sees, as a list that has no entries."""
    stop_key = tile.key_len
    if OPTIONS.HAS_RIGHT:
        stop_key = gl.minimum(stop_key, context_len + tile.first_token + 1)
    # values that were not checked must not lead outside the keys
    first_key = gl.maximum(-tile.k_start, 0) + 0 * stop_key
    return TokenList(0, 0, first_key, stop_key, tile.k_start, tile.table)


@gluon.jit
def produce_in_order(params, pipelines, OPTIONS: gl.constexpr):
    """Load queries and keys of the units of a program's share, token after token."""
    wait_for_kernel_before()
    # so that the second kernel need only wait for the programs to end
    let_next_kernel_start()
    sizes = params.sizes
    of_shares = MlaParams(
        None, None, None, None, None, params.pointers,
        MlaSizes(
            sizes.num_rows, sizes.batch, sizes.total_q, sizes.entries, sizes.stride_table
        ),
        params.scalars,
    )  # fmt: skip
    share = first_share(of_shares, OPTIONS)
    n = 0
    tile = 0
    while share.unit < share.stop:
        found, context_len = tile_of(share, of_shares, OPTIONS)
        if found.units > 0:
            part = 2 * share.group + (found.first == 0).to(gl.int32)
            part = part * OPTIONS.HEAD_TILES + share.head_tile
            part = gl.where(found.units == found.units_of_tile, -1, part)
            seen = _keys_of(found, context_len, OPTIONS)
            key = gl.arange(0, KEYS, gl.SliceLayout(1, copied_layout()))
            key += found.first * OPTIONS.UNIT_KEYS
            rows = rows_of(key, seen, params, OPTIONS)
            token = found.q_start + found.first_token
            load_queries(
                tile, token, found.head, part, found.units, share.b, params, pipelines, OPTIONS
            )
            for _ in range(found.units):
                # where the next block is, is loaded before this one's room is waited for
                after = rows_of(key + KEYS, seen, params, OPTIONS)
                copy_block(n, rows, params, pipelines, OPTIONS, 0)
                key += 2 * KEYS
                rows = rows_of(key, seen, params, OPTIONS)
                copy_block(n, after, params, pipelines, OPTIONS, 1)
                n += 1
            tile += 1
        share = rest_of(share, found)
    end_tiles(tile, pipelines)
