"""The online softmax of a tile: FlashAttention-2 (arXiv 2307.08691, algorithm 1) in base 2.

A row's sum is kept as one partial sum per lane until its tile is done, and its maximum in all lanes
alike. Scores, maximum and sums are float32; probabilities are rounded for the second product.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

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

    def reset(self, head: Any) -> None:
        """Before the first key."""
        self.m_i[head] = jnp.full(self.m_i.shape[1:], FLOOR, jnp.float32)
        self.l_i[head] = jnp.zeros(self.l_i.shape[1:], jnp.float32)
        self.acc[head] = jnp.zeros(self.acc.shape[1:], jnp.float32)

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

    def finish(self, head: Any, sink: Array | None, dtype: Any) -> tuple[Array, Array]:
        """The output (rows, head_dim_v), and the logarithm of the sum as one row; resets the head.

        `sink` (rows, 1) is one logit more. The stores of the reset cost nothing here, where the
        arithmetic takes longer.
        """
        m, acc = self.m_i[head], self.acc[head]
        total = jnp.broadcast_to(jnp.sum(self.l_i[head], axis=1, keepdims=True), m.shape)
        self.reset(head)
        if sink is not None:
            m_new = jnp.maximum(m, sink)
            rescale = jnp.exp2(m - m_new)
            total = total * rescale + jnp.exp2(sink - m_new)
            acc, m = acc * _across(rescale, acc.shape[1]), m_new
        divisor = jnp.where(total == 0.0, 1.0, total)
        if dtype == jnp.float32:
            out = acc / _across(divisor, acc.shape[1])
        else:  # the result is rounded to fewer bits than this loses
            out = acc * _across(pl.reciprocal(divisor), acc.shape[1])
        m, total = _as_row(m), _as_row(total)
        lse = jnp.where(total == 0.0, -jnp.inf, (m + jnp.log2(total)) * math.log(2.0))
        return out, lse
