"""The dropout mask of `reference/philox.py`, bit for bit: one draw for four neighbouring keys."""

import triton
import triton.language as tl


@triton.jit
def dropout_keep(rng_ptr, threshold, b, head, token, n0, BLOCK_N: tl.constexpr):
    """(rows, BLOCK_N): True where a probability survives. n0 is a multiple of four."""
    seed = tl.load(rng_ptr)
    offset = tl.load(rng_ptr + 1).to(tl.uint32)
    quad = (n0 // 4 + tl.arange(0, BLOCK_N // 4)).to(tl.uint32)
    stream = ((b.to(tl.uint32) << 16) | head.to(tl.uint32))[:, None]
    row = token.to(tl.uint32)[:, None]
    zero = (quad[None, :] ^ quad[None, :]) & row
    w0, w1, w2, w3 = tl.philox(seed, quad[None, :] | zero, row | zero, stream | zero, offset | zero)
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return words >= threshold.to(tl.uint32)
