"""The attention kernel: flash attention over tiles of queries (FlashAttention-2, arXiv 2307.08691).

One grid step is one tile: a few tokens of one sequence, with all heads. The rows of a KV head are
its group's, `row = g * tile_q + token`, so that a decode step's heads share the keys they read.

Blocks of which every row sees every key are not masked. In the others masked scores are replaced,
and values that nobody sees are zero: no NaN of a key that nobody sees is ever multiplied.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.key_stream import Cursor, KeyStream
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.softmax import LANES, LOG2_E, MASKED, Softmax, product
from torch_paged_attn.backends.tpu.tiles import Tiles, Window

# rows from which a loop over heads is as fast as its unrolled code
LONG_TILE = 64


@dataclasses.dataclass(frozen=True)
class Statics:
    """What a kernel is compiled for, besides shapes."""

    tile_q: int
    block_k: int
    num_buffers: int
    num_cores: int
    vmem_bytes: int
    softmax_scale: float
    softcap: float
    window: Window
    out_dtype: Any
    interpret: Any


def _kernel(*refs: Any, names: tuple[str, ...], statics: Statics, num_tiles: int) -> None:
    ref = dict(zip(names, refs, strict=True))
    core, step = pl.program_id(0), pl.program_id(1)
    tile = step * statics.num_cores + core
    tiles = Tiles(*(ref[name] for name in Tiles._fields))
    is_joined = "v_hbm" not in ref
    stream = KeyStream(
        tiles=tiles,
        table=ref["table"],
        table_start=ref["table_start"],
        k_hbm=ref["k_hbm"].at[0] if is_joined else ref["k_hbm"],
        v_hbm=ref["k_hbm"].at[1] if is_joined else ref["v_hbm"],
        k_buffers=ref["k_buffers"],
        v_buffers=ref["v_buffers"],
        semaphores=ref["semaphores"],
        num_tiles=num_tiles,
        num_cores=statics.num_cores,
        static_waits=statics.interpret is True,
    )
    softmax = Softmax(ref["m_i"], ref["l_i"], ref["acc"])
    saved = ref["cursor"]

    @pl.when(step == 0)
    def _():
        for i, value in enumerate(stream.open(tile)):
            saved[i] = value

    softmax.reset(ref.get("sinks"))
    start, stop = tiles.start[tile], tiles.stop[tile]

    def attend_block(block: Array, cursor: Cursor) -> Cursor:
        slot, cursor = stream.next(cursor, tile, block)
        first = block * stream.block_k
        is_full = (tiles.full_start[tile] <= first) & (
            first + stream.block_k <= tiles.full_stop[tile]
        )
        attend = functools.partial(_attend, ref, stream, softmax, statics, tile, first, slot)
        pl.when(is_full)(functools.partial(attend, masked=False))
        pl.when(jnp.logical_not(is_full))(functools.partial(attend, masked=True))
        return cursor

    cursor = Cursor(*(saved[i] for i in range(3)))
    cursor = lax.fori_loop(
        stream.first_block(tile),
        jnp.where(start < stop, stream.stop_block(tile), 0),
        attend_block,
        cursor,
    )
    for i, value in enumerate(cursor):
        saved[i] = value

    def finish(head: Any) -> None:
        out, lse = softmax.finish(head)
        if "v_descale" in ref:
            out = out * ref["v_descale"][tiles.sequence[tile], head]
        ref["out"][0, head] = out.astype(ref["out"].dtype)
        ref["lse"][0, pl.ds(head, 1), : lse.shape[1]] = lse

    _for_heads(softmax, finish)


def _for_heads(softmax: Softmax, body: Any) -> None:
    """Unrolled where a head is little work, so that the next head's products hide its latency."""
    heads, rows = softmax.m_i.shape[:2]
    if rows < LONG_TILE:
        for head in range(heads):
            body(head)
    else:
        lax.fori_loop(0, heads, lambda head, _: body(head), None)


