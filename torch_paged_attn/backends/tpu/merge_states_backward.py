"""`merge_states_backward` in JAX: elementwise but for a product of rows, one pass of XLA's."""

import jax
import jax.numpy as jnp
from jax import Array


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
