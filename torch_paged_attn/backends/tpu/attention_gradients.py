"""`attend_backward` computes the gradients of a call of `flash_varlen` with packed keys.

There are two kernels, one for dq and one for dk and dv, which work on tiles as the forward cuts
them. Each sum is added up by one program, so the same call gives the same bits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.attention import lengths_of, part_of, rng_words_of
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.dtypes import FLOATS, LANES, compute_dtype_of, refuse
from torch_paged_attn.backends.tpu.kernels.arguments import Options
from torch_paged_attn.backends.tpu.kernels.gradients import (
    key_gradient_kernel,
    query_gradient_kernel,
)
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import Cursor
from torch_paged_attn.backends.tpu.kernels.launch import (
    IN_HBM,
    IN_SMEM,
    Memory,
    Result,
    launch,
    of_sequence,
    of_tile,
)
from torch_paged_attn.backends.tpu.kernels.softmax import LOG2_E, base_2
from torch_paged_attn.backends.tpu.tile_sizes import Config, choose_config, choose_options
from torch_paged_attn.backends.tpu.tiles import (
    Cut,
    Heads,
    KeyCut,
    KeyTiles,
    Tiles,
    cut_keys,
    cut_queries,
)
from torch_paged_attn.backward_call import GRADIENTS
from torch_paged_attn.ops.lacking import OPTIONAL, refuse_lacking

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
        inputs["slopes"] = slopes, of_sequence(slopes, num_cores)
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
    num_tiles = k.shape[0]
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
        inputs["slopes"] = slopes, of_sequence(slopes, num_cores)
    if rng is not None:
        inputs["rng"] = rng, IN_SMEM
    results = {
        name: Result(x.shape, options.out_dtype, of_tile(x.shape, num_cores))
        for name, x in (("dk", k), ("dv", v))
    }
    memory, name = Memory(scalars, inputs, results, scratch), "_".join((OP, *results))
    dk, dv = launch(key_gradient_kernel, OP, name, num_tiles, memory, options)
    return dk, dv


# the tensors that have gradients, in the order of `Needs` and `Gradients`
WITH_GRADIENT = tuple(GRADIENTS.values())
Needs = tuple[bool, bool, bool, bool, bool]

# rows of a tile of queries, at most: with more, too many scores are computed that causality hides
MOST_TILE_ROWS = 512
# tokens of a tile of queries, at least
LEAST_TOKENS = 16


class Gradients(NamedTuple):
    """The gradients of a call's tensors; None where there is none, or none was asked for."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dsinks: Array | None


def unsupported_backward(call: Call) -> str | None:
    """Why a call that has a forward has no backward: the argument, and what is allowed. None if it
    has one."""
    if call.op != "flash_varlen":
        return f"{call.op} has no backward on TPUs; supported: flash_varlen"
    if call.block_table is not None:
        return "there is no gradient for paged keys; supported: packed k and v"
    if (dtype := call.q.dtype.name) not in FLOATS:
        return f"q has dtype {dtype}, which has no backward; supported: {', '.join(FLOATS)}"
    for name, dtype in (("k", call.k.dtype.name), ("out_dtype", call.result_dtype.name)):
        if dtype != call.q.dtype.name:
            return f"{name} is {dtype}; supported: {call.q.dtype.name}, as q"
    return None


