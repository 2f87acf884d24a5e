"""Scores between the product and the softmax: softcap, ALiBi and masks.

A score times `scale_log2` is an exponent of two. Columns are taken in groups of 8: a group's first
column is a constant of the instruction, and no registers hold columns throughout the loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torch_paged_attn.backends.triton.common.softmax import small_tanh
from torch_paged_attn.backends.triton.hopper.schedule.block_lists import ROW_BITS
from torch_paged_attn.backends.triton.hopper.schedule.block_runs import first_keys, is_seen_whole


@gluon.jit
def ask_for_scores(rows, columns, zeros, OPTIONS: gl.constexpr):
    """Ask for the product of rows, (rows, WIDTH), and columns, (WIDTH, columns): of WIDTH, numbers
    from COLUMNS on are zeros."""
    if OPTIONS.COLUMNS == OPTIONS.WIDTH:
        return warpgroup_mma(rows, columns, zeros, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = OPTIONS.WIDTH // 2
        REST: gl.constexpr = OPTIONS.COLUMNS - HALF
        low, high = rows.slice(0, HALF, dim=1), rows.slice(HALF, REST, dim=1)
        of_low, of_high = columns.slice(0, HALF, dim=0), columns.slice(HALF, REST, dim=0)
        s = warpgroup_mma(low, of_low, zeros, use_acc=False, is_async=True)
        return warpgroup_mma(high, of_high, s, is_async=True)


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
def _softcap(s, softcap_scale_log2, IS_CLOSE: gl.constexpr):
    """tanh of scores, of which `softcap_scale_log2` is twice the factor, in base two. IS_CLOSE: by
    a series near 0, where the error of the quotient, some 2**-24, is much of a small logit: more
    than float16 probabilities hide."""
    t = s * softcap_scale_log2
    share = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [gl.exp2(t) + 1.0], gl.float32, True, 1
    )
    large = 1.0 - 2.0 * share
    if IS_CLOSE:
        small, is_small = small_tanh(t)
        return gl.where(is_small, small, large)
    else:
        return large


@gluon.jit
def _add_alibi(s, starts, position, slope, IS_CAUSAL: gl.constexpr):
    """Subtract `slope` times the distance of a row's position and a key. Runs of keys begin at
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
def mask_window(s, kv_start, rows, scalars, OPTIONS: gl.constexpr):
    """-inf where a row does not see key kv_start + column."""
    grouped = _grouped(s)
    first = 8 * _of_group(grouped)
    offset = kv_start + _in_group(grouped)
    row = _of_row(rows.position, grouped)
    if OPTIONS.IS_CAUSAL:
        seen = first <= row - offset  # the last query stands at the last key
    else:
        seen = (first < rows.key_len - offset) & (row == row)
        if OPTIONS.HAS_RIGHT:
            seen = seen & (first <= row + scalars.window_right - offset)
    if OPTIONS.HAS_LEFT:
        seen = seen & (first >= row - scalars.window_left - offset)
    return _ungrouped(gl.where(seen, grouped, -float("inf")), s)


