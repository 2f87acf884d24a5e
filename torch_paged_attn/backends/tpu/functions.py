"""The ops of attention in JAX, as pure functions of arrays; `merge_states` is elementwise, so that
XLA makes one pass of it without a kernel.

`jax.grad` differentiates attention by a backward of its own, with `jax.custom_vjp`. A forward keeps
its call, `out` and `softmax_lse`. The last two have names, so that a policy of `jax.checkpoint` may
save them instead of running the kernel again:

    jax.checkpoint(layer, policy=jax.checkpoint_policies.save_only_these_names(OUT, LSE))
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from torch_paged_attn.backends.tpu.attention import attend as attend_forward
from torch_paged_attn.backends.tpu.attention_gradients import (
    WITH_GRADIENT,
    Gradients,
    Needs,
    attend_backward,
    unsupported_backward,
)
from torch_paged_attn.backends.tpu.call import Call, bind, described, static_names, tensors_of
from torch_paged_attn.backends.tpu.dtypes import refuse
from torch_paged_attn.backends.tpu.tile_sizes import Config

OUT, LSE = "paged_attn_out", "paged_attn_softmax_lse"


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def attend(call: Call, config: Config | None, interpret: Any) -> tuple[Array, Array]:
    """`attention.attend`, with gradients of q, k, v, attn_bias and sinks if keys are packed."""
    return attend_forward(call, config=config, interpret=interpret)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Needed:
    """The gradients that a backward is asked for. The class makes JAX take them as static."""

    needs: Needs


def _forward(call: Call, config: Config | None, interpret: Any) -> tuple[Any, Any]:
    perturbed = {name for name, x in tensors_of(call).items() if x.perturbed}
    call = jax.tree.map(lambda x: x.value, call)
    if (reason := unsupported_backward(call)) is not None:
        refuse(call.op, f"{min(perturbed)} requires grad, and {reason}")
    if others := sorted(perturbed - set(WITH_GRADIENT)):
        refuse(call.op, f"{others[0]} requires grad, and has no gradient")
    needs = _Needed(tuple(name in perturbed for name in WITH_GRADIENT))  # type: ignore[arg-type]
    out, lse = attend_forward(call, config=config, interpret=interpret)
    out, lse = checkpoint_name(out, OUT), checkpoint_name(lse, LSE)
    return (out, lse), (call, out, lse, needs)


def _backward(config: Config | None, interpret: Any, kept: Any, given: Any) -> tuple[Call]:
    call, out, lse, needed = kept
    dout, dlse = (None if isinstance(x, SymbolicZero) else x for x in given)
    gradients = attend_backward(
        call,
        jnp.zeros_like(out) if dout is None else dout,
        dlse,
        out,
        lse,
        needs=needed.needs,
        config=config,
        interpret=interpret,
    )
    # None stands for no gradient
    cleared = dict.fromkeys(tensors_of(call)) | dict(zip(WITH_GRADIENT, gradients, strict=True))
    return (dataclasses.replace(call, **cleared),)


attend.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnames=static_names("flash_varlen"))
@described
def flash_varlen(
    *tensors: Array | None, config: Config | None = None, interpret: Any = False, **options: Any
) -> tuple[Array, Array]:
    """Arguments as in the op, in JAX's types; `(out, softmax_lse)`.

    Tensors come in the op's order, all else by name. A cache that is one array
    `(2, num_pages, num_kv_heads, page_size, head_dim)` is passed whole as `k`, with `v` None:
    slices of it would be copies. `rng_state` may be three 32-bit words: the seed's low and high
    one, and the offset. `config` are sizes of tiles, chosen for the chip if it is None;
    `interpret` is Pallas' own.
    """
    call = Call.of("flash_varlen", bind(flash_varlen, tensors, options))
    return attend(call, config, interpret)


@functools.partial(jax.jit, static_argnames=static_names("blocksparse"))
@described
def blocksparse(
    *tensors: Array | None, config: Config | None = None, interpret: Any = False, **options: Any
) -> tuple[Array, Array]:
    """Arguments as in the op and in `flash_varlen` here; the layout's tensors come behind `v`."""
    call = Call.of("blocksparse", bind(blocksparse, tensors, options))
    return attend(call, config, interpret)


