"""Dropout's random bits on the chip: Philox-4x32-10, word for word the reference's.

A product of 32 bits is put together from products of 16, which fit in 32: GpSimd's integer
arithmetic is exact there, and its overflow is documented nowhere. VectorE shifts and masks.
"""

from dataclasses import dataclass
from typing import Any

from torch_paged_attn.backends.neuron.kernels.query_tile import P, filled, spread
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
LOW = 0xFFFF

# columns of `words` after the two keys of each round
OFFSET, THRESHOLD = 2 * ROUNDS, 2 * ROUNDS + 1
NUM_WORDS = 2 * ROUNDS + 2


@dataclass
class Constants(nl.NKIObject):
    """What every draw of a call shares."""

    words: Any  # (P, NUM_WORDS) uint32
    factors: Any  # high and low halves of both multipliers, (P, tile_k / 4) uint32


def philox_constants(words, quads):
    """The constants on the chip; words: (1, NUM_WORDS) int32 in HBM."""
    factors = multiplier(0, (P, quads)), multiplier(1, (P, quads))
    tile = nl.ndarray((P, NUM_WORDS), dtype=nl.int32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=words.ap(pattern=[[0, P], [1, NUM_WORDS]]))
    return Constants(words=tile.view(nl.uint32), factors=factors)


def bits_of(data, op, operand):
    """data op operand, bit by bit."""
    tile = nl.ndarray(data.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=tile, data=data, op0=op, operand0=operand)
    return tile


def combined(a, b, op):
    """a op b for tiles of 32-bit numbers."""
    tile = nl.ndarray(a.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=tile, data1=a, data2=b, op=op)
    return tile


def halves_of_product(factor, data):
    """High and low 32 bits of factor * data; the factor's high and low 16 are tiles, at least as
    wide as data.
    """
    quads = data.shape[1]
    above, below = factor[0][:, 0:quads], factor[1][:, 0:quads]
    low, high = bits_of(data, nl.bitwise_and, LOW), bits_of(data, nl.right_shift, 16)
    bottom = combined(below, low, nl.multiply)
    middle = combined(
        combined(above, low, nl.multiply), bits_of(bottom, nl.right_shift, 16), nl.add
    )
    cross = combined(
        combined(below, high, nl.multiply), bits_of(middle, nl.bitwise_and, LOW), nl.add
    )
    top = combined(combined(above, high, nl.multiply), bits_of(middle, nl.right_shift, 16), nl.add)
    upper = combined(top, bits_of(cross, nl.right_shift, 16), nl.add)
    carried = nl.ndarray(data.shape, dtype=nl.uint32, buffer=nl.sbuf)
    nisa.tensor_scalar(
        dst=carried, data=cross, op0=nl.bitwise_and, operand0=LOW, op1=nl.left_shift, operand1=16
    )
    return upper, combined(carried, bits_of(bottom, nl.bitwise_and, LOW), nl.bitwise_or)


def multiplier(which, shape):
    """High and low 16 bits of one of Philox's constants, as tiles."""
    high, low = MULTIPLIERS[which] >> 16, MULTIPLIERS[which] & LOW
    return filled(shape, nl.uint32, high), filled(shape, nl.uint32, low)


def draw(quad, index, columns, first_of_group, constants):
    """Where the random bits drop a probability, (P, 4 quads) uint32.

    quad: (P, quads), position of the key / 4. index (P, n) holds the query's place in its sequence
    and sequence << 16 | head of the group in its two `columns`; `first_of_group` is the query head
    that a group begins with. All uint32.
    """
    words, factors, quads = constants.words, constants.factors, quad.shape[1]
    head = combined(
        index[:, columns[1] : columns[1] + 1], filled((P, 1), nl.uint32, first_of_group), nl.add
    )
    c0, c1 = quad, spread(index, columns[0], quads)
    c2, c3 = spread(head, 0, quads), spread(words, OFFSET, quads)
    for step in range(ROUNDS):
        high0, low0 = halves_of_product(factors[0], c0)
        high1, low1 = halves_of_product(factors[1], c2)
        key0, key1 = spread(words, 2 * step, quads), spread(words, 2 * step + 1, quads)
        c0 = combined(combined(high1, c1, nl.bitwise_xor), key0, nl.bitwise_xor)
        c2 = combined(combined(high0, c3, nl.bitwise_xor), key1, nl.bitwise_xor)
        c1, c3 = low1, low0
    outputs = (c0, c1, c2, c3)
    result = nl.ndarray((P, quads, 4), dtype=nl.uint32, buffer=nl.sbuf)
    threshold = spread(words, THRESHOLD, quads)
    for lane in range(4):
        nisa.tensor_tensor(dst=result[:, :, lane], data1=outputs[lane], data2=threshold, op=nl.less)
    return result.reshape((P, quads * 4))
