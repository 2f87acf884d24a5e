"""The launch of the attention kernel: where each operand lies, and which part a grid step gets."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.attention_kernel import (
    attention_kernel,
    attention_of_tokens_kernel,
)
from torch_paged_attn.backends.tpu.config import LANES, Config
from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.layout_mask import TileLayout, union_of_heads
from torch_paged_attn.backends.tpu.pages import SUBLANES, Pages
from torch_paged_attn.backends.tpu.ring import Cursor
from torch_paged_attn.backends.tpu.scalar_memory import require_room
from torch_paged_attn.backends.tpu.tiles import Tiles
from torch_paged_attn.backends.tpu.token_bias import rows_of_copy


class Modifiers(NamedTuple):
    """Operands that change scores or results, None where the call does not have them.

    Stacked KV heads count as one, but in `score_scale` and `out_factor`.
    """

    # (num_tiles, 1 or num_kv_heads, rows, keys), in base 2; or of tokens as they lie
    bias: Array | None
    sinks: Array | None  # (1 or batch, num_kv_heads, rows, 1), in base 2
    slopes: Array | None  # (1 or batch, num_kv_heads, rows, 1), in base 2
    score_scale: Array | None  # (batch * num_kv_heads,)
    out_factor: Array | None  # (batch * num_kv_heads,)
    rng: Array | None  # three int32: the seed's low and high word, the offset


def of_tile(shape: tuple[int, ...], num_cores: int, **memory: Any) -> pl.BlockSpec:
    """The grid step's tile of an operand whose first axis is tiles."""

    def index(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * num_cores + core, *(0 for _ in shape[1:])

    return pl.BlockSpec((1, *shape[1:]), index, **memory)


def of_sequence(x: Array, num_cores: int, heads: int, apart: int = 1) -> pl.BlockSpec:
    """What an operand (1 or batch, num_kv_heads, ...) has for the tile's sequence; the kernel's
    first table says which one that is.
    """

    def index(core: Any, step: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
        tile = step * num_cores + core
        head = lax.rem(tile, jnp.int32(apart)) if apart > 1 else 0
        return sequence[tile] if x.shape[0] > 1 else 0, head, 0, 0

    return pl.BlockSpec((1, heads, *x.shape[2:]), index)


def compiler_params(config: Config) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=("parallel", "arbitrary"),
        vmem_limit_bytes=config.vmem_bytes,
        # ids are clipped before the launch
        disable_bounds_checks=True,
    )


def _tables(pages: Pages, block_pages: int) -> dict[str, Array]:
    starts = {} if pages.table_start is None else {"table_start": pages.table_start}
    return {**starts, "table": pages.table_of_blocks(block_pages)}


def attend_tiles(
    q: Array,
    pages: Pages,
    tiles: Tiles,
    modifiers: Modifiers,
    layout: TileLayout | None,
    options: Options,
) -> tuple[Array, Array]:
    """`q` (num_tiles, num_kv_heads, rows, head_dim) to out of that shape, and to base-2 lse without
    the last axis, padded to whole lanes. Where a row of keys holds several, `q` is `Heads.folded`.

    Stacked KV heads count as one. With `heads_apart` heads that have a layout each, `q` is
    (num_tiles * heads_apart, 1, rows, head_dim), and so are tiles and layout.
    """
    num_tiles, heads, rows, _ = q.shape
    out_rows = rows // options.fold
    width_k, width_v = pages.widths
    apart, config, bias = options.heads_apart, options.config, modifiers.bias
    num_cores, num_buffers = config.num_cores, config.num_buffers
    block_pages = options.block_k // pages.page_size
    lse_width = -(-out_rows // LANES) * LANES

    def whole(x: Array, memory: Any) -> tuple[Array, pl.BlockSpec]:
        return x, pl.BlockSpec(memory_space=memory)

    scalars: dict[str, Array] = tiles._asdict()
    scalars |= _tables(pages, block_pages)
    inputs = {"q": (q, of_tile(q.shape, num_cores)), "k_hbm": whole(pages.k, pl.ANY)}
    if pages.v is not None:
        inputs["v_hbm"] = whole(pages.v, pl.ANY)
    for name, x in modifiers._asdict().items():
        if x is not None:
            if name in ("sinks", "slopes"):
                inputs[name] = x, of_sequence(x, num_cores, heads, apart)
            else:
                inputs[name] = whole(x, pl.ANY if name == "bias" else pltpu.SMEM)

    if layout is not None:
        scalars |= {"visits": layout.visits.reshape(-1), "num_visits": layout.num_visits}
        words = layout.words.reshape(num_tiles, 1, -1)
        inputs["layout"] = words, of_tile(words.shape, num_cores, memory_space=pltpu.SMEM)

    buffer = (num_buffers, block_pages, heads * options.stack, pages.k.shape[-2])
    of_values = {"v_buffers": pltpu.VMEM((*buffer, width_v), pages.k.dtype)}
    if pages.shared:
        of_values = {}
    scratch: dict[str, Any] = {
        "k_buffers": pltpu.VMEM((*buffer, width_k), pages.k.dtype),
        **of_values,
        "semaphores": pltpu.SemaphoreType.DMA((3, num_buffers)),
        "m_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "l_i": pltpu.VMEM((heads, rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((heads, rows, width_v), jnp.float32),
        "cursor": pltpu.SMEM((len(Cursor._fields),), jnp.int32),
    }
    if bias is not None:
        shape = (num_buffers, min(heads, bias.shape[1]), rows, options.block_k)
        scratch["bias_buffers"] = pltpu.VMEM(shape, jnp.float32)

    op = "flash_varlen" if layout is None else "blocksparse"
    require_room(op, scalars, inputs, scratch)
    names = (*scalars, *inputs, "out", "lse", *scratch)
    kernel = functools.partial(attention_kernel, names=names, options=options, num_tiles=num_tiles)
    out = (num_tiles, heads, out_rows, width_v // options.fold)
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
            out_specs=(of_tile(out, num_cores), of_tile(lse, num_cores)),
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=compiler_params(config),
        interpret=options.interpret,
        name=f"paged_attn_{op}_q{options.tile_q}",
    )(*scalars.values(), *(x for x, _ in inputs.values()))


def attend_tokens(
    q: Array,
    results: tuple[Array, Array] | None,
    pages: Pages,
    lengths: tuple[Array, Array],
    modifiers: Modifiers,
    words: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """`q` (total_q, num_heads, head_dim) to out of that shape, and to base-2 lse
    (total_q, 1, LANES), a lane for a head: of the sequences that the launch is for. Tiles of one
    token read queries that are narrower than rows of keys.

    Where a row of keys holds several, a KV head's queries stand there as often (`Heads.folded`),
    and a row of out begins with the values' width.

    `words` are those of `layout_words`. The bias is `token_bias.readable`.

    What an earlier launch has written is in `results`, whose memory is given away. `lengths` are
    cu_seqlens_q and the numbers of keys.
    """
    total_q, num_heads = q.shape[0], q.shape[1] // options.fold
    config, tile_q = options.config, options.tile_q
    num_cores, num_buffers = config.num_cores, config.num_buffers
    width_k, width_v = pages.widths
    heads, rows = num_heads // options.group_size, options.group_size * tile_q
    whole_rows = -(-rows * options.fold // SUBLANES) * SUBLANES
    block_pages = options.block_k // pages.page_size
    cu_seqlens, key_lens = lengths
    batch, longest = key_lens.shape[0], min(options.most_queries, total_q)
    # of each sequence the last tile may be in part
    bound = batch if longest <= tile_q else (total_q + batch * (tile_q - 1)) // tile_q
    bound = min(bound, total_q // options.least_queries + 1, total_q)
    num_tiles = max(1, -(-bound // num_cores)) * num_cores
    of_token = (heads, rows) if tile_q == 1 else (num_heads,)
    of_queries = *of_token[:-1], of_token[-1] * options.fold

    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    scalars = {
        **_tables(pages, block_pages),
        "cu_seqlens": cu_seqlens,
        "key_lens": key_lens,
    }
    if words is not None:
        _, bounds, num_blocks, of_heads = words.shape
        options = dataclasses.replace(
            options,
            layout_shape=(bounds - 1, num_blocks, of_heads),
            layouts_of_head=of_heads // heads if of_heads > 1 else 0,
        )
        scalars["layout_words"] = words.reshape(-1)
        if of_heads > 1:
            scalars["layout_union"] = union_of_heads(words).reshape(-1)
    inputs = {"q_hbm": (q.reshape(total_q, *of_queries, q.shape[-1]), anywhere)}
    inputs["k_hbm"] = pages.k, anywhere
    if pages.v is not None:
        inputs["v_hbm"] = pages.v, anywhere
    for name, x in modifiers._asdict().items():
        if x is not None:
            spec = anywhere if name == "bias" else pl.BlockSpec(memory_space=pltpu.SMEM)
            if name in ("sinks", "slopes"):
                spec = pl.BlockSpec((1, *x.shape[1:]), lambda *_: (0, 0, 0, 0))
            inputs[name] = x, spec
    out = jax.ShapeDtypeStruct((total_q, *of_token, width_v), options.out_dtype)
    lse = jax.ShapeDtypeStruct((total_q, 1, LANES), jnp.float32)
    aliases = {}
    if results is not None:
        aliases = {len(scalars) + len(inputs) + i: i for i in range(2)}
        inputs["earlier_out"] = results[0].reshape(out.shape), anywhere
        inputs["earlier_lse"] = results[1], anywhere

    def in_parts(heads: tuple[int, ...], width: int) -> tuple[int, ...]:
        of_tile = tile_q, *heads
        return (*of_tile, width) if tile_q == 1 else (width // LANES, *of_tile, LANES)

    buffer = (num_buffers, block_pages, heads * options.stack, pages.k.shape[-2])
    of_lse = (whole_rows // options.fold if tile_q == 1 else tile_q, LANES)
    of_values = {"v_buffers": pltpu.VMEM((*buffer, width_v), pages.k.dtype)}
    if pages.shared:
        of_values = {}
    scratch: dict[str, Any] = {
        **{name: pltpu.SMEM((num_tiles + num_cores,), jnp.int32) for name in Tiles._fields},
        "num_tiles": pltpu.SMEM((1,), jnp.int32),
        "q_tokens": pltpu.VMEM(in_parts(of_queries, q.shape[-1]), q.dtype),
        "q": pltpu.VMEM((1, heads, whole_rows, width_k), q.dtype),
        "out_tokens": pltpu.VMEM(in_parts(of_token, width_v), options.out_dtype),
        "lse_tokens": pltpu.VMEM((tile_q, 1, LANES), jnp.float32),
        "lse_m": pltpu.VMEM(of_lse, jnp.float32),
        "lse_l": pltpu.VMEM(of_lse, jnp.float32),
        "token_semaphores": pltpu.SemaphoreType.DMA((3,)),
        "k_buffers": pltpu.VMEM((*buffer, width_k), pages.k.dtype),
        **of_values,
        "semaphores": pltpu.SemaphoreType.DMA((3, num_buffers)),
        "m_i": pltpu.VMEM((heads, whole_rows, LANES), jnp.float32),
        "l_i": pltpu.VMEM((heads, whole_rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((heads, whole_rows, width_v), jnp.float32),
        "cursor": pltpu.SMEM((len(Cursor._fields),), jnp.int32),
    }
    if words is not None:
        scratch |= {
            "visits": pltpu.SMEM((num_tiles * words.shape[2],), jnp.int32),
            "num_visits": pltpu.SMEM((num_tiles,), jnp.int32),
        }
    if modifiers.bias is not None:
        of_bias, dtype = modifiers.bias.shape[0], modifiers.bias.dtype
        copied = rows_of_copy(tile_q, dtype)
        arranged = (1, of_bias) if tile_q == 1 else (of_bias, tile_q)
        copied_shape = num_buffers, of_bias, copied, options.block_k
        scratch["bias_buffers"] = pltpu.VMEM(copied_shape, dtype)
        scratch["bias_rows"] = pltpu.VMEM((*arranged, options.block_k), jnp.float32)
    op = "flash_varlen" if words is None else "blocksparse"
    require_room(op, scalars, inputs, scratch)
    names = (*scalars, *inputs, "out_hbm", "lse_hbm", *scratch)
    out, lse = pl.pallas_call(
        functools.partial(
            attention_of_tokens_kernel, names=names, options=options, num_tiles=num_tiles
        ),
        out_shape=(out, lse),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_tiles // num_cores),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=(anywhere, anywhere),
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases=aliases,
        compiler_params=compiler_params(config),
        interpret=options.interpret,
        name=f"paged_attn_{op}_q{tile_q}",
    )(*scalars.values(), *(x for x, _ in inputs.values()))
    return out.reshape(total_q, num_heads, width_v), lse
