"""The launch of the attention kernel: which operand lies where, and what a grid step sees of it."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.attention_kernel import Statics, attention_kernel
from torch_paged_attn.backends.tpu.config import LANES
from torch_paged_attn.backends.tpu.key_stream import Cursor
from torch_paged_attn.backends.tpu.layout_mask import TileLayout
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.tiles import Tiles


def attend_tiles(
    q: Array,
    pages: Pages,
    tiles: Tiles,
    statics: Statics,
    *,
    sinks: Array | None = None,
    slopes: Array | None = None,
    score_scale: Array | None = None,
    out_factor: Array | None = None,
    bias: Array | None = None,
    rng: Array | None = None,
    layout: TileLayout | None = None,
) -> tuple[Array, Array]:
    """`q` (num_tiles, num_kv_heads, rows, head_dim) to out of that shape, and lse without the last
    axis, padded to whole lanes.

    Stacked KV heads count as one, but for `score_scale` and `out_factor` (batch, num_kv_heads).
    `sinks` and `slopes` are (1 or batch, num_kv_heads, rows, 1), in base 2; `bias` (num_tiles, 1 or
    num_kv_heads, rows, keys), float32; `rng` three int32: seed's low and high word, offset. With
    `heads_apart` heads that have a layout each, `q` is (num_tiles * heads_apart, 1, rows,
    head_dim), and so are tiles and layout.
    """
    num_tiles, heads, rows, _ = q.shape
    apart = statics.heads_apart
    num_cores, num_buffers = statics.num_cores, statics.num_buffers
    block_pages = statics.block_k // pages.page_size
    lse_width = -(-rows // LANES) * LANES

    def of_tile(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * num_cores + core, 0, 0, 0

    def of_heads(x: Array) -> tuple[Array, pl.BlockSpec]:
        def index(core: Any, step: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
            tile = step * num_cores + core
            head = lax.rem(tile, jnp.int32(apart)) if apart > 1 else 0
            return sequence[tile] if x.shape[0] > 1 else 0, head, 0, 0

        return x, pl.BlockSpec((1, heads, *x.shape[2:]), index)

    def whole(x: Array, memory: Any) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec(memory_space=memory)

    scalars: dict[str, Array] = tiles._asdict()
    scalars["table_start"] = pages.table_start
    scalars["table"] = jnp.pad(pages.table, (0, block_pages))
    inputs = {"q": (q, pl.BlockSpec((1, *q.shape[1:]), of_tile)), "k_hbm": whole(pages.k, pl.ANY)}
    for name, x in (("v_hbm", pages.v), ("bias", bias)):
        if x is not None:
            inputs[name] = whole(x, pl.ANY)
    for name, x in (("sinks", sinks), ("slopes", slopes)):
        if x is not None:
            inputs[name] = of_heads(x)
    for name, x in (("score_scale", score_scale), ("out_factor", out_factor), ("rng", rng)):
        if x is not None:
            inputs[name] = whole(x, pltpu.SMEM)

    if layout is not None:
        scalars |= {"visits": layout.visits.reshape(-1), "num_visits": layout.num_visits}
        words = layout.words.reshape(num_tiles, 1, -1)
        here = pl.BlockSpec(
            (1, 1, words.shape[2]), lambda *args: of_tile(*args)[:3], memory_space=pltpu.SMEM
        )
        inputs["layout"] = words, here

    buffer = (num_buffers, block_pages, heads * statics.stack, pages.page_size)
    scratch: dict[str, Any] = {
        "k_buffers": pltpu.VMEM((*buffer, pages.head_dim), pages.k.dtype),
        "v_buffers": pltpu.VMEM((*buffer, pages.head_dim_v), pages.k.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((3, num_buffers)),
        "m_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "l_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((heads, rows, pages.head_dim_v), jnp.float32),
        "cursor": pltpu.SMEM((len(Cursor._fields),), jnp.int32),
    }
    if bias is not None:
        shape = (num_buffers, min(heads, bias.shape[1]), rows, statics.block_k)
        scratch["bias_buffers"] = pltpu.VMEM(shape, jnp.float32)

    names = (*scalars, *inputs, "out", "lse", *scratch)
    kernel = functools.partial(attention_kernel, names=names, statics=statics, num_tiles=num_tiles)
    out = (num_tiles, heads, rows, pages.head_dim_v)
    lse = (num_tiles, heads, lse_width)
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(out, statics.out_dtype),
            jax.ShapeDtypeStruct(lse, jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_tiles // num_cores),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=(
                pl.BlockSpec((1, *out[1:]), of_tile),
                pl.BlockSpec((1, *lse[1:]), lambda *args: of_tile(*args)[:3]),
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
        name=f"paged_attn_{'flash_varlen' if layout is None else 'blocksparse'}_q{statics.tile_q}",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
