"""The backward of `selected_attention`: dq by lists, dk and dv by inverse lists. Lists of single
keys have kernels of their own: `parts_kernels.py`.

A program of `_selected_dq_kernel` has one token and some heads, as the forward's. A program of
`_selected_dkdv_kernel` has the keys of one unit, or some of them, and one KV head; it takes the
tokens whose lists name the unit, in their order, so that the bits are the same every time. Where
units are long and groups of heads small, this kernel leaves parts of dq, too, and
`token_rows.py` adds them up: tokens would read all of their keys for few rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    load_chunks,
    store_chunks,
    zero_chunks,
)
from torch_paged_attn.backends.triton.portable.common.logits import softcapped
from torch_paged_attn.backends.triton.portable.common.named import named, type_of
from torch_paged_attn.backends.triton.portable.common.products import (
    add_chunk_products,
    chunk_scores,
)
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_keys,
    find_token,
    list_logits,
    load_keys,
    load_queries,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import put_part


class SelectedGradients(NamedTuple):
    """What the kernels of the backward read and write besides the forward's tensors."""

    dout: Any
    lse: Any  # (num_heads, total_q)
    d: Any  # (num_heads, total_q): rowsum(dout * out) - dlse
    dq: Any
    dk: Any
    dv: Any
    # the tensors of `InverseLists`, and of `NumberedEntries` those of each row
    bounds: Any = None
    tokens: Any = None
    places: Any = None
    first_rows: Any = None
    first_units: Any = None
    lengths: Any = None
    lows: Any = None
    highs: Any = None
    # parts of dq of the entries of a run of tokens; None if another kernel computes dq
    parts_q: Any = None
    scale_q: Any = None
    # whether dk and dv have the sums of the runs before
    are_sums: Any = None


class GradientStrides(NamedTuple):
    dout_token: Any
    dout_head: Any


class UnitSizes(NamedTuple):
    """Numbers of a launch of `_selected_dkdv_kernel`."""

    total_q: Any
    num_rows: Any  # of k
    listed: Any  # entries of the inverse lists of a group
    units: Any  # of which a group has inverse lists
    runs: Any  # of tokens
    run: Any
    first_place: Any  # of the entries of the run
    head_places: Any  # entries of a KV head that have parts


@triton.jit
def probabilities(s, lse, IS_PRECISE: tl.constexpr):
    """exp(s - lse), for rows whose lse is finite."""
    if IS_PRECISE:
        return tl.exp(s - lse)
    else:
        return tl.exp2((s - lse) * LOG2E)


@triton.jit
def score_gradients(s, p, dp, d, scalars, OPTIONS: tl.constexpr):
    """Gradients of the products q k before the scale, from those of the probabilities."""
    ds = p * (dp - d)
    if OPTIONS.HAS_SOFTCAP:
        ratio = s / scalars.softcap
        ds = ds * (1.0 - ratio * ratio)
    return ds


@triton.jit
def find_lse(ptr, token, queries, sizes):
    """Where rows are among those of all heads, their lse, and whether they see any key."""
    at = queries.head.to(tl.int64) * sizes.total_q + token.row
    lse = tl.load(ptr + at, mask=queries.exists, other=float("-inf"))
    return at, lse, queries.exists & (lse > float("-inf"))


