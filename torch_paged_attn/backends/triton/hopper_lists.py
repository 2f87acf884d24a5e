"""How the Hopper kernel reads lists of blocks (`block_lists.py`): what to load, what to mask.

A tile of BLOCK_N keys is a few runs of keys, one for each of as many entries; an entry past the
end of a list is 0, which no row sees.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.block_lists import ROW_BITS, SPAN


@gluon.jit
def find_list(
    entries_ptr, spans_ptr, b, head, position, stop, layout_heads, groups,
    TOKENS: gl.constexpr, KEYS: gl.constexpr, POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """First entry of the list of the rows at `position`, and how many begin before key `stop`."""
    group = position // POSITIONS
    exists = (position >= 0) & (group < groups) & (stop > 0)
    span = spans_ptr + ((b * layout_heads + head) * groups + group) * SPAN
    first = gl.load(span, mask=exists, other=0)
    listed = gl.load(span + 1, mask=exists, other=0)
    # a causal list of one tile ends there
    if not IS_CAUSAL or POSITIONS > TOKENS:
        low = 0
        if IS_CAUSAL:
            low = gl.maximum(listed - POSITIONS // KEYS, 0)
        while low < listed:
            middle = (low + listed) // 2
            starts_before = (gl.load(entries_ptr + first + middle) >> ROW_BITS) * KEYS < stop
            low = gl.where(starts_before, middle + 1, low)
            listed = gl.where(starts_before, listed, middle)
    return first, listed


@gluon.jit
def rows_between(position, stop, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr):
    """The bits of the rows of queries [position, stop), which end in the group they begin in."""
    start = position & (POSITIONS - 1)
    last = gl.maximum(gl.minimum(start + stop - position, POSITIONS) - 1, start)
    return (2 << (last // Q_BLOCK)) - (1 << (start // Q_BLOCK))


@gluon.jit
def load_entries(list_ptr, at, listed, RUNS: gl.constexpr):
    """RUNS entries of a list of `listed`, from number `at` on."""
    entries = ()
    for i in gl.static_range(RUNS):
        entry = gl.load(list_ptr + at + i, mask=at + i < listed, other=0)
        # the compiler of kernels knows no unpacking
        entries = entries + (entry,)  # type: ignore[assignment]  # noqa: RUF005
    return entries


@gluon.jit
def runs_of(
    entries, present, position, key_len,
    KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """First key of each entry's run, and where the keys end that a row of those `present` sees."""
    starts = ()
    stops = ()
    for i in gl.static_range(len(entries)):
        rows = entries[i] & present
        stop = gl.where(rows != 0, key_len, 0)
        if IS_CAUSAL and KEYS > Q_BLOCK:
            # rows that end within the block: what comes after the last one nobody may see
            last = 0
            for r in gl.static_range(POSITIONS // Q_BLOCK):
                row_stop = (position & -POSITIONS) + (r + 1) * Q_BLOCK
                last = gl.where((rows >> r) & 1 != 0, row_stop, last)
            stop = gl.minimum(stop, last)
        starts = starts + ((entries[i] >> ROW_BITS) * KEYS,)  # type: ignore[assignment]  # noqa: RUF005
        stops = stops + (stop,)  # type: ignore[assignment]  # noqa: RUF005
    return starts, stops


@gluon.jit
def is_seen_whole(entries, rows, stop, KEYS: gl.constexpr):
    """Whether all these rows see all keys of the entries, if they see those before `stop`."""
    common = rows
    for i in gl.static_range(len(entries)):
        common = common & entries[i]
    return (common == rows) & (((entries[len(entries) - 1] >> ROW_BITS) + 1) * KEYS <= stop)


@gluon.jit
def masked_by_list(
    s, entries, position, key_len,
    KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """-inf where the row at `position` does not see a key; by groups of columns, as `_masked`."""
    BLOCK_M: gl.constexpr = s.shape[0]
    BLOCK_N: gl.constexpr = s.shape[1]
    PER_RUN: gl.constexpr = KEYS // 8
    grouped = gl.reshape(s, [BLOCK_M, BLOCK_N // 8, 8])
    groups: gl.constexpr = grouped.type.layout
    of_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, groups))
    of_group: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, groups))
    in_group: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, groups))
    group = gl.expand_dims(gl.expand_dims(gl.arange(0, BLOCK_N // 8, of_group), 0), 2)
    offset = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, in_group), 0), 1)
    row = gl.expand_dims(gl.expand_dims(gl.convert_layout(position, of_row, True), 1), 2)
    bit = (row & (POSITIONS - 1)) // Q_BLOCK
    last = row
    if not IS_CAUSAL:
        last = gl.full_like(row, 0) + (key_len - 1)
    # the last column that a row sees of a run
    reach = gl.full_like(row, -1) + 0 * group
    for i in gl.static_range(len(entries)):
        start = (entries[i] >> ROW_BITS) * KEYS
        seen = ((entries[i] >> bit) & 1) != 0
        reach = gl.where(group // PER_RUN == i, gl.where(seen, last - start, -1), reach)
    masked = gl.where(8 * (group % PER_RUN) <= reach - offset, grouped, -float("inf"))
    return gl.convert_layout(gl.reshape(masked, [BLOCK_M, BLOCK_N]), s.type.layout, True)
