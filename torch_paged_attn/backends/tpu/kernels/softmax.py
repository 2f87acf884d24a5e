"""The online softmax of a tile: FlashAttention-2 (arXiv 2307.08691, algorithm 1) in base 2.

A row's sum is kept as one partial sum per lane until its tile is done, its maximum in every lane.
Scores, maximum and sums are float32; probabilities are rounded for the second product.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.dtypes import LANES

# JAX 0.12 has moved it
reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal

LOG2_E = math.log2(math.e)

# A masked key has the score MASKED, and the maximum of a row that has seen no key is FLOOR. No
# logit is as low, not even a bias of torch.finfo(float32).min, and exp2 of MASKED - FLOOR is 0.
MASKED = float(jnp.finfo(jnp.float32).min)
FLOOR = MASKED + 2.0**104

# Times log2(e), a finite bias may be too large for float32: masks hold torch.finfo(float32).min,
# and the result of a row whose keys all have that bias is the mean of their values. So logits from
# 2**127 on are multiplied by 1/2 instead, and moved by BEND. Floats are 2**104 apart there, so that
# exponentials of differences are 0 or 1 with either factor. BEND has so many trailing zeros that
# `base_e` gives the lowest bias back exactly.
STEEP = 2.0**127
BEND = math.ceil((LOG2_E - 0.5) * 2.0**22) * 2.0**105


def base_2(logit: Array) -> Array:
    """A natural logit times log2(e); what is finite stays finite."""
    bent = 0.5 * logit + jnp.copysign(jnp.float32(BEND), logit)
    return jnp.where(jnp.abs(logit) <= STEEP, logit * LOG2_E, bent)


def base_e(logit: Array) -> Array:
    """A natural logit from one in base 2, and -inf from that of a row that has seen no key."""
    bent = jnp.maximum(2.0 * (logit - jnp.copysign(jnp.float32(BEND), logit)), MASKED)
    natural = jnp.where(jnp.abs(logit) <= STEEP * LOG2_E, logit * math.log(2.0), bent)
    return jnp.where(logit <= FLOOR, -jnp.inf, natural)


def across(column: Array, width: int) -> Array:
    """(rows, LANES) with the same number in all lanes, as (rows, width) of it."""
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


def _merge(m: Array, total: Array, acc: Array, fold: int) -> tuple[Array, Array, Array]:
    """The states of the same rows over `fold` sets of keys, one set's rows below another's, as one
    state. The sums of set i are in part i of the columns of `acc`."""
    rows, width = m.shape[0] // fold, acc.shape[1] // fold
    parts = [slice(i * rows, (i + 1) * rows) for i in range(fold)]
    m_new = functools.reduce(jnp.maximum, (m[part] for part in parts))
    rescales = [jnp.exp2(m[part] - m_new) for part in parts]
    merged = [
        acc[part, i * width : (i + 1) * width] * across(rescale, width)
        for i, (part, rescale) in enumerate(zip(parts, rescales, strict=True))
    ]
    totals = (total[part] * rescale for part, rescale in zip(parts, rescales, strict=True))
    return m_new, sum(totals, jnp.zeros_like(m_new)), sum(merged, jnp.zeros_like(merged[0]))


@dataclasses.dataclass(frozen=True)
class Softmax:
    """The running state of a tile: refs `(num_kv_heads, rows, ...)` in VMEM."""

    m_i: Any  # (..., LANES): maxima, the same in all lanes
    l_i: Any  # (..., LANES): sums of weights, a partial one in each lane
    acc: Any  # (..., head_dim_v): weighted sums of values

    def reset(self, heads: Sequence[Any]) -> None:
        """Set the state of some heads to that before the first key."""
        for head in heads:
            self.m_i[head] = jnp.full(self.m_i.shape[1:], FLOOR, jnp.float32)
            self.l_i[head] = jnp.zeros(self.l_i.shape[1:], jnp.float32)
            self.acc[head] = jnp.zeros(self.acc.shape[1:], jnp.float32)

    def fold(
        self,
        heads: Sequence[Any],
        scores: Sequence[Array],
        weigh: Callable[[int, Array], Array],
    ) -> None:
        """Fold base-2 scores (rows, keys) of some heads into the state. Each step is done for all
        heads before the next step, so that their latencies hide one another.

        `weigh(i, p)` is the product of the i-th head's probabilities and values.
        """
        m = [self.m_i[head] for head in heads]
        m_new = [
            jnp.maximum(old, jnp.max(x, axis=1, keepdims=True))
            for old, x in zip(m, scores, strict=True)
        ]
        p = [jnp.exp2(x - across(new, x.shape[1])) for x, new in zip(scores, m_new, strict=True)]
        weighed = [weigh(i, x) for i, x in enumerate(p)]
        for i, head in enumerate(heads):
            rescale = jnp.exp2(m[i] - m_new[i])
            self.m_i[head] = m_new[i]
            self.l_i[head] = self.l_i[head] * rescale + _fold_lanes(p[i])
            self.acc[head] = self.acc[head] * across(rescale, weighed[i].shape[1]) + weighed[i]

    def finish(self, head: Any, sink: Array | None, dtype: Any, fold: int) -> tuple[Array, Array]:
        """The output (rows, head_dim_v), and lse in base 2 (rows, LANES), with the same number in
        all lanes. Resets the head: its stores are hidden by the arithmetic here.

        `sink` (rows, 1): one more logit of each row. If each row stands in the state `fold` times,
        each time with some of the keys, these become one (see `_merge`).
        """
        m, acc = self.m_i[head], self.acc[head]
        total = jnp.broadcast_to(jnp.sum(self.l_i[head], axis=1, keepdims=True), m.shape)
        self.reset([head])
        if fold > 1:
            m, total, acc = _merge(m, total, acc, fold)
        if sink is not None:
            m_new = jnp.maximum(m, sink)
            rescale = jnp.exp2(m - m_new)
            total = total * rescale + jnp.exp2(sink - m_new)
            acc, m = acc * across(rescale, acc.shape[1]), m_new
        # the largest score has weight 1, so only rows that have seen no key have a smaller sum: 0
        divisor = jnp.maximum(total, 1.0)
        if dtype == jnp.float32:
            out = acc / across(divisor, acc.shape[1])
        else:
            guess = reciprocal(divisor, approx=True)
            out = acc * across(guess * (2.0 - divisor * guess), acc.shape[1])  # Newton's step
        return out, m + jnp.log2(divisor)