@triton.jit
def load_row_gradients(token, queries, gradients, more_strides, sizes, OPTIONS: tl.constexpr):
    """What the gradients of a token's heads need besides queries and keys; numbers of rows that see
    no key are 0."""
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    at, lse, sees = find_lse(gradients.lse, token, queries, sizes)
    d = tl.load(gradients.d + at, mask=sees, other=0.0)
    lse = tl.where(sees, lse, 0.0)
    offsets = token.row * more_strides.dout_token
    offsets = offsets + queries.head.to(tl.int64) * more_strides.dout_head
    dout = load_chunks(
        gradients.dout, offsets, sees, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    return named("lse d dout sees offsets")(lse=lse, d=d, dout=dout, sees=sees, offsets=offsets)


@triton.jit
def key_gradients(queries, rows, k, v, is_seen, pointers, scalars, OPTIONS: tl.constexpr):
    """Probabilities of a tile of keys, and the gradients of their products, in DTYPE."""
    s = list_logits(queries, k, v, pointers, scalars, OPTIONS)
    p = probabilities(s, rows.lse[:, None], OPTIONS.IS_PRECISE)
    is_seen = is_seen[None, :] & rows.sees[:, None]
    p = tl.where(is_seen, p, 0.0)
    dp = chunk_scores(rows.dout, v, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    ds = score_gradients(s, p, dp, rows.d[:, None], scalars, OPTIONS)
    # dout of a row that sees only a sink may be NaN
    ds = tl.where(is_seen, ds, 0.0)
    return p, ds.to(type_of(OPTIONS.DTYPE))


@triton.jit
def gradients_by_key(k, v, q, dout, lse, d, is_seen, scalars, OPTIONS: tl.constexpr):
    """As `key_gradients`, of keys times queries: products for dk and dv take these as they are."""
    s = chunk_scores(k, q, OPTIONS.K_HIGH, OPTIONS.CHAIN) * scalars.scale
    if OPTIONS.HAS_SOFTCAP:
        s = softcapped(s, scalars.softcap, OPTIONS.IS_PRECISE, type_of(OPTIONS.DTYPE))
    p = tl.where(is_seen, probabilities(s, lse[None, :], OPTIONS.IS_PRECISE), 0.0)
    dp = chunk_scores(v, dout, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    ds = score_gradients(s, p, dp, d[None, :], scalars, OPTIONS)
    # a key that no query sees may be NaN
    ds = tl.where(is_seen, ds, 0.0)
    return p.to(type_of(OPTIONS.DTYPE)), ds.to(type_of(OPTIONS.DTYPE))


@triton.jit
def store_dq(dq, token, queries, head_tile, gradients, scalars, OPTIONS: tl.constexpr):
    """Write the gradients of a token's heads."""
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    dq = (dq[0] * scalars.scale, dq[1] * scalars.scale)
    r = head_tile * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    at = (token.row * OPTIONS.NUM_HEADS + queries.head).to(tl.int64) * OPTIONS.HEAD_DIM
    store_chunks(
        gradients.dq + at, dq, r < OPTIONS.GROUP_SIZE, OPTIONS.K_LOW, OPTIONS.K_HIGH,
        OPTIONS.HEAD_DIM, Q_FORMAT,
    )  # fmt: skip


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _selected_dq_kernel(
    pointers, gradients,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, more_strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    kv_head, head_tile = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES
    token = find_token(tl.program_id(0), kv_head, pointers, strides, sizes, OPTIONS)
    queries = load_queries(token, kv_head, head_tile, pointers, strides, OPTIONS)
    rows = load_row_gradients(token, queries, gradients, more_strides, sizes, OPTIONS)
    dq = zero_chunks(BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
    for n0 in tl.range(0, token.count * OPTIONS.SELECT_SIZE, OPTIONS.BLOCK_N):
        page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
        k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
        _, ds = key_gradients(queries, rows, k, v, is_seen, pointers, scalars, OPTIONS)
        dq = add_chunk_products(dq, ds, k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
    store_dq(dq, token, queries, head_tile, gradients, scalars, OPTIONS)


@triton.jit
def _tokens_of(i, stop, at, gradients, OPTIONS: tl.constexpr):
    """The tokens of BLOCK_M rows: of entries of an inverse list from `i` on, times PACK heads of a
    KV head's group. `at` is that of `_rows_of_tokens`."""
    PACK: tl.constexpr = min(triton.next_power_of_2(OPTIONS.GROUP_SIZE), OPTIONS.BLOCK_M)
    entry = i + tl.arange(0, OPTIONS.BLOCK_M) // PACK
    return tl.load(gradients.tokens + at.entries + entry, mask=entry < stop, other=0)


@triton.jit
def _rows_of_tokens(
    i, stop, token, head_tile, at, pointers, gradients, strides, OPTIONS: tl.constexpr
):  # fmt: skip
    """BLOCK_M rows of `token`, which `_tokens_of` found, and of some heads of a KV head's group.
    `at`: entry 0 of the group's list, its KV head, sizes and further strides.

    No load waits for another one: each listed token sees a key of the unit, so that its queries
    and gradients are read whatever its lse is."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    PACK: tl.constexpr = min(triton.next_power_of_2(OPTIONS.GROUP_SIZE), BLOCK_M)
    r = tl.arange(0, BLOCK_M)
    entry, in_group = i + r // PACK, head_tile * PACK + r % PACK
    is_listed = (entry < stop) & (in_group < OPTIONS.GROUP_SIZE)
    head = at.kv_head * OPTIONS.GROUP_SIZE + tl.minimum(in_group, OPTIONS.GROUP_SIZE - 1)
    of_row = head.to(tl.int64) * at.total_q + token
    lse = tl.load(gradients.lse + of_row, mask=is_listed, other=0.0)
    d = tl.load(gradients.d + of_row, mask=is_listed, other=0.0)
    offsets = token * strides.q_token + head.to(tl.int64) * strides.q_head
    q = load_chunks(
        pointers.q, offsets, is_listed, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    offsets = token * at.more.dout_token + head.to(tl.int64) * at.more.dout_head
    dout = load_chunks(
        gradients.dout, offsets, is_listed, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    low = 0
    high = 0
    if OPTIONS.HAS_LEFT or OPTIONS.SELECT_SIZE == 1:
        low = tl.load(gradients.lows + token, mask=is_listed, other=0)
    if OPTIONS.HAS_RIGHT or OPTIONS.SELECT_SIZE == 1:
        high = tl.load(gradients.highs + token, mask=is_listed, other=-1)
    sees = is_listed & (lse > float("-inf"))
    return named("q dout lse d low high entry in_group is_listed")(
        q=q,
        dout=dout,
        lse=tl.where(sees, lse, float("inf")),
        d=d,
        low=low,
        high=high,
        entry=entry,
        in_group=in_group,
        is_listed=is_listed,
    )


@triton.jit
def _or_zero(x):
    """x where it is finite."""
    return tl.where(tl.abs(x) < float("inf"), x, tl.zeros_like(x))


@triton.jit
def _put_query_part(ds, k, x, at, gradients, OPTIONS: tl.constexpr):
    """What a tile of keys adds to the gradients of rows of queries. ds: (BLOCK_N, BLOCK_M)."""
    place = tl.load(gradients.places + at.entries + x.entry, mask=x.is_listed, other=0)
    place = (at.first_part + place) * tl.num_programs(2) + at.cut
    row = place * OPTIONS.GROUP_SIZE + x.in_group
    zeros = zero_chunks(OPTIONS.BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
    part = add_chunk_products(zeros, tl.trans(ds), k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
    DIM: tl.constexpr = OPTIONS.HEAD_DIM
    put_part(gradients.parts_q, gradients.scale_q, part[0], row, x.is_listed, False, 0, DIM, False)
    if OPTIONS.K_HIGH > 0:
        tl.static_assert(gradients.scale_q is None, "a row has one scale")
        put_part(
            gradients.parts_q, None, part[1], row, x.is_listed, False, OPTIONS.K_LOW, DIM, False
        )


@triton.jit
def _put_keys(
    ptr, x, row, is_key, are_sums, LOW: tl.constexpr, HIGH: tl.constexpr, DIM: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    """Write gradients of keys or values, or add them to float32 sums."""
    offsets = row * DIM
    if are_sums is not None:
        before = load_chunks(ptr, offsets, is_key, LOW, HIGH, DIM, True, "RAW", tl.float32)
        x = (x[0] + before[0], x[1] + before[1])
        store_chunks(ptr + offsets, x, is_key, LOW, HIGH, DIM, "NATIVE")
    else:
        store_chunks(ptr + offsets, x, is_key, LOW, HIGH, DIM, FORMAT)


@triton.jit(do_not_specialize=UnitSizes._fields)
def _selected_dkdv_kernel(
    pointers, gradients,
    total_q, num_rows, listed, units, runs, run, first_place, head_places,
    strides, more_strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """dk and dv of the entries of a run of tokens, and parts of their dq."""
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PACK: tl.constexpr = min(triton.next_power_of_2(OPTIONS.GROUP_SIZE), BLOCK_M)
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + PACK - 1) // PACK
    K_FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    number, kv_head, cut = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    # of strides, index_group is 0 if all KV heads share a list
    group = tl.where(strides.index_group == 0, 0, kv_head).to(tl.int64)
    bounds_ptr = gradients.bounds + ((group * units + number) * runs + run + group)
    begin, stop = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    at = named("entries kv_head total_q more first_part cut")(
        entries=group * listed,
        kv_head=kv_head,
        total_q=total_q,
        more=more_strides,
        first_part=kv_head.to(tl.int64) * head_places - first_place,
        cut=cut,
    )
    # the gradients of units that no list names are 0 already
    if begin < stop:
        first_token = tl.load(gradients.tokens + at.entries + begin)
        unit = number - tl.load(gradients.first_units + first_token)
        in_unit = cut * BLOCK_N + tl.arange(0, BLOCK_N)
        key = unit * OPTIONS.SELECT_SIZE + in_unit
        is_key = (in_unit < OPTIONS.SELECT_SIZE) & (key < tl.load(gradients.lengths + first_token))
        row = tl.load(gradients.first_rows + first_token) + key
        is_key = is_key & (row >= 0) & (row < num_rows)
        page = tl.zeros([BLOCK_N], tl.int64)
        k, v = load_keys(page, row, is_key, kv_head, pointers, strides, OPTIONS)
        if gradients.parts_q is not None:
            k = (_or_zero(k[0]), _or_zero(k[1]) if OPTIONS.K_HIGH > 0 else 0.0)
        dk = zero_chunks(BLOCK_N, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        dv = zero_chunks(BLOCK_N, OPTIONS.V_LOW, OPTIONS.V_HIGH)
        token = _tokens_of(begin, stop, at, gradients, OPTIONS)
        for i in tl.range(begin, stop, BLOCK_M // PACK):
            # on their way while these are multiplied
            next_token = _tokens_of(i + BLOCK_M // PACK, stop, at, gradients, OPTIONS)
            for head_tile in tl.static_range(HEAD_TILES):
                x = _rows_of_tokens(
                    i, stop, token, head_tile, at, pointers, gradients, strides, OPTIONS
                )
                is_seen = is_key[:, None] & x.is_listed[None, :]
                # overlapping sequences, of single keys, number a row's key differently
                if OPTIONS.HAS_RIGHT or OPTIONS.SELECT_SIZE == 1:
                    is_seen = is_seen & (row[:, None] <= x.high[None, :])
                if OPTIONS.HAS_LEFT or OPTIONS.SELECT_SIZE == 1:
                    is_seen = is_seen & (row[:, None] >= x.low[None, :])
                p, ds = gradients_by_key(k, v, x.q, x.dout, x.lse, x.d, is_seen, scalars, OPTIONS)
                dv = add_chunk_products(dv, p, x.dout, OPTIONS.V_HIGH, OPTIONS.IS_PRECISE)
                dk = add_chunk_products(dk, ds, x.q, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
                if gradients.parts_q is not None:
                    _put_query_part(ds, k, x, at, gradients, OPTIONS)
            token = next_token
        dk = (dk[0] * scalars.scale, dk[1] * scalars.scale)
        heads: tl.constexpr = OPTIONS.NUM_HEADS // OPTIONS.GROUP_SIZE
        row = row * heads + kv_head
        if gradients.dk is not None:
            _put_keys(
                gradients.dk, dk, row, is_key, gradients.are_sums, OPTIONS.K_LOW, OPTIONS.K_HIGH,
                OPTIONS.HEAD_DIM, K_FORMAT,
            )  # fmt: skip
        if gradients.dv is not None:
            _put_keys(
                gradients.dv, dv, row, is_key, gradients.are_sums, OPTIONS.V_LOW, OPTIONS.V_HIGH,
                OPTIONS.HEAD_DIM_V, K_FORMAT,
            )  # fmt: skip
