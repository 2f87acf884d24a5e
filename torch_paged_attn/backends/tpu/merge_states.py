"""`merge_states` in JAX: elementwise, so that XLA makes one pass of it without a kernel."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.merge_states_backward import merge_states_backward


@jax.jit
def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Arguments as in the op; computed in float32."""
    return _merge_states(out_a, lse_a, out_b, lse_b)


@functools.partial(jax.jit, static_argnames="out_dtype")
def merge_states_list(
    outs: Sequence[Array], lses: Sequence[Array], *, out_dtype: Any = None
) -> tuple[Array, Array]:
    """Arguments as in `merge_states.list`; `jax.grad` goes through the formula."""
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
    merged, lse = _merge((out_a, out_b), (lse_a, lse_b))
    return merged.astype(out_a.dtype), lse


def _forward(*parts: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _merge_states(*parts)
    return (out, lse), (*parts, out, lse)


def _backward(kept: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[Array, ...]:
    return merge_states_backward(*given, *kept)


_merge_states.defvjp(_forward, _backward)