def _attend(
    ref: dict[str, Any],
    stream: KeyStream,
    softmax: Softmax,
    statics: Statics,
    tile: Array,
    first: Array,
    slot: Array,
    *,
    masked: bool,
) -> None:
    """Fold block `first // block_k`, which lies in buffer `slot`, into the tile's softmax."""
    rows, block_k = softmax.m_i.shape[1], stream.block_k
    tiles, window, tile_q = stream.tiles, statics.window, statics.tile_q
    dtype = ref["q"].dtype
    shape = (rows, block_k)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    start, stop = tiles.start[tile] - first, tiles.stop[tile] - first
    position = tiles.position[tile] - first
    # how far a key lies behind the row's token, but for the position of the tile
    offset = (
        lane if tile_q == 1 else lane - (lax.broadcasted_iota(jnp.int32, shape, 0) & (tile_q - 1))
    )
    if masked:
        visible = lane < stop
        if tile_q > 1 and window.right >= 0:
            visible &= offset <= position + window.right
        if window.left >= 0:
            visible &= offset >= position - window.left
        key = lax.broadcasted_iota(jnp.int32, (block_k, 1), 0)
        is_seen = (key >= start) & (key < stop)

    def attend_head(head: Any) -> None:
        k = stream.k_buffers[slot, :, head].reshape(block_k, -1).astype(dtype)
        v = stream.v_buffers[slot, :, head].reshape(block_k, -1)
        if masked:
            v = jnp.where(is_seen, v, jnp.zeros_like(v))
        scale = statics.softmax_scale
        if "score_scale" in ref:
            scale = scale * ref["score_scale"][tiles.sequence[tile], head]
        scores = product(ref["q"][0, head], k, 1)
        if statics.softcap > 0.0:
            scores = jnp.tanh(scores * (scale / statics.softcap)) * (statics.softcap * LOG2_E)
        else:
            scores = scores * (scale * LOG2_E)
        if "slopes" in ref:
            distance = jnp.abs(offset - position).astype(jnp.float32)
            scores = scores - ref["slopes"][0, head] * distance
        if masked:
            scores = jnp.where(visible, scores, MASKED)
        softmax.fold(head, scores, v.astype(dtype), dtype)

    _for_heads(softmax, attend_head)


def attend_tiles(
    q: Array,
    pages: Pages,
    tiles: Tiles,
    statics: Statics,
    *,
    sinks: Array | None,
    slopes: Array | None,
    score_scale: Array | None,
    v_descale: Array | None,
) -> tuple[Array, Array]:
    """`q` (num_tiles, num_kv_heads, rows, head_dim) to out of that shape, and lse without the last
    axis, padded to whole lanes.

    `sinks` and `slopes` are (1 or batch, num_kv_heads, rows, 1), in base 2; `score_scale` and
    `v_descale` (batch, num_kv_heads).
    """
    num_tiles, heads, rows, _ = q.shape
    dim, dim_v, page_size = pages.head_dim, pages.head_dim_v, pages.page_size
    kv_dtype = pages.k.dtype
    block_pages = statics.block_k // page_size
    lse_width = -(-rows // LANES) * LANES
    num_cores = statics.num_cores

    def of_tile(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * num_cores + core, 0, 0, 0

    def of_sequence(core: Any, step: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
        return sequence[step * num_cores + core], 0, 0, 0

    scalars: dict[str, Array] = tiles._asdict() | {
        "table_start": pages.table_start,
        "table": pages.table,
    }
    inputs: dict[str, tuple[Array, pl.BlockSpec]] = {
        "q": (q, pl.BlockSpec((1, *q.shape[1:]), of_tile)),
        "k_hbm": (pages.k, pl.BlockSpec(memory_space=pl.ANY)),
    }
    if pages.v is not None:
        inputs["v_hbm"] = (pages.v, pl.BlockSpec(memory_space=pl.ANY))
    for name, column in (("sinks", sinks), ("slopes", slopes)):
        if column is not None:
            index = of_sequence if column.shape[0] > 1 else lambda *_: (0, 0, 0, 0)
            inputs[name] = (column, pl.BlockSpec((1, *column.shape[1:]), index))
    for name, factor in (("score_scale", score_scale), ("v_descale", v_descale)):
        if factor is not None:
            inputs[name] = (factor, pl.BlockSpec(memory_space=pltpu.SMEM))
    scratch: dict[str, Any] = {
        "k_buffers": pltpu.VMEM(
            (statics.num_buffers, block_pages, heads, page_size, dim), kv_dtype
        ),
        "v_buffers": pltpu.VMEM(
            (statics.num_buffers, block_pages, heads, page_size, dim_v), kv_dtype
        ),
        "semaphores": pltpu.SemaphoreType.DMA((2, statics.num_buffers)),
        "m_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "l_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((heads, rows, dim_v), jnp.float32),
        "cursor": pltpu.SMEM((3,), jnp.int32),
    }
    names = (*scalars, *inputs, "out", "lse", *scratch)
    kernel = functools.partial(_kernel, names=names, statics=statics, num_tiles=num_tiles)
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct((num_tiles, heads, rows, dim_v), statics.out_dtype),
            jax.ShapeDtypeStruct((num_tiles, heads, lse_width), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_tiles // num_cores),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=(
                pl.BlockSpec((1, heads, rows, dim_v), of_tile),
                pl.BlockSpec((1, heads, lse_width), lambda *args: of_tile(*args)[:3]),
            ),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=statics.vmem_bytes,
            # ids are clipped before the launch
            disable_bounds_checks=True,
        ),
        interpret=statics.interpret,
        name=f"paged_attn_flash_varlen_q{statics.tile_q}",
    )(*scalars.values(), *(value for value, _ in inputs.values()))
