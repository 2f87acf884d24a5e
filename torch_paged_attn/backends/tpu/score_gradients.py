"""Gradients of scores: what both kernels of the backward compute of a piece (FlashAttention-2,
arXiv 2307.08691, algorithm 2), in base 2.

Probabilities come from the saved softmax_lse, so that no maximum and no sum is taken. Whatever
orientation the piece has (`scores.py`), its arrays broadcast against the scores.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.dropout import kept
from torch_paged_attn.backends.tpu.scores import Scores


class ScoreGradients(NamedTuple):
    """Of one head, in float32."""

    weights: Array  # probabilities after dropout: what values are weighed with, but for 1 / (1 - p)
    ds: Array  # of what the softmax is given: of a bias too
    dx: Array  # of softmax_scale * q . k


def score_gradients(
    piece: Scores,
    head: Any,
    products: Array,
    dp: Array,
    lse: Array,
    delta: Array,
    bias: Array | None,
    visible: Array | None,
) -> ScoreGradients:
    """From `q . k` and `dout . v`; `visible` None counts every score.

    A row whose lse is +inf has no gradients. What is not visible has none, NaN or not.
    """
    options = piece.options
    scores, tanh = piece.of(head, products, options.softmax_scale, bias)
    p = jnp.exp2(scores - lse)
    if visible is not None:
        p = jnp.where(visible, p, 0.0)
    weights = p
    if options.dropout_p > 0.0:
        keep = piece.keep(head)
        weights = kept(p, keep)
        dp = kept(dp * (1.0 / (1.0 - options.dropout_p)), keep)
    ds = p * (dp - delta)
    if visible is not None:
        ds = jnp.where(visible, ds, 0.0)
    dx = ds
    if tanh is not None:
        dx = ds * (1.0 - tanh * tanh)
        dx = dx if visible is None else jnp.where(visible, dx, 0.0)
    return ScoreGradients(weights, ds, dx)
