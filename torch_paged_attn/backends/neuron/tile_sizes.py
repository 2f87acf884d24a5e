"""The sizes of a call's items and stacks: as large as SBUF has room for."""

import dataclasses
import math

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.runtime import num_programs
from torch_paged_attn.backends.neuron.tables import Heads
from torch_paged_attn.backends.neuron.work_list import KeyTile
from torch_paged_attn.ops.checks import FLOAT

KEY_TILES = (512, 256, 128)
DEPTHS = (16, 8, 4, 2, 1)
RUNS = (4, 2, 1)
# in longer tiles a run is long enough for a DMA to be efficient
LONG_RUNS = (16, 8)

# bytes that a DMA's pieces have at least where it is efficient, by NKI's bandwidth guide
LONG_PIECE = 2048
# partitions that a head has at least, where several share a gather of keys
LEAST_SHARE = 32

# bytes of a partition of SBUF for an item's keys and values, for what a stack keeps, and for both
# and a tile's results: the rest is for what is computed on the way
KEY_BYTES = 64 * 1024
STACK_BYTES = 96 * 1024
ALL_BYTES = 160 * 1024


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes that the tables and the kernel share."""

    heads: Heads
    key_tiles: tuple[KeyTile, ...]  # of an item, from the longest to the shortest
    deepest: int  # tiles of query rows in the deepest stack
    splits_heads: bool  # the programs of a logical core share the heads, else the items
    loaded: int  # KV heads that one program loads
    item_programs: int  # that share the items


def heads_of(call: AttentionCall) -> Heads:
    """All KV heads together, unless a layout tells them apart or a tile of all has no room."""
    planes = 1 if call.layout is None else call.layout.crow_indices.shape[-2]
    keys, stack, results = (call.num_kv_heads * n for n in _bytes_of_head(call))
    if planes == 1 and (keys > KEY_BYTES or keys + stack + results > ALL_BYTES):
        planes = call.num_kv_heads
    return Heads(call.num_kv_heads, call.group_size, planes)


def choose_tile_sizes(
    call: AttentionCall, heads: Heads, rows: tuple[PagedKV, PagedKV]
) -> TileSizes:
    """The tiles of keys, and the deepest stack of queries.

    Where a page's tokens are contiguous, tiles may be longer, so that runs are: `LONG_RUNS` tokens
    for each partition.
    """
    programs = num_programs()
    splits_heads = heads.together % programs == 0
    loaded = heads.together // programs if splits_heads else heads.together
    token_bytes, kept, results = (loaded * n for n in _bytes_of_head(call))

    def fits_keys(n: int) -> bool:
        keys = n // P * token_bytes
        return keys <= KEY_BYTES and keys + kept + results <= ALL_BYTES

    tile_k = next(n for n in KEY_TILES if fits_keys(n) or n == P)
    room = min(STACK_BYTES, ALL_BYTES - results - tile_k // P * token_bytes)
    deepest = next(n for n in DEPTHS if n * kept <= room or n == 1)
    if call.layout is not None:  # of which a row fills no more than this
        needed = -(-call.layout.q_block_size * heads.members // P)
        deepest = min(n for n in DEPTHS if n >= min(needed, deepest))
    run, share, key_tiles = 1, 1, []
    if call.page_size and all(r.slot_stride == r.dim for r in rows):
        block = call.page_size if call.layout is None else call.layout.k_block_size
        fits = math.gcd(call.page_size, block)
        run = next(n for n in RUNS if fits % n == 0 and n * P <= tile_k)
        share = _share(call, heads, loaded, fits, run, rows[0])
        for n in LONG_RUNS:
            # two items' keys and values beside a stack
            tiles = (ALL_BYTES - 2 * n * token_bytes) // kept
            if fits % n == 0 and n * P > tile_k and tiles >= 1:
                key_tiles.append(KeyTile(n * P, n, tiles))
    return TileSizes(
        heads=heads,
        key_tiles=(*key_tiles, KeyTile(tile_k, run, deepest, share)),
        deepest=deepest,
        splits_heads=splits_heads,
        loaded=loaded,
        item_programs=1 if splits_heads else programs,
    )


def _share(
    call: AttentionCall, heads: Heads, loaded: int, fits: int, run: int, rows: PagedKV
) -> int:
    """How many heads share a gather of keys in runs of `run` tokens, or of more until pieces are
    long; `fits` tokens lie side by side. An item with a head of its own shares with no other,
    and what a bias hides is laid out for unshared keys.
    """
    share = 1
    if heads.planes > 1 or call.attn_bias is not None or rows.head_stride % rows.storage.shape[1]:
        return share
    while (
        share * run * call.head_dim * call.k.itemsize < LONG_PIECE
        and loaded % (2 * share) == 0
        and fits % (2 * share * run) == 0
        and P // (2 * share) >= LEAST_SHARE
    ):
        share *= 2
    return share


def _bytes_of_head(call: AttentionCall) -> tuple[int, int, int]:
    """What a partition holds of one KV head: a key and value, a stack's row, and a row's result."""
    dim, dim_v = call.head_dim, call.head_dim_v
    query_bytes = call.q.itemsize if call.q.dtype in FLOAT else 2  # 8 bits become bfloat16
    result_bytes = call.result_dtype.itemsize if call.result_dtype in FLOAT else 4
    return (dim + dim_v) * call.k.itemsize, dim * query_bytes + dim_v * 4, dim_v * result_bytes
