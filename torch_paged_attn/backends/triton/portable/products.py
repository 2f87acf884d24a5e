"""The two matrix products of attention."""

import triton
import triton.language as tl


@triton.jit
def scores(q, k, CHAIN: tl.constexpr):
    """`q @ k.T` in float32. With CHAIN > 0, CHAIN elements of a head make a product of their own,
    and the products are added: shorter sums lose fewer bits, and warps share what is in a row.
    """
    if CHAIN > 0 and q.shape[1] > CHAIN:
        parts: tl.constexpr = q.shape[1] // CHAIN
        q = tl.permute(tl.reshape(q, [q.shape[0], parts, CHAIN]), [1, 0, 2])
        k = tl.permute(tl.reshape(k, [k.shape[0], parts, CHAIN]), [1, 2, 0])
        return tl.sum(tl.dot(q, k, input_precision="ieee"), 0)
    else:
        return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def fold_values(acc, shrink, p, v, IS_PRECISE: tl.constexpr):
    """Add a tile's probabilities times its values to what the earlier tiles left. In float32 a tile
    is summed by itself: one chain over all keys would lose more bits than the formula does.
    """
    acc = acc * shrink[:, None]
    if IS_PRECISE:
        return acc + tl.dot(p, v, input_precision="ieee")
    else:
        return tl.dot(p, v, acc)