@functools.partial(jax.jit, static_argnames=("needs", "config", "interpret"), inline=True)
def attend_backward(
    call: Call,
    dout: Array,
    dlse: Array | None,
    out: Array,
    softmax_lse: Array,
    *,
    needs: Needs,
    config: Config | None,
    interpret: Any,
) -> Gradients:
    """Gradients of q, k, v, attn_bias and sinks, those that `needs` asks for.

    `dout`, `out`: (total_q, num_heads, head_dim_v); `dlse`, `softmax_lse`: (num_heads, total_q),
    where dlse None stands for zeros. `out` and `softmax_lse` may be those over more keys than the
    call has: then the gradients are this call's part of them.
    """
    refuse_lacking(call, "tpu", OPTIONAL)
    if (reason := unsupported_backward(call)) is not None:
        refuse(f"{call.op}_backward", reason)
    needs_q, needs_k, needs_v, needs_bias, needs_sinks = needs
    needs_bias = needs_bias and call.attn_bias is not None and call.attn_bias.dtype != jnp.bool_
    total_q, total_k, batch = call.total_q, call.k.shape[0], call.batch
    # rows that see no key have no part in any gradient, whatever numbers they hold
    is_live = ~jnp.isneginf(softmax_lse.T)
    is_token = jnp.arange(total_q) < call.cu_seqlens_q[-1]
    is_live &= is_token[:, None]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(is_live, delta if dlse is None else delta - dlse.T, 0.0)
    lse = jnp.where(is_live, base_2(softmax_lse.T), jnp.inf)
    dsinks = None
    if needs_sinks and call.sinks is not None:
        dsinks = -jnp.sum(jnp.exp2(base_2(call.sinks) - lse) * delta, axis=0)
    if 0 in (total_q, total_k, batch):
        inputs = (call.q, call.k, call.v, call.attn_bias if needs_bias else None)
        dq, dk, dv, dbias = (None if x is None else jnp.zeros_like(x) for x in inputs)
        return Gradients(dq, dk, dv, dbias, dsinks)

    options, parts = _choose_options(call, config, interpret)
    lengths, first_key = lengths_of(call)
    sizes: dict[str, Any] = {"tile_q": options.tile_q, "window": options.window}
    sizes["num_cores"] = options.config.num_cores
    cut = cut_queries(lengths, total_q, **sizes)
    keys = cut_keys(lengths, first_key, total_k, tile_k=options.block_k, **sizes)
    rows = Rows(dout, lse, delta, is_live)
    launches = []
    for i in range(parts):
        first = i * (call.num_heads // parts)
        of_q = slice(first, first + call.num_heads // parts)
        own = dataclasses.replace(options, first_head=first)
        of_rows = Rows(*(x[:, of_q] for x in rows))
        launches.append(Launch(part_of(call, i, parts), of_rows, cut, keys, own))
    dq = dk = dv = dbias = None
    if needs_q or needs_bias:
        dq, dbias = _joined([x.query_gradients(needs_bias) for x in launches])
        dq = jnp.where(is_live[..., None], dq, 0).astype(call.q.dtype) if needs_q else None
    if dbias is not None:
        if call.attn_bias.shape[0] == 1:
            dbias = jnp.sum(dbias, axis=1, keepdims=True)
        dbias = jnp.where(is_token[:, None, None], dbias, 0.0).swapaxes(0, 1)
        dbias = dbias[..., : call.attn_bias.shape[2]].astype(call.attn_bias.dtype)
    if needs_k or needs_v:
        dk, dv = _joined([x.key_gradients() for x in launches])
        is_key = keys.is_key[:, None, None]
        dk, dv = (
            jnp.where(is_key, dx, 0).astype(x.dtype) if is_needed else None
            for dx, x, is_needed in ((dk, call.k, needs_k), (dv, call.v, needs_v))
        )
    return Gradients(dq, dk, dv, dbias, dsinks)


class Rows(NamedTuple):
    """What the gradients of rows depend on besides q."""

    dout: Array  # (total_q, num_heads, head_dim_v)
    lse: Array  # (total_q, num_heads), in base 2; +inf for rows without gradients
    delta: Array  # (total_q, num_heads): rowsum(dout * out) - dlse
    is_live: Array  # (total_q, num_heads): rows with gradients; the others' numbers are not read


@dataclasses.dataclass(frozen=True)
class Launch:
    """The launches for a call of some heads; there are several if VMEM does not hold tiles of all
    heads.
    """

    call: Call
    rows: Rows
    cut: Cut
    keys: KeyCut
    options: Options

    @property
    def _heads(self) -> Heads:
        return Heads(self.call.num_kv_heads, self.call.group_size, self.options.tile_q, LANES)

    def query_gradients(self, needs_bias: bool) -> tuple[Array, Array | None]:
        """dq (total_q, heads, head_dim), and dbias (total_q, heads, keys) if `needs_bias`. A bias
        that all heads share has a dbias for each query head of a group, to be summed up.
        """
        heads, tiles = self._heads, self.keys.per_sequence
        first_key_tile = (jnp.cumsum(tiles) - tiles).astype(jnp.int32)
        dq, dbias = query_gradients(
            self._operands(), self.cut.tiles, first_key_tile, self.options, needs_bias=needs_bias
        )
        if dbias is not None:
            of_bias = dataclasses.replace(heads, num_kv_heads=dbias.shape[1])
            dbias = of_bias.to_tokens(dbias, self.cut)
        return heads.to_tokens(dq, self.cut), dbias

    def key_gradients(self) -> tuple[Array, Array]:
        """dk (total_k, num_kv_heads, head_dim) and dv (total_k, num_kv_heads, head_dim_v)."""
        dk, dv = key_gradients(self._operands(), self.cut.tiles, self.keys.tiles, self.options)
        place = self.keys.tile_of * self.options.block_k + self.keys.place_of
        dk, dv = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])[place] for x in (dk, dv))
        return dk, dv

    def _operands(self) -> Operands:
        call, rows, heads, cut = self.call, self.rows, self._heads, self.cut
        dtype = self.options.compute_dtype

        def queries(x: Array) -> Array:
            x = jnp.where(rows.is_live[..., None], x, 0)
            return heads.of_tokens(x.astype(dtype), cut, 0.0)

        def keys(x: Array) -> Array:
            return x.astype(dtype)[self.keys.token].swapaxes(1, 2)

        bias, slopes = call.attn_bias, call.alibi_slopes
        if bias is not None:
            bias = heads.of_bias(bias, cut, self.options.block_k)
        if slopes is not None:
            slopes = heads.of_heads(slopes * LOG2_E)
        statistics = (
            heads.of_tokens(rows.lse[..., None], cut, jnp.inf),
            heads.of_tokens(rows.delta[..., None], cut, 0.0),
        )
        return Operands(
            q=queries(call.q),
            dout=queries(rows.dout),
            statistics=jnp.concatenate([x[..., 0] for x in statistics], axis=1),
            k=keys(call.k),
            v=keys(call.v),
            bias=bias,
            slopes=slopes,
            rng=rng_words_of(call.rng_state) if call.dropout_p > 0.0 else None,
        )


