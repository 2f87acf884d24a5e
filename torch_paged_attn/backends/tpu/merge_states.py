"""`merge_states` in JAX: elementwise, so that XLA makes one pass of it without a kernel."""

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.merge_states_backward import merge_states_backward


@jax.jit
def merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Arguments as in the op; computed in float32."""
    return _merge_states(out_a, lse_a, out_b, lse_b)


@jax.custom_vjp
def _merge_states(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    lse = jnp.logaddexp(lse_a, lse_b)
    shift = jnp.where(lse == -jnp.inf, 0.0, lse)
    merged = jnp.zeros(out_a.shape, jnp.float32)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = jnp.exp(part - shift).T[..., None]
        # a part without weight may hold anything
        merged = merged + jnp.where(weight > 0.0, weight * out.astype(jnp.float32), 0.0)
    return merged.astype(out_a.dtype), lse


def _forward(*parts: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    out, lse = _merge_states(*parts)
    return (out, lse), (*parts, out, lse)


def _backward(kept: tuple[Array, ...], given: tuple[Array, Array]) -> tuple[Array, ...]:
    return merge_states_backward(*given, *kept)


_merge_states.defvjp(_forward, _backward)