@gluon.jit
def _mask_list(s, entries, rows, OPTIONS: gl.constexpr):
    """-inf where a row does not see a key of the runs that entries stand for."""
    KEYS: gl.constexpr = OPTIONS.KEYS_PER_ENTRY
    PER_RUN: gl.constexpr = KEYS // 8
    grouped = _grouped(s)
    group = _of_group(grouped)
    row = _of_row(rows.position, grouped)
    bit = (row & (OPTIONS.QUERIES_PER_LIST - 1)) // OPTIONS.Q_BLOCK_SIZE
    last = row
    if not OPTIONS.IS_CAUSAL:
        last = gl.zeros_like(row) + (rows.key_len - 1)
    # the last column that a row sees of a run
    reach = gl.zeros_like(row) - 1 + gl.zeros_like(group)
    for i in gl.static_range(len(entries)):
        start = (entries[i] >> ROW_BITS) * KEYS
        seen = ((entries[i] >> bit) & 1) != 0
        reach = gl.where(group // PER_RUN == i, gl.where(seen, last - start, -1), reach)
    seen = 8 * (group % PER_RUN) <= reach - _in_group(grouped)
    return _ungrouped(gl.where(seen, grouped, -float("inf")), s)


@gluon.jit
def finish_scores(s, runs, rows, params, OPTIONS: gl.constexpr, IS_FIRST: gl.constexpr):
    """Scores of a tile of keys as the softmax takes them. The keys are `runs`, as the producer
    loads them: the number of the first, or the entries of a list. IS_FIRST: the last keys of all.
    """
    # without a diagonal or a window, only the first tile reaches past the keys
    MAY_HIDE: gl.constexpr = IS_FIRST or OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT
    if OPTIONS.HAS_SOFTCAP:
        IS_FLOAT16: gl.constexpr = params.q_desc.dtype == gl.float16
        s = _softcap(s, params.scalars.softcap_scale_log2 * rows.descale, IS_FLOAT16)
    if params.pointers.alibi_slopes is not None:
        starts = runs
        if OPTIONS.HAS_LAYOUT:
            starts = first_keys(runs, OPTIONS.KEYS_PER_ENTRY)
        s = _add_alibi(s, starts, rows.position, rows.slope, OPTIONS.IS_CAUSAL)
    if OPTIONS.HAS_LAYOUT:
        if not is_seen_whole(runs, rows.row_mask, rows.full_stop, OPTIONS.KEYS_PER_ENTRY):
            s = _mask_list(s, runs, rows, OPTIONS)
    elif MAY_HIDE and (runs[0] + OPTIONS.BLOCK_N > rows.full_stop) | (runs[0] < rows.full_start):
        s = mask_window(s, runs[0], rows, params.scalars, OPTIONS)
    return s


@gluon.jit
def _keep_columns(p, first, last):
    """p, and 0 in columns before `first` and after `last`, which are by row."""
    grouped = _grouped(p)
    column = 8 * _of_group(grouped)
    within = _in_group(grouped)
    seen = (column >= _of_row(first, grouped) - within) & (
        column <= _of_row(last, grouped) - within
    )
    return _ungrouped(gl.where(seen, grouped, 0.0), p)


@gluon.jit
def probabilities(
    s, lse, first_key, position, key_len, slope, params, OPTIONS: gl.constexpr,
    OF_KEYS: gl.constexpr, MAY_HIDE: gl.constexpr = True,
):  # fmt: skip
    """Probabilities P of keys from `first_key` on and queries from `position` on, by lse in base
    two; rows are keys if OF_KEYS. Also what dP - D is multiplied by to give dS: P itself or, with a
    softcap, P times the derivative of the cap. Without MAY_HIDE each of the queries sees each of
    the keys."""
    ROWS: gl.constexpr = s.shape[0]
    COLUMNS: gl.constexpr = s.shape[1]
    KEYS: gl.constexpr = ROWS if OF_KEYS else COLUMNS
    QUERIES: gl.constexpr = COLUMNS if OF_KEYS else ROWS
    scalars = params.scalars
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    r = gl.arange(0, ROWS, rows)
    capped = s
    if OPTIONS.HAS_SOFTCAP:
        capped = _softcap(s, scalars.softcap_scale_log2, False)
    x = capped
    if params.pointers.alibi_slopes is not None:
        # the distance of a causal call's keys to queries has one sign, which turns with the tile
        by_row = slope * gl.full([ROWS], 1.0, gl.float32, rows)
        if OF_KEYS:
            sign: gl.constexpr = -1.0 if OPTIONS.IS_CAUSAL else 1.0
            x = _add_alibi(x, (position,), first_key + r, sign * by_row, OPTIONS.IS_CAUSAL)
        else:
            x = _add_alibi(x, (first_key,), position + r, by_row, OPTIONS.IS_CAUSAL)
    p = gl.exp2(x * scalars.scale_log2 - lse)
    if MAY_HIDE:
        full_stop = key_len
        if OPTIONS.HAS_RIGHT:
            full_stop = gl.minimum(key_len, position + scalars.window_right + 1)
        is_hidden = first_key + KEYS > full_stop
        if OPTIONS.HAS_LEFT:
            is_hidden = is_hidden | (first_key < position + QUERIES - 1 - scalars.window_left)
        if is_hidden:
            first = gl.zeros_like(r)
            last = first + (COLUMNS - 1)
            if OF_KEYS:
                key = first_key + r
                if OPTIONS.HAS_RIGHT:
                    first = key - scalars.window_right - position
                if OPTIONS.HAS_LEFT:
                    last = key + scalars.window_left - position
                last = gl.where(key < key_len, last, -1)
            else:
                last += key_len - first_key - COLUMNS
                if OPTIONS.HAS_RIGHT:
                    last = gl.minimum(last, position + r + scalars.window_right - first_key)
                if OPTIONS.HAS_LEFT:
                    first = position + r - scalars.window_left - first_key
            p = _keep_columns(p, first, last)
    weight = p
    if OPTIONS.HAS_SOFTCAP:
        weight = p * (1.0 - capped * capped)
    return p, weight
