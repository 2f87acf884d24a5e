"""From a tile of products to probabilities and to the gradient of scores, in either orientation.

    P = exp(s - lse)      dS = P (dP - D)      dX = dS, times softcap's derivative

Rows and keys come in shapes that broadcast with the tile, as in `logits.py`. With IS_MASKED pairs
that are not `seen` count as 0, whatever their rows and keys hold.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.dropout import dropout_keep
from torch_paged_attn.backends.triton.softmax import exp


@triton.jit
def probabilities(s, lse, seen, factor, OPTIONS: tl.constexpr, IS_MASKED: tl.constexpr):
    """What the forward's softmax made of final logits."""
    if OPTIONS.IS_PRECISE:
        p = exp(s - lse)
    elif OPTIONS.BIAS == "float":
        # scores may be any float32: times `factor`, some would be infinite
        p = tl.exp2((s - lse) * factor)
    else:
        p = tl.exp2(s * factor - lse)  # one fused multiply-add
    if IS_MASKED:
        p = tl.where(seen, p, 0.0)
    return p


@triton.jit
def dropped(x, survives, pointers, scalars):
    """What dropout makes of probabilities, and of their gradient."""
    if pointers.rng is not None:
        x = tl.where(survives, x * scalars.dropout_scale, 0.0)
    return x


@triton.jit
def survivors(
    b, head, token, n0, pointers, scalars, OPTIONS: tl.constexpr, KEYS_ARE_ROWS: tl.constexpr
):
    """True where the forward's dropout let a probability of these tokens survive."""
    # the first key of a tile that stays may be any one
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
    """dS, which is the gradient of a bias too, and dX, that of the scores before softcap."""
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
