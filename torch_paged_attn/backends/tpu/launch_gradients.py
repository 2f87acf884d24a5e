"""The launches of the two kernels of the backward: where each operand lies (see `launch.py`)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.key_gradient_kernel import key_gradient_kernel
from torch_paged_attn.backends.tpu.launch import (
    IN_HBM,
    IN_SMEM,
    Memory,
    Result,
    launch,
    of_sequence,
    of_tile,
)
from torch_paged_attn.backends.tpu.query_gradient_kernel import query_gradient_kernel
from torch_paged_attn.backends.tpu.registers import LANES
from torch_paged_attn.backends.tpu.ring import Cursor
from torch_paged_attn.backends.tpu.tiles import KeyTiles, Tiles

OP = "flash_varlen_backward"


class Operands(NamedTuple):
    """Tensors as both kernels read them, in tiles; None where the call does not have them."""

    q: Array  # (num_tiles, num_kv_heads, rows, head_dim); rows are a multiple of LANES
    dout: Array  # (num_tiles, num_kv_heads, rows, head_dim_v)
    statistics: Array  # (num_tiles, 2 * num_kv_heads, rows): all heads' base-2 lse, then delta
    k: Array  # (num_key_tiles, num_kv_heads, block_k, head_dim)
    v: Array  # (num_key_tiles, num_kv_heads, block_k, head_dim_v)
    bias: Array | None  # (num_tiles, 1 or num_kv_heads, rows, keys), in base 2
    slopes: Array | None  # (1 or batch, num_kv_heads, rows, 1), in base 2
    rng: Array | None  # three int32: the seed's low and high word, the offset


def query_gradients(
    operands: Operands,
    tiles: Tiles,
    first_key_tile: Array,
    options: Options,
    *,
    needs_bias: bool,
) -> tuple[Array, Array | None]:
    """dq, in tiles as q; and dbias, float32, in tiles as bias, None unless `needs_bias`. Each row
    of a tile has a dbias of its own, though heads may share a bias.

    `first_key_tile` (batch,): the number of a sequence's first tile of keys.
    """
    q, dout, statistics, k, v, bias, slopes, rng = operands
    num_cores, num_buffers = options.config.num_cores, options.config.num_buffers
    num_tiles, heads, rows, _ = q.shape
    scalars: dict[str, Array] = tiles._asdict()
    scalars["table_start"] = first_key_tile
    # the forward's loader takes tiles of keys for pages
    scalars["table"] = jnp.arange(k.shape[0] + 1, dtype=jnp.int32)
    inputs: dict[str, tuple[Array, Any]] = {
        "q": (q, of_tile(q.shape, num_cores)),
        "dout": (dout, of_tile(dout.shape, num_cores)),
        "statistics": (statistics, of_tile(statistics.shape, num_cores)),
        "k_hbm": (k, IN_HBM),
        "v_hbm": (v, IN_HBM),
    }
    scratch: dict[str, Any] = {
        "k_buffers": pltpu.VMEM((num_buffers, 1, *k.shape[1:]), k.dtype),
        "v_buffers": pltpu.VMEM((num_buffers, 1, *v.shape[1:]), v.dtype),
        "semaphores": pltpu.SemaphoreType.DMA((3, num_buffers)),
        "dq_acc": pltpu.VMEM(q.shape[1:], jnp.float32),
        "columns": pltpu.VMEM((2 * heads, rows, LANES), jnp.float32),
        "cursor": pltpu.SMEM((len(Cursor._fields),), jnp.int32),
    }
    if bias is not None:
        inputs["bias"] = bias, IN_HBM
        shape = (num_buffers, bias.shape[1], rows, options.block_k)
        scratch["bias_buffers"] = pltpu.VMEM(shape, jnp.float32)
    if slopes is not None:
        inputs["slopes"] = slopes, of_sequence(slopes, num_cores, heads)
    if rng is not None:
        inputs["rng"] = rng, IN_SMEM
    results = {"dq": Result(q.shape, options.out_dtype, of_tile(q.shape, num_cores))}
    if needs_bias and bias is not None:
        # the kernel writes no blocks that no row sees: zeros lie there
        inputs["zeros"] = jnp.zeros_like(bias), IN_HBM
        results["dbias"] = Result(bias.shape, jnp.float32, in_place_of="zeros")
        scratch["dbias_buffer"] = pltpu.VMEM((*bias.shape[1:3], options.block_k), jnp.float32)
        scratch["dbias_done"] = pltpu.SemaphoreType.DMA
    memory, name = Memory(scalars, inputs, results, scratch), "_".join((OP, *results))
    dq, *dbias = launch(query_gradient_kernel, OP, name, num_tiles, memory, options)
    return dq, dbias[0] if dbias else None


def key_gradients(
    operands: Operands, tiles: Tiles, keys: KeyTiles, options: Options
) -> tuple[Array, Array]:
    """dk and dv, in tiles as k and v."""
    q, dout, statistics, k, v, bias, slopes, rng = operands
    num_cores, num_buffers = options.config.num_cores, options.config.num_buffers
    num_tiles, heads = k.shape[:2]
    scalars: dict[str, Array] = {f"keys_{name}": x for name, x in keys._asdict().items()}
    scalars |= tiles._asdict()
    inputs: dict[str, tuple[Array, Any]] = {
        "k": (k, of_tile(k.shape, num_cores)),
        "v": (v, of_tile(v.shape, num_cores)),
        "q_hbm": (q, IN_HBM),
        "dout_hbm": (dout, IN_HBM),
        "statistics_hbm": (statistics, IN_HBM),
    }
    scratch: dict[str, Any] = {
        "q_buffers": pltpu.VMEM((num_buffers, *q.shape[1:]), q.dtype),
        "dout_buffers": pltpu.VMEM((num_buffers, *dout.shape[1:]), dout.dtype),
        "statistics_buffers": pltpu.VMEM((num_buffers, *statistics.shape[1:]), jnp.float32),
        "semaphores": pltpu.SemaphoreType.DMA((4, num_buffers)),
        "dk_acc": pltpu.VMEM(k.shape[1:], jnp.float32),
        "dv_acc": pltpu.VMEM(v.shape[1:], jnp.float32),
        "cursor": pltpu.SMEM((len(Cursor._fields),), jnp.int32),
    }
    if bias is not None:
        inputs["bias"] = bias.swapaxes(2, 3), IN_HBM
        shape = (num_buffers, bias.shape[1], options.block_k, q.shape[2])
        scratch["bias_buffers"] = pltpu.VMEM(shape, jnp.float32)
    if slopes is not None:
        slopes = slopes.swapaxes(2, 3)
        inputs["slopes"] = slopes, of_sequence(slopes, num_cores, heads)
    if rng is not None:
        inputs["rng"] = rng, IN_SMEM
    results = {
        name: Result(x.shape, options.out_dtype, of_tile(x.shape, num_cores))
        for name, x in (("dk", k), ("dv", v))
    }
    memory, name = Memory(scalars, inputs, results, scratch), "_".join((OP, *results))
    dk, dv = launch(key_gradient_kernel, OP, name, num_tiles, memory, options)
    return dk, dv
