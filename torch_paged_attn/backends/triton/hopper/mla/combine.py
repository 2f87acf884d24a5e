"""Results of tiles of latent attention whose keys several programs shared.

A program's share of the keys may begin within a tile, and end within a tile: it leaves at most two
parts. A part are weighted sums of values, not yet divided, and of each row its reference, in base
two, and its sum of weights. Parts of a tile are added up in the order of the keys.

Of P programs, `MlaPointers.parts` has the values of 2 P parts, (2 P, ROWS, 512), then references
and sums, (2 P, 2, ROWS), all float32.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import LN2, finite_or_zero, with_sink
from torch_paged_attn.backends.triton.hopper.mla.arguments import MlaSizes
from torch_paged_attn.backends.triton.hopper.mla.shares import lengths_of
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait

# sequences whose lengths are loaded together
LOOKED_AT = tl.constexpr(128)

# columns of a row of values
WIDTH = tl.constexpr(512)


class TokenParts(NamedTuple):
    """A token, and the parts that programs left of it."""

    row: Any  # the token's number
    in_tile: Any  # the first row of the token in its tile
    first: Any  # the group of programs that left the first part; the next groups left the others
    count: Any


@triton.jit
def _units_of(b, pointers, sizes, OPTIONS: tl.constexpr):
    """Of sequences b: first query, number of queries, and units of work of one tile of queries, as
    `shares.py` counts them."""
    q_start, query_len, _, key_len = lengths_of(b, pointers, sizes, OPTIONS)
    return q_start, query_len, tl.maximum(tl.cdiv(key_len, OPTIONS.UNIT_KEYS), 1)


@triton.jit
def _group_of(unit, groups, total):
    """The group of programs whose share holds a unit, of `total` units dealt out to `groups`."""
    return (((unit + 1).to(tl.int64) * groups - 1) // total).to(tl.int32)


@triton.jit
def add_parts(
    token, out_ptr, pointers, sinks, has_sinks, total_q, num_heads, programs,
    OPTIONS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """Add up the parts of a token, a `TokenParts`, and write its result and lse. What a program of
    the second kernel adds up is SHARES."""
    HEADS: tl.constexpr = SHARES[0]
    PARTS: tl.constexpr = SHARES[1]
    COLUMNS: tl.constexpr = SHARES[2]
    ROWS: tl.constexpr = OPTIONS.ROWS
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_tile = token.in_tile + head % OPTIONS.PACKED_HEADS
    exists = head < num_heads
    references = pointers.parts + programs.to(tl.int64) * (2 * ROWS * WIDTH)
    m = tl.full([HEADS], float("-inf"), tl.float32)
    weights = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, COLUMNS], tl.float32)
    for s0 in tl.range(0, token.count, PARTS):
        s = s0 + tl.arange(0, PARTS)
        slot = (2 * (token.first + s) + tl.where(s == 0, 1, 0)) * OPTIONS.HEAD_TILES
        part = slot[:, None] + (head // OPTIONS.PACKED_HEADS)[None, :]
        is_part = (s < token.count)[:, None] & exists[None, :]
        of_part = references + part * (2 * ROWS) + in_tile[None, :]
        m_part = tl.load(of_part, mask=is_part, other=float("-inf"))
        weight_part = tl.load(of_part + ROWS, mask=is_part, other=0.0)
        at = (part * ROWS + in_tile[None, :]).to(tl.int64) * WIDTH
        values = pointers.parts + at[:, :, None] + column[None, None, :]
        acc_part = tl.load(values, mask=is_part[:, :, None], other=0.0)
        m_new = tl.maximum(m, tl.max(m_part, 0))
        shift = finite_or_zero(m_new)
        old, new = tl.exp2(m - shift), tl.exp2(m_part - shift[None, :])
        weights = weights * old + tl.sum(weight_part * new, 0)
        acc = acc * old[:, None] + tl.sum(acc_part * new[:, :, None], 0)
        m = m_new
    m *= LN2
    if sinks is not None:
        sink = tl.load(sinks + head, mask=exists & has_sinks, other=float("-inf"))
        m, weights, shrink = with_sink(m, weights, sink)
        acc *= shrink[:, None]
    divisor = tl.where(weights == 0.0, 1.0, weights)
    lse = tl.where(weights == 0.0, float("-inf"), m + tl.log(divisor))
    tl.store(pointers.lse + head.to(tl.int64) * total_q + token.row, lse, mask=exists)
    at = (token.row.to(tl.int64) * num_heads + head) * WIDTH
    out = (acc / divisor[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at[:, None] + column[None, :], out, mask=exists[:, None])


@triton.jit(do_not_specialize=(*MlaSizes._fields, "num_heads", "programs"))
def _hopper_mla_combine_kernel(
    out_ptr, pointers,
    num_pages, batch, total_q, max_keys, stride_table,
    num_heads, programs,
    OPTIONS: tl.constexpr, SHARES: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program adds up COLUMNS columns of HEADS heads of a token, PARTS parts at a time: SHARES is
    (HEADS, PARTS, COLUMNS). `programs` is the number of programs of the first kernel. Tokens of
    tiles that one program did alone are left as they are. Sizes come one by one, as in
    `kernel.py`."""
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    sizes = MlaSizes(num_pages, batch, total_q, max_keys, stride_table)
    row = tl.program_id(0)
    # lengths may be read before the first kernel ends: it does not write them
    total = tl.full([], 0, tl.int32)
    sequence = tl.full([], -1, tl.int32)
    before = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        b = b0 + tl.arange(0, LOOKED_AT)
        q_start, query_len, units = _units_of(b, pointers, sizes, OPTIONS)
        units *= tl.cdiv(query_len, TOKENS)
        has_begun = (b <= batch) & (q_start <= row)
        sequence += tl.sum(has_begun.to(tl.int32), 0)
        total += tl.sum(units, 0)
        # the row's own sequence is among those that have begun
        before += tl.sum(tl.where(has_begun, units, 0), 0)
    q_start, query_len, units = _units_of(sequence, pointers, sizes, OPTIONS)
    before -= units * tl.cdiv(query_len, TOKENS)
    token = row - q_start
    first_unit = before + token // TOKENS * units
    groups = tl.minimum(programs // OPTIONS.HEAD_TILES, total)
    first = _group_of(first_unit, groups, total)
    parts = _group_of(first_unit + units - 1, groups, total) - first + 1
    # also where there is nothing to add up: the next kernel waits for this one only, which must
    # not end before the first one
    gdc_wait(IS_DEPENDENT)
    if parts > 1:
        in_tile = token % TOKENS * OPTIONS.PACKED_HEADS
        add_parts(
            TokenParts(row, in_tile, first, parts), out_ptr, pointers, None, False, total_q,
            num_heads, programs, OPTIONS, SHARES,
        )  # fmt: skip
