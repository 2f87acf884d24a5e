"""The dropout mask of `reference/philox.py`, bit for bit."""

import triton
import triton.language as tl


@triton.jit
def dropout_keep(
    rng_ptr, threshold, b, head, token, n0, BLOCK_N: tl.constexpr, IS_ALIGNED: tl.constexpr,
    HAS_BASE: tl.constexpr,
):  # fmt: skip
    """(rows, BLOCK_N): True where dropout keeps a probability. IS_ALIGNED: n0 is a multiple of 4.
    HAS_BASE: rng_state has five entries.
    """
    seed = tl.load(rng_ptr)
    offset = tl.load(rng_ptr + 1).to(tl.uint32)
    threshold = tl.cast(threshold, tl.uint32)
    if HAS_BASE:
        head = head + tl.load(rng_ptr + 2).to(tl.int32)
        token = token + tl.load(rng_ptr + 3).to(tl.int32)
        n0 = tl.cast(n0, tl.uint32) + tl.load(rng_ptr + 4).to(tl.uint32)
    stream = ((b.to(tl.uint32) << 16) | head.to(tl.uint32))[:, None]
    row = token.to(tl.uint32)[:, None]
    if BLOCK_N < 32 or HAS_BASE or not IS_ALIGNED:
        # the four words of one Philox call are not for four keys of the tile: one call per key
        j = n0 + tl.arange(0, BLOCK_N)
        quad = (j // 4).to(tl.uint32)[None, :]
        zero = (quad ^ quad) & row
        w0, w1, w2, w3 = tl.philox(seed, quad | zero, row | zero, stream | zero, offset | zero)
        lane = (j % 4)[None, :]
        word = tl.where(lane < 2, tl.where(lane == 0, w0, w1), tl.where(lane == 2, w2, w3))
        return word >= threshold
    else:
        quad = (n0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)[None, :]
        zero = (quad ^ quad) & row
        w0, w1, w2, w3 = tl.philox(seed, quad | zero, row | zero, stream | zero, offset | zero)
        words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        return words >= threshold
