"""What the Hopper kernel does to scores between the product and the softmax, and to its end.

Scores are in units of `factor` (base two). Columns are taken in groups of 8: a group's first column
is a constant of the instruction, and no registers hold columns throughout the loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.block_lists import ROW_BITS

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.constexpr_function
def _along(grouped, axis):
    """The layout of a vector along one axis of (rows, groups, 8) scores."""
    lost = [a for a in (2, 1, 0) if a != axis]
    return gl.SliceLayout(lost[1], gl.SliceLayout(lost[0], grouped.type.layout))


@gluon.jit
def _grouped(s):
    return gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8])


@gluon.jit
def _ungrouped(grouped, s):
    """`grouped` as the scores `s` lie."""
    return gl.convert_layout(gl.reshape(grouped, s.shape), s.type.layout, True)


@gluon.jit
def _of_row(x, grouped):
    """(rows, 1, 1)."""
    x = gl.convert_layout(x, _along(grouped, 0), True)
    return gl.expand_dims(gl.expand_dims(x, 1), 2)


@gluon.jit
def _of_group(grouped):
    """(1, groups, 1): the number of a group."""
    group = gl.arange(0, grouped.shape[1], _along(grouped, 1))
    return gl.expand_dims(gl.expand_dims(group, 0), 2)


@gluon.jit
def _in_group(grouped):
    """(1, 1, 8): the number of a column in its group."""
    return gl.expand_dims(gl.expand_dims(gl.arange(0, 8, _along(grouped, 2)), 0), 1)


@gluon.jit
def softcapped(s, squash):
    """tanh of scores, of which `squash` is twice the factor, in base two. Its error is absolute,
    that of a float32 near 1, which is all that counts in a logit."""
    e = gl.exp2(s * squash)
    share = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [e + 1.0], gl.float32, True, 1
    )
    return 1.0 - 2.0 * share


@gluon.jit
def with_alibi(s, starts, position, slope, IS_CAUSAL: gl.constexpr):
    """Take off `slope` for each step between a row's position and a key. Runs of keys begin at
    `starts`."""
    grouped = _grouped(s)
    PER_RUN: gl.constexpr = grouped.shape[1] // len(starts)
    group = _of_group(grouped)
    row = _of_row(position, grouped)
    first = gl.zeros_like(grouped)
    for i in gl.static_range(len(starts)):
        distance = (starts[i] + _in_group(grouped) - row).to(gl.float32)
        first = gl.where(group // PER_RUN == i, distance, first)
    distance = first + (8 * (group % PER_RUN)).to(gl.float32)
    if not IS_CAUSAL:
        distance = -gl.abs(distance)
    return _ungrouped(grouped + _of_row(slope, grouped) * distance, s)


@gluon.jit
def masked(
    s, n0, position, key_len, left, right,
    IS_CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """-inf where the row at `position` does not see key n0 + column."""
    grouped = _grouped(s)
    first = 8 * _of_group(grouped)
    offset = n0 + _in_group(grouped)
    row = _of_row(position, grouped)
    if IS_CAUSAL:
        seen = first <= row - offset  # the last query stands at the last key
    else:
        seen = (first < key_len - offset) & (row == row)
        if HAS_RIGHT:
            seen = seen & (first <= row + right - offset)
    if HAS_LEFT:
        seen = seen & (first >= row - left - offset)
    return _ungrouped(gl.where(seen, grouped, -float("inf")), s)


@gluon.jit
def masked_by_list(
    s, entries, position, key_len,
    KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """-inf where the row at `position` does not see a key of the runs that entries stand for."""
    PER_RUN: gl.constexpr = KEYS // 8
    grouped = _grouped(s)
    group = _of_group(grouped)
    row = _of_row(position, grouped)
    bit = (row & (POSITIONS - 1)) // Q_BLOCK
    last = row
    if not IS_CAUSAL:
        last = gl.zeros_like(row) + (key_len - 1)
    # the last column that a row sees of a run
    reach = gl.zeros_like(row) - 1 + gl.zeros_like(group)
    for i in gl.static_range(len(entries)):
        start = (entries[i] >> ROW_BITS) * KEYS
        seen = ((entries[i] >> bit) & 1) != 0
        reach = gl.where(group // PER_RUN == i, gl.where(seen, last - start, -1), reach)
    seen = 8 * (group % PER_RUN) <= reach - _in_group(grouped)
    return _ungrouped(gl.where(seen, grouped, -float("inf")), s)


@gluon.jit
def with_sink(m_i, total, sink):
    """Maximum and sum of a row with one more logit, and what its values shrink by."""
    m_new = gl.maximum(m_i, sink)
    # a row that sees no key keeps m = -inf; shifting by 0 instead avoids inf - inf
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    shrink = gl.exp2(m_i - shift)
    return m_new, total * shrink + gl.exp2(sink - shift), shrink
