"""How the Hopper kernel reads lists of blocks (`block_lists.py`).

A tile of BLOCK_N keys is a few runs of keys, one for each of as many entries; an entry past the
end of a list is 0, which no row sees.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.block_lists import ROW_BITS, SPAN


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
def first_keys(entries, KEYS: gl.constexpr):
    """Where the run of keys of each entry begins."""
    starts = ()
    for i in gl.static_range(len(entries)):
        starts = starts + ((entries[i] >> ROW_BITS) * KEYS,)  # type: ignore[assignment]  # noqa: RUF005
    return starts


@gluon.jit
def runs_of(
    entries, present, position, key_len,
    KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """First key of each entry's run, and where the keys end that a row of those `present` sees."""
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
        stops = stops + (stop,)  # type: ignore[assignment]  # noqa: RUF005
    return first_keys(entries, KEYS), stops


@gluon.jit
def is_seen_whole(entries, rows, stop, KEYS: gl.constexpr):
    """Whether all these rows see all keys of the entries, if they see those before `stop`."""
    common = rows
    for i in gl.static_range(len(entries)):
        common = common & entries[i]
    return (common == rows) & (((entries[len(entries) - 1] >> ROW_BITS) + 1) * KEYS <= stop)
