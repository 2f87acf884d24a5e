"""The launch of the attention kernel: where each operand lies, and which part a grid step gets."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.attention_kernel import attention_kernel
from torch_paged_attn.backends.tpu.config import LANES
from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.layout_mask import TileLayout
from torch_paged_attn.backends.tpu.load_kv import Cursor
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.tiles import Tiles


class Modifiers(NamedTuple):
    """Operands that change scores or results, None where the call does not have them.

    Stacked KV heads count as one, but in `score_scale` and `out_factor`.
    """

    bias: Array | None  # (num_tiles, 1 or num_kv_heads, rows, keys), in base 2
    sinks: Array | None  # (1 or batch, num_kv_heads, rows, 1), in base 2
    slopes: Array | None  # (1 or batch, num_kv_heads, rows, 1), in base 2
    score_scale: Array | None  # (batch, num_kv_heads)
    out_factor: Array | None  # (batch, num_kv_heads)
    rng: Array | None  # three int32: the seed's low and high word, the offset


def attend_tiles(
    q: Array,
    pages: Pages,
    tiles: Tiles,
    modifiers: Modifiers,
    layout: TileLayout | None,
    options: Options,
) -> tuple[Array, Array]:
    """`q` (num_tiles, num_kv_heads, rows, head_dim) to out of that shape, and to base-2 lse without
    the last axis, padded to whole lanes.

    Stacked KV heads count as one. With `heads_apart` heads that have a layout each, `q` is
    (num_tiles * heads_apart, 1, rows, head_dim), and so are tiles and layout.
    """
    num_tiles, heads, rows, _ = q.shape
    apart, config, bias = options.heads_apart, options.config, modifiers.bias
    num_cores, num_buffers = config.num_cores, config.num_buffers
    block_pages = options.block_k // pages.page_size
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
    if pages.v is not None:
        inputs["v_hbm"] = whole(pages.v, pl.ANY)
    for name, x in modifiers._asdict().items():
        if x is not None:
            memory = pl.ANY if name == "bias" else pltpu.SMEM
            inputs[name] = of_heads(x) if name in ("sinks", "slopes") else whole(x, memory)

    if layout is not None:
        scalars |= {"visits": layout.visits.reshape(-1), "num_visits": layout.num_visits}
        words = layout.words.reshape(num_tiles, 1, -1)
        here = pl.BlockSpec(
            (1, 1, words.shape[2]), lambda *args: of_tile(*args)[:3], memory_space=pltpu.SMEM
        )
        inputs["layout"] = words, here

    buffer = (num_buffers, block_pages, heads * options.stack, pages.page_size)
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
        shape = (num_buffers, min(heads, bias.shape[1]), rows, options.block_k)
        scratch["bias_buffers"] = pltpu.VMEM(shape, jnp.float32)

    names = (*scalars, *inputs, "out", "lse", *scratch)
    kernel = functools.partial(attention_kernel, names=names, options=options, num_tiles=num_tiles)
    out = (num_tiles, heads, rows, pages.head_dim_v)
    lse = (num_tiles, heads, lse_width)
    return pl.pallas_call(
        kernel,
        out_shape=(
            jax.ShapeDtypeStruct(out, options.out_dtype),
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
            vmem_limit_bytes=config.vmem_bytes,
            # ids are clipped before the launch
            disable_bounds_checks=True,
        ),
        interpret=options.interpret,
        name=f"paged_attn_{'flash_varlen' if layout is None else 'blocksparse'}_q{options.tile_q}",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
