"""The matrix products of attention and of its backward."""

import triton
import triton.language as tl


@triton.jit
def scores(q, k, CHAIN: tl.constexpr):
    """`q @ k.T` in float32. With CHAIN > 0 it is the sum of products over CHAIN elements of the
    head each: shorter sums are more accurate, and the work of a row is divided between warps.
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
    """`acc * shrink + p @ v`: add a tile's values to those of earlier tiles. In float32
    (IS_PRECISE) a tile is summed separately, because one sum over all keys would be less accurate
    than the reference.
    """
    return add_product(acc * shrink[:, None], p, v, IS_PRECISE)


@triton.jit
def add_product(acc, a, b, IS_PRECISE: tl.constexpr):
    """`acc + a @ b`; with IS_PRECISE the product is computed separately and then added."""
    if IS_PRECISE:
        return acc + tl.dot(a, b, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def chunk_scores(a, b, HIGH: tl.constexpr, CHAIN: tl.constexpr):
    """`scores` of rows in two chunks, the second of which is missing if HIGH is 0."""
    s = scores(a[0], b[0], CHAIN)
    if HIGH > 0:
        s += scores(a[1], b[1], CHAIN)
    return s


@triton.jit
def add_chunk_products(acc, a, b, HIGH: tl.constexpr, IS_PRECISE: tl.constexpr):
    """`add_product` for rows of b, and of acc, in two chunks."""
    low = add_product(acc[0], a, b[0], IS_PRECISE)
    high = acc[1]
    if HIGH > 0:
        high = add_product(acc[1], a, b[1], IS_PRECISE)
    return low, high
