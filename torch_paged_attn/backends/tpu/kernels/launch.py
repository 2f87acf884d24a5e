"""The launches of kernels: where each operand lies, and which part a grid step gets.

The scalar core's memory holds a kernel's tables whole: page ids, lengths, tiles,
slots. It has 1 MiB on every generation. libtpu says so when it compiles, in words of its own, and
Pallas' interpreter never does; here a call is refused by name before
(`tests/schedules/test_limits.py`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES, refuse
from torch_paged_attn.backends.tpu.kernels.arguments import MOST_WORDS, Options, Refs
from torch_paged_attn.backends.tpu.kernels.attention import attention_kernel
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import Cursor, rows_of_copy
from torch_paged_attn.backends.tpu.kernels.layout_mask import union_of_heads
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.tiles import Tiles


def require_room(
    op: str,
    scalars: dict[str, Array],
    inputs: dict[str, tuple[Array, Any]],
    scratch: dict[str, Any],
) -> None:
    """Raise NotImplementedError, with the largest tables, where a kernel has too many numbers.

    `scalars` lie there whole, and so do `inputs` and `scratch` of that memory; an input that comes
    by grid steps is there twice.
    """
    sizes = {name: _padded(x.shape) for name, x in scalars.items()}
    for name, (x, spec) in inputs.items():
        if spec.memory_space == pltpu.SMEM:
            block = spec.block_shape
            sizes[name] = _padded(x.shape) if block is None else 2 * _padded(block)
    for name, x in scratch.items():
        if getattr(x, "memory_space", None) == pltpu.SMEM:
            sizes[name] = _padded(x.shape)
    if (words := sum(sizes.values())) > MOST_WORDS:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        named = ", ".join(f"{name} {sizes[name]}" for name in largest)
        refuse(op, f"tables of {words} numbers ({named}); supported: {MOST_WORDS}")


def _padded(shape: tuple[int, ...]) -> int:
    """Words of an array, whose rows fill whole lanes."""
    return math.prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES


IN_HBM = pl.BlockSpec(memory_space=pl.ANY)
IN_SMEM = pl.BlockSpec(memory_space=pltpu.SMEM)


def of_tile(shape: tuple[int, ...], num_cores: int, **memory: Any) -> pl.BlockSpec:
    """The grid step's tile of an operand whose first axis is tiles."""

    def index(core: Any, step: Any, *_: Any) -> tuple[Any, ...]:
        return step * num_cores + core, *(0 for _ in shape[1:])

    return pl.BlockSpec((1, *shape[1:]), index, **memory)


def of_sequence(x: Array, num_cores: int) -> pl.BlockSpec:
    """What an operand (1 or batch, ...) has for the tile's sequence; the kernel's first table says
    which one that is.
    """

    def index(core: Any, step: Any, sequence: Any, *_: Any) -> tuple[Any, ...]:
        return sequence[step * num_cores + core] if x.shape[0] > 1 else 0, 0, 0, 0

    return pl.BlockSpec((1, *x.shape[1:]), index)


class Result(NamedTuple):
    """A result, and where it lies: in HBM for the kernel to copy to, unless `spec` says which part
    is a grid step's. It may take the memory of an input, which has its initial values.
    """

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec = IN_HBM
    in_place_of: str = ""


class Memory(NamedTuple):
    """What a kernel is given, by the names of `Refs`, in the order in which it gets them."""

    scalars: dict[str, Array]  # tables for the scalar core
    inputs: dict[str, tuple[Array, pl.BlockSpec]]
    results: dict[str, Result]
    scratch: dict[str, Any]


def launch(
    kernel: Callable[..., None],
    op: str,
    name: str,
    num_tiles: int,
    memory: Memory,
    options: Options,
) -> list[Array]:
    """Run `kernel(refs, options, num_tiles)` for each of `num_tiles` tiles. `op` is named where a
    call has too many numbers for the scalar core, `name` is the kernel's in profiles.
    """
    scalars, inputs, results, scratch = memory
    scratch["cursor"] = pltpu.SMEM((len(Cursor._fields),), jnp.int32)
    require_room(op, scalars, inputs, scratch)
    num_cores = options.config.num_cores
    aliases = {
        len(scalars) + list(inputs).index(result.in_place_of): i
        for i, result in enumerate(results.values())
        if result.in_place_of
    }
    names = (*scalars, *inputs, *results, *scratch)
    return pl.pallas_call(
        lambda *refs: kernel(Refs.named(names, refs), options, num_tiles),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(num_cores, num_tiles // num_cores),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[x.spec for x in results.values()],
            scratch_shapes=list(scratch.values()),
        ),
        input_output_aliases=aliases,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"),
            vmem_limit_bytes=options.config.vmem_bytes + options.config.spare_bytes,
            # ids are clipped before the launch
            disable_bounds_checks=True,
        ),
        interpret=options.interpret,
        name=f"paged_attn_{name}",
    )(*scalars.values(), *(x for x, _ in inputs.values()))


