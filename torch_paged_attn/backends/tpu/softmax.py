"""The online softmax of a tile: FlashAttention-2 (arXiv 2307.08691, algorithm 1) in base 2.

A row's sum is kept as one partial sum per lane until its tile is done, and its maximum in all lanes
alike. Scores, maximum and sums are float32; probabilities are rounded for the second product.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

LANES = 128
LOG2_E = math.log2(math.e)

# a row that has seen no key has this maximum, and a masked key less: its probability is exp2(-big)
FLOOR = -1.0e38
MASKED = -2.0e38


def _across(column: Array, width: int) -> Array:
    """(rows, LANES), all lanes alike, as (rows, width)."""
    if width <= LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def product(a: Array, b: Array, contract: int) -> Array:
    """Rows of `a` times `b`, summed over axis `contract` of `b`, in float32."""
    exact = a.dtype == jnp.float32
    return lax.dot_general(
        a,
        b,
        (((1,), (contract,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None,
        preferred_element_type=jnp.float32,
    )


def _fold_lanes(x: Array) -> Array:
    """Sum of the columns, down to one partial sum per lane."""
    parts = [x[:, i : i + LANES] for i in range(0, x.shape[1], LANES)]
    while len(parts) > 1:
        odd = parts[len(parts) // 2 * 2 :]
        parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=False)] + odd
    return parts[0]


def _as_row(column: Array) -> Array:
    """(rows, LANES), all lanes alike, as (1, rows up to whole lanes): a diagonal, summed."""
    parts = []
    for first in range(0, column.shape[0], LANES):
        part = column[first : first + LANES]
        row, lane = (lax.broadcasted_iota(jnp.int32, part.shape, axis) for axis in (0, 1))
        parts.append(jnp.sum(jnp.where(row == lane, part, 0.0), axis=0, keepdims=True))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The running state of a tile: refs `(num_kv_heads, rows, ...)` in VMEM."""

    m_i: Any  # (..., LANES), all lanes alike
    l_i: Any  # (..., LANES), partial sums
    acc: Any  # (..., head_dim_v)

    def reset(self, sinks: Any) -> None:
        if sinks is None:
            self.m_i[...] = jnp.full(self.m_i.shape, FLOOR, jnp.float32)
            self.l_i[...] = jnp.zeros(self.l_i.shape, jnp.float32)
        else:
            sink = jnp.broadcast_to(sinks[0], self.m_i.shape)
            lane = lax.broadcasted_iota(jnp.int32, self.m_i.shape, 2)
            self.m_i[...] = jnp.maximum(sink, FLOOR)
            self.l_i[...] = jnp.where((lane == 0) & (sink > FLOOR), 1.0, 0.0)
        self.acc[...] = jnp.zeros(self.acc.shape, jnp.float32)

    def fold(
        self, head: Any, scores: Array, v: Array, dtype: Any, keep: Array | None = None
    ) -> None:
        """Add base-2 scores (rows, keys) and their values; `keep` is what survives dropout."""
        m = self.m_i[head]
        m_new = jnp.maximum(m, jnp.max(scores, axis=1, keepdims=True))
        p = jnp.exp2(scores - _across(m_new, scores.shape[1]))
        rescale = jnp.exp2(m - m_new)
        self.m_i[head] = m_new
        self.l_i[head] = self.l_i[head] * rescale + _fold_lanes(p)
        if keep is not None:
            p = jnp.where(keep, p, 0.0)
        weighed = product(p.astype(dtype), v, 0)
        self.acc[head] = self.acc[head] * _across(rescale, weighed.shape[1]) + weighed

    def finish(self, head: Any) -> tuple[Array, Array]:
        """The output (rows, head_dim_v), and the logarithm of the sum as one row."""
        total = jnp.broadcast_to(jnp.sum(self.l_i[head], axis=1, keepdims=True), self.l_i.shape[1:])
        is_empty = total == 0.0
        total = jnp.where(is_empty, 1.0, total)
        acc = self.acc[head]
        out = acc / _across(total, acc.shape[1])
        lse = jnp.where(is_empty, -jnp.inf, (self.m_i[head] + jnp.log2(total)) * math.log(2.0))
        return out, _as_row(lse)