RESULTS = ("dout", "dlse", "out", "softmax_lse")


@functools.partial(jax.jit, static_argnames=static_names("flash_varlen_backward"))
@described
def flash_varlen_backward(
    *tensors: Array | None,
    output_mask: Needs = (True, True, True, True, True),
    config: Config | None = None,
    interpret: Any = False,
    **options: Any,
) -> Gradients:
    """Arguments as in the op and in `flash_varlen` here; what is not asked for, or has no input, is
    None. `jax.grad` of `flash_varlen` calls the same kernels.
    """
    given = bind(flash_varlen_backward, tensors, options)
    results = [given.pop(name) for name in RESULTS]
    call = Call.of("flash_varlen", given)
    return attend_backward(call, *results, needs=output_mask, config=config, interpret=interpret)


@jax.jit
def merge_states_backward(
    dout: Array,
    dlse: Array | None,
    out_a: Array,
    lse_a: Array,
    out_b: Array,
    lse_b: Array,
    out: Array,
    softmax_lse: Array,
) -> tuple[Array, Array, Array, Array]:
    """Arguments and results as in the op; computed in float32."""
    gradients = []
    for part, lse in ((out_a, lse_a), (out_b, lse_b)):
        is_seen = ~jnp.isinf(lse)
        # a part without weight, and a row that no part sees, may hold anything
        weight = jnp.where(is_seen, jnp.exp(lse - jnp.where(is_seen, softmax_lse, 0.0)), 0.0)
        dout_part = jnp.where(is_seen.T[..., None], weight.T[..., None] * dout, 0.0)
        moved = jnp.sum(dout * (part.astype(jnp.float32) - out.astype(jnp.float32)), axis=-1).T
        dlse_part = moved if dlse is None else moved + dlse
        gradients += [
            dout_part.astype(part.dtype),
            jnp.where(is_seen, weight * dlse_part, 0.0),
        ]
    return tuple(gradients)  # type: ignore[return-value]


@functools.partial(jax.jit, static_argnames="out_dtype")
def merge_states_list(
    outs: Sequence[Array], lses: Sequence[Array], *, out_dtype: Any = None
) -> tuple[Array, Array]:
    """Arguments as in `functions.list`; `jax.grad` goes through the formula."""
    merged, lse = _merge(outs, lses)
    return merged.astype(out_dtype or outs[0].dtype), lse


def _merge(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """The float32 sum of the parts, and softmax_lse."""
    # FlashAttention-2 gives +inf to a row that saw no key
    lses = [jnp.where(jnp.isposinf(part), -jnp.inf, part) for part in lses]
    lse = functools.reduce(jnp.logaddexp, lses)
    # not exp(part - lse): beside numbers of 1e8 the logarithm in `lse` is lost
    largest = functools.reduce(jnp.maximum, lses)
    shift = jnp.where(largest == -jnp.inf, 0.0, largest)
    shares = [jnp.exp(part - shift) for part in lses]
    total = sum(shares)
    divisor = jnp.where(total == 0.0, 1.0, total)
    merged = jnp.zeros(outs[0].shape, jnp.float32)
    for out, share in zip(outs, shares, strict=True):
        weight = (share / divisor).T[..., None]
        # a part without weight may hold anything; a weight that is NaN makes the result NaN
        merged = merged + jnp.where(weight == 0.0, 0.0, weight * out.astype(jnp.float32))
    return merged, lse


@jax.custom_vjp
def _merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Arguments as in the op; computed in float32."""
    merged, lse = _merge((out_a, out_b), (lse_a, lse_b))
    return merged.astype(out_a.dtype), lse


def _merge_forward(*parts: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _merge_states(*parts)
    return (out, lse), (*parts, out, lse)


def _merge_backward(kept: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[Array, ...]:
    return merge_states_backward(*given, *kept)


_merge_states.defvjp(_merge_forward, _merge_backward)
merge_states = jax.jit(_merge_states)