def attend_heads(
    q: Array,
    earlier: tuple[Array, Array] | None,
    pages: Pages,
    operands: dict[str, Array],
    words: Array | None,
    options: Options,
) -> tuple[Array, Array]:
    """`q` (total_q, num_heads, head_dim) to out of that shape, and to base-2 lse
    (total_q, 1, LANES), a lane for a head: of the sequences that the launch is for. Tiles of one
    token read queries that are narrower than rows of keys.

    Where a row of keys holds several, a KV head's queries stand there as often (`tiles.folded`),
    and a row of out begins with the values' width. `words` are `layout_words`. What an earlier
    launch has written is in `earlier`, whose memory is given away. `operands` are other inputs by
    their names in `ForwardRefs`; stacked KV heads count as one in `sinks` and `slopes`, which are
    (batch * num_heads,) where sequences have their own.
    """
    total_q, num_heads = q.shape[0], q.shape[1] // options.fold
    config, tile_q = options.config, options.tile_q
    width_k, width_v = pages.widths
    heads, rows = num_heads // options.group_size, options.group_size * tile_q
    unit = SUBLANES // math.gcd(SUBLANES, options.fold)
    whole_rows = -(-rows // unit) * unit * options.fold
    num_tiles = options.most_tiles(total_q, operands["key_lens"].shape[0])
    of_token = (heads, rows) if tile_q == 1 else (num_heads,)
    of_queries = *of_token[:-1], of_token[-1] * options.fold

    block_pages = options.block_k // pages.page_size
    scalars = {"table": pages.table_of_blocks(block_pages)}
    if pages.table_start is not None:
        scalars["table_start"] = pages.table_start
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
    inputs = {"q_hbm": (q.reshape(total_q, *of_queries, q.shape[-1]), IN_HBM)}
    inputs["k_hbm"] = pages.k, IN_HBM
    if pages.v is not None:
        inputs["v_hbm"] = pages.v, IN_HBM
    for name, x in operands.items():
        if name in ("sinks", "slopes") and x.ndim == 4:
            inputs[name] = x, pl.BlockSpec((1, *x.shape[1:]), lambda *_: (0, 0, 0, 0))
        elif name in ("cu_seqlens", "key_lens", "scale_start"):
            scalars[name] = x
        else:
            spec = IN_HBM if name in ("bias", "token_scales") else IN_SMEM
            inputs["slope_table" if name == "slopes" else name] = x, spec
    of_out, of_lse = (total_q, *of_token, width_v), (total_q, 1, LANES)
    results = {
        "out_hbm": Result(of_out, options.out_dtype, in_place_of="earlier_out" if earlier else ""),
        "lse_hbm": Result(of_lse, jnp.float32, in_place_of="earlier_lse" if earlier else ""),
    }
    if earlier is not None:
        inputs["earlier_out"] = earlier[0].reshape(of_out), IN_HBM
        inputs["earlier_lse"] = earlier[1], IN_HBM

    def in_parts(heads: tuple[int, ...], width: int) -> tuple[int, ...]:
        tokens = tile_q, *heads
        return (*tokens, width) if tile_q == 1 else (width // LANES, *tokens, LANES)

    buffer = (config.num_buffers, block_pages, heads * options.stack, pages.k.shape[-2])
    statistics = (whole_rows // options.fold if tile_q == 1 else tile_q, LANES)
    of_tiles = (num_tiles + config.num_cores,)  # the loader looks one tile of each core further
    scratch: dict[str, Any] = {
        **{name: pltpu.SMEM(of_tiles, jnp.int32) for name in Tiles._fields},
        "num_tiles": pltpu.SMEM((1,), jnp.int32),
        "q_tokens": pltpu.VMEM(in_parts(of_queries, q.shape[-1]), q.dtype),
        "q": pltpu.VMEM((1, heads, whole_rows, width_k), options.compute_dtype),
        "out_tokens": pltpu.VMEM(in_parts(of_token, width_v), options.out_dtype),
        "lse_tokens": pltpu.VMEM((tile_q, 1, LANES), jnp.float32),
        "lse_rows": pltpu.VMEM(statistics, jnp.float32),
        "token_semaphores": pltpu.SemaphoreType.DMA((3,)),
        "k_buffers": pltpu.VMEM((*buffer, width_k), pages.k.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((4, config.num_buffers)),
        "m_i": pltpu.VMEM((heads, whole_rows, LANES), jnp.float32),
        "l_i": pltpu.VMEM((heads, whole_rows, LANES), jnp.float32),
        "acc": pltpu.VMEM((heads, whole_rows, width_v), jnp.float32),
    }
    if not pages.shared:
        scratch["v_buffers"] = pltpu.VMEM((*buffer, width_v), pages.k.dtype)
    if (scales := operands.get("token_scales")) is not None:
        of_block = config.num_buffers, options.block_k // LANES, *scales.shape[1:]
        scratch["scale_buffers"] = pltpu.VMEM(of_block, jnp.float32)
    if words is not None:
        scratch["visits"] = pltpu.SMEM((num_tiles * words.shape[2],), jnp.int32)
        scratch["num_visits"] = pltpu.SMEM((num_tiles,), jnp.int32)
    if (bias := operands.get("bias")) is not None:
        (of_bias, *_), copied = bias.shape, rows_of_copy(tile_q, bias.dtype)
        arranged = of_bias, tile_q
        if tile_q == 1:
            arranged = 1, 1 if of_bias == 1 else heads * whole_rows
        buffers = config.num_buffers, of_bias, copied, options.block_k
        scratch["bias_buffers"] = pltpu.VMEM(buffers, bias.dtype)
        scratch["bias_rows"] = pltpu.VMEM((*arranged, options.block_k), jnp.float32)
    if "slope_table" in inputs:
        scratch["slopes"] = pltpu.VMEM((1, heads, whole_rows, 1), jnp.float32)
    op = "flash_varlen" if words is None else "blocksparse"
    memory = Memory(scalars, inputs, results, scratch)
    out, lse = launch(attention_kernel, op, f"{op}_q{tile_q}", num_tiles, memory, options)
    return out.reshape(total_q, num_heads, width_v), lse
