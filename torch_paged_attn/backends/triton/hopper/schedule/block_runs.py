"""How the Hopper kernel reads lists of blocks (`block_lists.py`).

A tile of BLOCK_N keys is a few runs of consecutive keys, one for each of as many entries. An entry
past the end of a list is 0, which no row sees.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.schedule.block_lists import ROW_BITS, SPAN


@gluon.jit
def find_list(pointers, sizes, layout_head, position, stop, OPTIONS: gl.constexpr):
    """First entry of the list of the rows at `position`, and how many entries begin before key
    `stop`."""
    KEYS: gl.constexpr = OPTIONS.KEYS_PER_ENTRY
    QUERIES: gl.constexpr = OPTIONS.QUERIES_PER_LIST
    TILE_TOKENS: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    number = position // QUERIES
    exists = (position >= 0) & (number < sizes.lists_per_head) & (stop > 0)
    span = pointers.spans + (layout_head * sizes.lists_per_head + number) * SPAN
    first = gl.load(span, mask=exists, other=0)
    num_entries = gl.load(span + 1, mask=exists, other=0)
    # a causal list of one tile ends there
    if not OPTIONS.IS_CAUSAL or QUERIES > TILE_TOKENS:
        low = 0
        if OPTIONS.IS_CAUSAL:
            low = gl.maximum(num_entries - QUERIES // KEYS, 0)
        while low < num_entries:
            middle = (low + num_entries) // 2
            entry = gl.load(pointers.entries + first + middle)
            starts_before = (entry >> ROW_BITS) * KEYS < stop
            low = gl.where(starts_before, middle + 1, low)
            num_entries = gl.where(starts_before, num_entries, middle)
    return first, num_entries


@gluon.jit
def row_mask_of(position, stop, OPTIONS: gl.constexpr):
    """The bits of the layout rows of queries [position, stop), all of one list."""
    QUERIES: gl.constexpr = OPTIONS.QUERIES_PER_LIST
    start = position & (QUERIES - 1)
    last = gl.maximum(gl.minimum(start + stop - position, QUERIES) - 1, start)
    return (2 << (last // OPTIONS.Q_BLOCK_SIZE)) - (1 << (start // OPTIONS.Q_BLOCK_SIZE))


@gluon.jit
def load_entries(list_ptr, start, num_entries, COUNT: gl.constexpr):
    """COUNT entries of a list, from number `start` on."""
    entries = ()
    for i in gl.static_range(COUNT):
        entry = gl.load(list_ptr + start + i, mask=start + i < num_entries, other=0)
        # the compiler of kernels knows no unpacking
        entries = entries + (entry,)  # type: ignore[assignment]  # noqa: RUF005
    return entries


@gluon.jit
def first_keys(entries, KEYS_PER_ENTRY: gl.constexpr):
    """The first key of each entry's run."""
    starts = ()
    for i in gl.static_range(len(entries)):
        start = (entries[i] >> ROW_BITS) * KEYS_PER_ENTRY
        starts = starts + (start,)  # type: ignore[assignment]  # noqa: RUF005
    return starts


@gluon.jit
def spans_of_entries(entries, row_mask, position, key_len, OPTIONS: gl.constexpr):
    """First key of each entry's run, and the end of the keys that some row of `row_mask` sees."""
    QUERIES: gl.constexpr = OPTIONS.QUERIES_PER_LIST
    stops = ()
    for i in gl.static_range(len(entries)):
        rows = entries[i] & row_mask
        stop = gl.where(rows != 0, key_len, 0)
        if OPTIONS.IS_CAUSAL and OPTIONS.KEYS_PER_ENTRY > OPTIONS.Q_BLOCK_SIZE:
            # rows that end within the block: what comes after the last one nobody may see
            last = 0
            for r in gl.static_range(QUERIES // OPTIONS.Q_BLOCK_SIZE):
                row_stop = (position & -QUERIES) + (r + 1) * OPTIONS.Q_BLOCK_SIZE
                last = gl.where((rows >> r) & 1 != 0, row_stop, last)
            stop = gl.minimum(stop, last)
        stops = stops + (stop,)  # type: ignore[assignment]  # noqa: RUF005
    return first_keys(entries, OPTIONS.KEYS_PER_ENTRY), stops


@gluon.jit
def is_seen_whole(entries, row_mask, stop, KEYS_PER_ENTRY: gl.constexpr):
    """Whether all rows of `row_mask` see all keys of the entries, if they see those before
    `stop`."""
    common = row_mask
    for i in gl.static_range(len(entries)):
        common = common & entries[i]
    last = entries[len(entries) - 1] >> ROW_BITS
    return (common == row_mask) & ((last + 1) * KEYS_PER_ENTRY <= stop)
