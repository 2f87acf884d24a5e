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
from torch_paged_attn.backends.tpu.kernels import launch
from torch_paged_attn.backends.tpu.kernels.arguments import Options
from torch_paged_attn.backends.tpu.kernels.gradients import (
    key_gradient_kernel,
    query_gradient_kernel,
)
from torch_paged_attn.backends.tpu.kernels.softmax import LOG2_E, base_2
from torch_paged_attn.backends.tpu.tile_sizes import (
    Config,
    backward_bytes,
    choose_config,
    choose_options,
)
from torch_paged_attn.backends.tpu.tiles import Cut, Heads, cut_keys, cut_queries
from torch_paged_attn.backward_call import GRADIENTS
from torch_paged_attn.ops.lacking import OPTIONAL, refuse_lacking

OP = "flash_varlen_backward"

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
    is_token = jnp.arange(total_q) < call.cu_seqlens_q[-1]
    is_live = ~jnp.isneginf(softmax_lse.T) & is_token[:, None]
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
        is_key = keys.is_token[:, None, None]
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
    heads. Kernels read tiles of queries `(num_tiles, num_kv_heads, rows, n)`, rows a multiple of
    LANES, and of keys `(num_key_tiles, num_kv_heads, block_k, n)`.
    """

    call: Call
    rows: Rows
    cut: Cut
    keys: Cut
    options: Options

    def query_gradients(self, needs_bias: bool) -> tuple[Array, Array | None]:
        """dq (total_q, heads, head_dim), and dbias (total_q, heads, keys) if `needs_bias`. A bias
        that all heads share has a dbias for each query head of a group, to be summed up.
        """
        tiles = self.keys.per_sequence
        tables = self.cut.tiles._asdict()
        tables["table_start"] = (jnp.cumsum(tiles) - tiles).astype(jnp.int32)
        # the forward's loader takes tiles of keys for pages
        tables["table"] = jnp.arange(self.keys.token.shape[0] + 1, dtype=jnp.int32)
        found = self._launch(query_gradient_kernel, tables, False, needs_bias)
        dq, *dbias = (self._heads.to_tokens(x, self.cut) for x in found)
        return dq, dbias[0] if dbias else None

    def key_gradients(self) -> tuple[Array, Array]:
        """dk (total_k, num_kv_heads, head_dim) and dv (total_k, num_kv_heads, head_dim_v)."""
        tables = {f"keys_{name}": x for name, x in self.keys.tiles._asdict().items()}
        tables |= self.cut.tiles._asdict()
        found = self._launch(key_gradient_kernel, tables, True)
        place = self.keys.tile_of * self.options.block_k + self.keys.place_of
        dk, dv = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3])[place] for x in found)
        return dk, dv

    @property
    def _heads(self) -> Heads:
        return Heads(self.call.num_kv_heads, self.call.group_size, self.options.tile_q, LANES)

    @functools.cached_property
    def _tiles(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Of queries: q, dout, and all heads' base-2 lse, then delta. Of keys: k and v."""
        call, rows, heads, cut = self.call, self.rows, self._heads, self.cut
        dtype = self.options.compute_dtype

        def queries(x: Array) -> Array:
            x = jnp.where(rows.is_live[..., None], x, 0)
            return heads.of_tokens(x.astype(dtype), cut, 0.0)

        lse = heads.of_tokens(rows.lse[..., None], cut, jnp.inf)
        delta = heads.of_tokens(rows.delta[..., None], cut, 0.0)
        of_queries = {"q": queries(call.q), "dout": queries(rows.dout)}
        of_queries["statistics"] = jnp.concatenate([lse[..., 0], delta[..., 0]], axis=1)
        pairs = ("k", call.k), ("v", call.v)
        of_keys = {n: x.astype(dtype)[self.keys.token].swapaxes(1, 2) for n, x in pairs}
        return of_queries, of_keys

    def _launch(
        self, kernel: Any, tables: dict[str, Array], keys_stay: bool, needs_bias: bool = False
    ) -> list[Array]:
        """The gradients of q, or of k and v, in tiles; then, if `needs_bias`, that of the bias,
        float32, in tiles of queries: each row has one of its own, though heads may share a bias.
        """
        call, options, heads = self.call, self.options, self._heads
        stays, passes = self._tiles[::-1] if keys_stay else self._tiles
        num_cores, num_buffers = options.config.num_cores, options.config.num_buffers
        num_tiles, num_heads, rows, _ = next(iter(stays.values())).shape
        inputs: dict[str, tuple[Array, Any]] = {
            **{name: (x, launch.of_tile(x.shape, num_cores)) for name, x in stays.items()},
            **{f"{name}_hbm": (x, launch.IN_HBM) for name, x in passes.items()},
        }
        wanted = {name: stays[of] for name, of in GRADIENTS.items() if of in stays}
        buffer = (num_buffers,) if keys_stay else (num_buffers, 1)  # of one page
        scratch: dict[str, Any] = {
            **{
                f"{n}_buffers": pltpu.VMEM((*buffer, *x.shape[1:]), x.dtype)
                for n, x in passes.items()
            },
            # of what passes, and of biases
            "semaphores": pltpu.SemaphoreType.DMA((4, num_buffers)),
            **{f"{n}_acc": pltpu.VMEM(x.shape[1:], jnp.float32) for n, x in wanted.items()},
        }
        results = {
            name: launch.Result(x.shape, options.out_dtype, launch.of_tile(x.shape, num_cores))
            for name, x in wanted.items()
        }
        if not keys_stay:  # the statistics, all lanes alike
            scratch["columns"] = pltpu.VMEM((2 * num_heads, rows, LANES), jnp.float32)
        if call.attn_bias is not None:
            bias = heads.of_bias(call.attn_bias, self.cut, options.block_k)
            of_block = bias.shape[2], options.block_k
            if needs_bias:
                # the kernel writes no blocks that no row sees: zeros lie there
                inputs["zeros"] = jnp.zeros_like(bias), launch.IN_HBM
                results["dbias"] = launch.Result(bias.shape, jnp.float32, in_place_of="zeros")
                scratch["dbias_buffer"] = pltpu.VMEM((bias.shape[1], *of_block), jnp.float32)
                scratch["dbias_done"] = pltpu.SemaphoreType.DMA
            if keys_stay:
                bias, of_block = bias.swapaxes(2, 3), of_block[::-1]
            inputs["bias"] = bias, launch.IN_HBM
            buffers = num_buffers, bias.shape[1], *of_block
            scratch["bias_buffers"] = pltpu.VMEM(buffers, jnp.float32)
        if call.alibi_slopes is not None:
            slopes = heads.of_heads(call.alibi_slopes * LOG2_E)
            slopes = slopes.swapaxes(2, 3) if keys_stay else slopes
            inputs["slopes"] = slopes, launch.of_sequence(slopes, num_cores)
        if call.dropout_p > 0.0:
            inputs["rng"] = rng_words_of(call.rng_state), launch.IN_SMEM
        memory, name = launch.Memory(tables, inputs, results, scratch), "_".join((OP, *results))
        return launch.launch(kernel, OP, name, num_tiles, memory, options)


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
        bytes_of = functools.partial(backward_bytes, call.num_kv_heads // parts, widths, *sizes)
        fitting = config.fit(bytes_of, least_rows)
        if fitting.fits(bytes_of):
            break
    else:
        least = f"{least_rows} rows and {LANES} keys of {max(widths)} numbers"
        refuse(f"{call.op}_backward", f"tiles of {least} do not fit {config.vmem_bytes} bytes")
    most = max(1, fitting.tile_rows // call.group_size)
    tile_q = max(LEAST_TOKENS, min(1 << (most.bit_length() - 1), _power_of_two(longest)))
    options = choose_options(call, fitting, LANES, tile_q, interpret)
    if call.attn_bias is not None:  # which masks every step
        options = dataclasses.replace(options, masked_step_k=options.step_k)
    return options, parts


def _power_of_two(count: int) -> int:
    """The least power of two that is not below the count."""
    return 1 << max(count - 1, 0).bit_length()
