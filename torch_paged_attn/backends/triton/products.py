"""The two matrix products of attention.

In float32 they are summed in short chains: one chain over a head of 256, or over all keys, would
lose more bits than the formula does.
"""

import triton
import triton.language as tl

CHAIN = tl.constexpr(32)


@triton.jit
def scores(q, k, IS_PRECISE: tl.constexpr):
    """`q @ k.T` in float32."""
    if IS_PRECISE and q.shape[1] > CHAIN:
        parts: tl.constexpr = q.shape[1] // CHAIN
        q = tl.permute(tl.reshape(q, [q.shape[0], parts, CHAIN]), [1, 0, 2])
        k = tl.permute(tl.reshape(k, [k.shape[0], parts, CHAIN]), [1, 2, 0])
        return tl.sum(tl.dot(q, k, input_precision="ieee"), 0)
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def fold_values(acc, shrink, p, v, IS_PRECISE: tl.constexpr):
    """Add a tile's probabilities times its values to what the earlier tiles left."""
    acc = acc * shrink[:, None]
    if IS_PRECISE:
        return acc + tl.dot(p, v, input_precision="ieee")
    else:
        return tl.dot(p, v, acc)
