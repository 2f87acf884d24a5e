"""Probabilities and gradients of scores, for one tile of pairs of queries and keys.

    P = exp(s - lse)      dS = P (dP - D)      dX = dS times the derivative of softcap

Tiles are (queries, keys) or (keys, queries); rows and keys have shapes that broadcast with them, as
in `logits.py`. With IS_MASKED, results are 0 where `seen` is False, even if inputs are NaN.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import exp
from torch_paged_attn.backends.triton.portable.common.dropout import dropout_keep


@triton.jit
def probabilities(s, lse, seen, factor, OPTIONS: tl.constexpr, IS_MASKED: tl.constexpr):
    """The forward's probabilities, from final logits `s` and lse."""
    if OPTIONS.IS_PRECISE:
        p = exp(s - lse)
    elif OPTIONS.BIAS == "float":
        # s may be so large that s * factor overflows, although s - lse is small
        p = tl.exp2((s - lse) * factor)
    else:
        p = tl.exp2(s * factor - lse)  # one fused multiply-add
    if IS_MASKED:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def dropped(x, survives, pointers, scalars):
    """Probabilities, or their gradients, after dropout."""
    if pointers.rng is not None:
        x = tl.where(survives, x * scalars.dropout_scale, 0.0)
    return x


@triton.jit
def survivors(
    b, head, token, n0, pointers, scalars, OPTIONS: tl.constexpr, KEYS_ARE_ROWS: tl.constexpr
):
    """True where the forward's dropout has kept a probability."""
    # with IS_SHARED, the first key of a tile of keys need not be a multiple of anything
    IS_ALIGNED: tl.constexpr = OPTIONS.IS_ALIGNED and not (KEYS_ARE_ROWS and OPTIONS.IS_SHARED)
    survives = True
    if pointers.rng is not None:
        heads = head + tl.zeros_like(token)
        survives = dropout_keep(
            pointers.rng,
            scalars.dropout_threshold,
            b,
            heads,
            token,
            n0,
            OPTIONS.BLOCK_N,
            IS_ALIGNED,
            OPTIONS.HAS_DROPOUT_BASE,
        )
        if KEYS_ARE_ROWS:
            survives = tl.trans(survives)
    return survives


@triton.jit
def gradient_of_scores(
    p, dp, delta, seen, capped, softcap, OPTIONS: tl.constexpr, IS_MASKED: tl.constexpr
):
    """dS, the gradient of final logits (and of a bias), and dX, that before softcap."""
    ds = p * (dp - delta)
    if IS_MASKED:
        # p is 0 there, but dp may be NaN
        ds = tl.where(seen, ds, 0.0)
    dx = ds
    if OPTIONS.HAS_SOFTCAP:
        squashed = capped / softcap
        slope = (1.0 - squashed) * (1.0 + squashed)
        if IS_MASKED:
            slope = tl.where(seen, slope, 0.0)
        dx = ds * slope
    return ds, dx
