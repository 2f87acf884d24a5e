"""`attend_backward` computes the gradients of a call of `flash_varlen` with packed keys.

Two launches, one for queries and one for keys and values, on the tiles that the forward cuts: no
sum is added up by two programs, so the same call gives the same bits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.attention import (
    FLOATS,
    SHORT,
    Heads,
    choose_options,
    compute_dtype_of,
    lengths_of,
    rng_words_of,
)
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.config import LANES, Config, choose_config
from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.launch_gradients import Operands, key_gradients, query_gradients
from torch_paged_attn.backends.tpu.refusal import refuse
from torch_paged_attn.backends.tpu.softmax import LOG2_E, base_2
from torch_paged_attn.backends.tpu.tiles import cut_keys, cut_queries


class Gradients(NamedTuple):
    """Of a call's tensors; None is what was not asked for."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dsinks: Array | None


def unsupported_backward(call: Call) -> str | None:
    """Why there are no gradients of a call that has a forward: the argument, and what is allowed.

    It may be a call of torch's or of JAX's tensors.
    """
    if call.op != "flash_varlen":
        return f"{call.op}: no backward on TPUs; supported: flash_varlen"
    if call.block_table is not None:
        return "block_table: no backward for paged keys; allowed: packed k and v"
    floats = tuple(str(x).removeprefix("torch.") for x in (call.q.dtype, call.k.dtype))
    for name, dtype in zip(("q", "k"), floats, strict=True):
        if dtype not in FLOATS:
            return f"{name} has dtype {dtype}: no backward; allowed: {', '.join(FLOATS)}"
    if call.out_dtype is not None and call.out_dtype != call.q.dtype:
        return f"out_dtype is {call.out_dtype}: no backward; allowed: that of q"
    return None


@functools.partial(jax.jit, static_argnames=("needs", "config", "interpret"), inline=True)
def attend_backward(
    call: Call,
    dout: Array,
    dlse: Array | None,
    out: Array,
    softmax_lse: Array,
    *,
    needs: tuple[bool, bool, bool, bool, bool],
    config: Config | None,
    interpret: Any,
) -> Gradients:
    """Gradients of q, k, v, attn_bias and sinks, as far as `needs` asks for them.

    `out` (total_q, num_heads, head_dim_v) and `softmax_lse` (num_heads, total_q) may be those of
    more keys than the call has.
    """
    if (reason := unsupported_backward(call)) is not None:
        refuse(f"{call.op}_backward", reason)
    needs_q, needs_k, needs_v, needs_bias, needs_sinks = needs
    if needs_bias:
        refuse(f"{call.op}_backward", "attn_bias requires grad; allowed: one that does not")
    total_q, total_k, batch = call.total_q, call.k.shape[0], call.batch
    if 0 in (total_q, total_k, batch):
        zeros = [jnp.zeros_like(x) for x in (call.q, call.k, call.v)]
        if total_q == 0 or batch == 0:
            dsinks = None if call.sinks is None else jnp.zeros_like(call.sinks)
            return Gradients(*zeros, None, dsinks if needs_sinks else None)

    # of rows that see no key all gradients are 0, whatever stands there
    is_live = -jnp.inf != softmax_lse.T
    is_live &= (jnp.arange(total_q) < call.cu_seqlens_q[-1])[:, None]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(is_live, delta if dlse is None else delta - dlse.T, 0.0)
    lse = jnp.where(is_live, base_2(softmax_lse.T), jnp.inf)
    dsinks = None
    if needs_sinks and call.sinks is not None:
        dsinks = -jnp.sum(jnp.exp2(base_2(call.sinks) - lse) * delta, axis=0)
    if total_k == 0:
        return Gradients(*zeros, None, dsinks)

    options = _choose_options(call, config, interpret)
    num_cores, dtype = options.config.num_cores, options.compute_dtype
    lengths, first_key = lengths_of(call)
    sizes: dict[str, Any] = {"tile_q": options.tile_q, "window": options.window}
    sizes["num_cores"] = num_cores
    every = jnp.ones(batch, bool)
    cut = cut_queries(lengths, every, total_q, is_whole=False, **sizes)
    key_cut = cut_keys(lengths, first_key, total_k, tile_k=options.block_k, **sizes)
    heads = Heads(call.num_kv_heads, call.group_size, options.tile_q, LANES)

    def queries(x: Array) -> Array:
        return heads.of_tokens(jnp.where(is_live[..., None], x, 0).astype(dtype), cut, 0.0)

    def keys(x: Array) -> Array:
        return x.astype(dtype)[key_cut.token].swapaxes(1, 2)

    def to_keys(x: Array, like: Array) -> Array:
        x = x.swapaxes(1, 2).reshape(-1, *like.shape[1:])
        x = x[key_cut.tile_of * options.block_k + key_cut.place_of]
        return jnp.where(key_cut.is_key[:, None, None], x, 0).astype(like.dtype)

    statistics = (
        heads.of_tokens(lse[..., None], cut, jnp.inf),
        heads.of_tokens(delta[..., None], cut, 0.0),
    )
    operands = Operands(
        q=queries(call.q),
        dout=queries(dout),
        statistics=jnp.concatenate([x[..., 0] for x in statistics], axis=1),
        k=keys(call.k),
        v=keys(call.v),
        bias=None
        if call.attn_bias is None
        else heads.of_bias(call.attn_bias, cut, options.block_k),
        slopes=None if call.alibi_slopes is None else heads.of_heads(call.alibi_slopes * LOG2_E),
        rng=rng_words_of(call.rng_state) if call.dropout_p > 0.0 else None,
    )
    dq = dk = dv = None
    if needs_q:
        of_sequence = -(-lengths.key // options.block_k)
        first_key_tile = (jnp.cumsum(of_sequence) - of_sequence).astype(jnp.int32)
        dq = heads.to_tokens(query_gradients(operands, cut.tiles, first_key_tile, options), cut)
        dq = jnp.where(is_live[..., None], dq, 0).astype(call.q.dtype)
    if needs_k or needs_v:
        dk, dv = key_gradients(operands, cut.tiles, key_cut.tiles, options)
        dk, dv = to_keys(dk, call.k), to_keys(dv, call.v)
    return Gradients(dq, dk if needs_k else None, dv if needs_v else None, None, dsinks)


def _choose_options(call: Call, config: Config | None, interpret: Any) -> Options:
    """What both kernels are compiled for."""
    config = choose_config(config)
    if call.attn_bias is not None:
        config = config.with_bias()
    longest = call.max_seqlen_q or call.total_q
    longest_k = longest if call.cu_seqlens_k is None else call.k.shape[0]
    block_k = min(config.block_k, max(LANES, _power_of_two(longest_k)))
    # a block is computed on for so long that one copy ahead of it is in time
    config = dataclasses.replace(
        config, block_k=block_k, step_k=min(config.step_k, block_k), num_buffers=2
    )
    widths = call.head_dim, call.head_dim_v
    config = config.fit_backward(call.num_kv_heads, widths, compute_dtype_of(call).itemsize)
    most = max(1, config.tile_rows // call.group_size)
    tile_q = max(2 * SHORT, min(1 << (most.bit_length() - 1), _power_of_two(longest)))
    return choose_options(call, config, LANES, tile_q, interpret)


def _power_of_two(count: int) -> int:
    """The least one that is not below the count."""
    return 1 << max(count - 1, 0).bit_length()