def _joined(parts: list[tuple[Array, Array | None]]) -> tuple[Any, Any]:
    """The two results of several launches, each with the heads of all launches in order."""
    one, other = zip(*parts, strict=True)
    return tuple(
        xs[0] if len(xs) == 1 or xs[0] is None else jnp.concatenate(xs, axis=1)
        for xs in (one, other)
    )  # type: ignore[return-value]


def wanted_gradients(*args: Any, **options: Any) -> Any:
    """The gradients of `attend_backward` that are not None: a tuple, or an array if it is one."""
    found = tuple(x for x in attend_backward(*args, **options) if x is not None)
    return found if len(found) > 1 else found[0]


def _choose_options(call: Call, config: Config | None, interpret: Any) -> tuple[Options, int]:
    """The options that both kernels are compiled for, and in how many parts the heads are
    launched."""
    config = choose_config(config)
    if call.attn_bias is not None:
        config = config.with_bias()
    longest = call.max_seqlen_q or call.total_q
    longest_k = longest if call.cu_seqlens_k is None else call.k.shape[0]
    block_k = min(config.block_k, max(LANES, _power_of_two(longest_k)))
    tile_rows = min(config.tile_rows, MOST_TILE_ROWS)
    # computing on a block takes so long that one copy ahead is enough
    config = dataclasses.replace(
        config,
        tile_rows=tile_rows,
        block_k=block_k,
        step_k=min(config.step_k, block_k),
        num_buffers=2,
    )
    widths = call.head_dim, call.head_dim_v
    itemsize = compute_dtype_of(call.q.dtype).itemsize
    least_rows = max(LANES, LEAST_TOKENS * call.group_size)
    # a softcap and ALiBi keep one more float for each score
    sizes = itemsize, least_rows, (call.softcap > 0) + (call.alibi_slopes is not None)
    for parts in (n for n in range(1, call.num_kv_heads + 1) if call.num_kv_heads % n == 0):
        fitting = config.fit_backward(call.num_kv_heads // parts, widths, *sizes)
        if fitting is not None:
            break
    if fitting is None:
        least = f"{least_rows} rows and {LANES} keys of {max(widths)} numbers"
        refuse(f"{call.op}_backward", f"tiles of {least} do not fit {config.vmem_bytes} bytes")
    config = fitting
    most = max(1, config.tile_rows // call.group_size)
    tile_q = max(LEAST_TOKENS, min(1 << (most.bit_length() - 1), _power_of_two(longest)))
    options = choose_options(call, config, LANES, tile_q, interpret)
    if call.attn_bias is not None:  # which masks every step
        options = dataclasses.replace(options, masked_step_k=options.step_k)
    return options, parts


def _power_of_two(count: int) -> int:
    """The least power of two that is not below the count."""
    return 1 << max(count - 1, 0).bit_length()
