"""The sizes of a call's items and stacks: as large as SBUF has room for."""

import dataclasses

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.runtime import num_programs
from torch_paged_attn.backends.neuron.work_info import Heads

KEY_TILES = (512, 256, 128)
DEPTHS = (16, 8, 4, 2, 1)
RUNS = (4, 2, 1)

# bytes of a partition of SBUF for an item's keys and values, and for what a stack keeps
KEY_BYTES = 64 * 1024
STACK_BYTES = 96 * 1024


@dataclasses.dataclass(frozen=True)
class TileSizes:
    """Sizes that the tables and the kernel share."""

    heads: Heads
    tile_k: int  # keys of an item
    run: int  # tokens that lie side by side and are gathered as one row
    deepest: int  # tiles of query rows in the deepest stack
    splits_heads: bool  # the programs of a logical core share the heads, else the items
    loaded: int  # KV heads that one program loads
    item_programs: int  # that share the items

    @property
    def chunks(self) -> int:
        """Gathers that an item's keys take."""
        return self.tile_k // (P * self.run)


def heads_of(call: AttentionCall) -> Heads:
    """All KV heads together, unless a layout tells them apart or a tile of all has no room."""
    planes = 1 if call.layout is None else call.layout.crow_indices.shape[-2]
    if planes == 1 and call.num_kv_heads * _key_bytes(call) > KEY_BYTES:
        planes = call.num_kv_heads
    return Heads(call.num_kv_heads, call.group_size, planes)


def choose_tile_sizes(
    call: AttentionCall, heads: Heads, query_bytes: int, rows: tuple[PagedKV, PagedKV]
) -> TileSizes:
    """The longest tile of keys, and the deepest stack of queries of `query_bytes` an element."""
    programs = num_programs()
    splits_heads = heads.together % programs == 0
    loaded = heads.together // programs if splits_heads else heads.together
    token_bytes = loaded * _key_bytes(call)
    tile_k = next(n for n in KEY_TILES if n // P * token_bytes <= KEY_BYTES or n == P)
    kept = loaded * (call.head_dim * query_bytes + call.head_dim_v * 4)
    run = 1
    if call.page_size and all(r.slot_stride == r.dim for r in rows):
        run = next(n for n in RUNS if call.page_size % n == 0 and n * P <= tile_k)
    return TileSizes(
        heads=heads,
        tile_k=tile_k,
        run=run,
        deepest=next(n for n in DEPTHS if n * kept <= STACK_BYTES or n == 1),
        splits_heads=splits_heads,
        loaded=loaded,
        item_programs=1 if splits_heads else programs,
    )


def _key_bytes(call: AttentionCall) -> int:
    return (call.head_dim + call.head_dim_v) * call.k.itemsize
