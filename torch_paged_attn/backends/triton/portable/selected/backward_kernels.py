"""The backward of `selected_attention`: dq by lists, dk and dv by inverse lists. Lists of single
keys have kernels of their own: `parts_kernels.py`.

A program of `_selected_dq_kernel` has one token and some heads, as the forward's. A program of
`_selected_dkdv_kernel` has the keys of one unit, or some of them, and one KV head; it takes the
tokens whose lists name the unit, in their order, so that the bits are the same every time.
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


class SelectedGradients(NamedTuple):
    """What the kernels of the backward read and write besides the forward's tensors."""

    dout: Any
    lse: Any  # (num_heads, total_q)
    d: Any  # (num_heads, total_q): rowsum(dout * out) - dlse
    dq: Any
    dk: Any
    dv: Any
    # for each group: where each unit's entries begin, and their tokens and units
    bounds: Any = None
    tokens: Any = None
    units: Any = None
    # of each token: the row of its sequence's first key, its position, and Lk
    first_rows: Any = None
    positions: Any = None
    lengths: Any = None


class GradientStrides(NamedTuple):
    dout_token: Any
    dout_head: Any


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
def load_rows(token, queries, gradients, more_strides, sizes, OPTIONS: tl.constexpr):
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
    return named("lse d dout sees")(lse=lse, d=d, dout=dout, sees=sees)


@triton.jit
def key_gradients(queries, rows, k, v, is_seen, pointers, scalars, OPTIONS: tl.constexpr):
    """Probabilities of a tile of keys, and the gradients of their products, in DTYPE."""
    s = list_logits(queries, k, v, pointers, scalars, OPTIONS)
    p = probabilities(s, rows.lse[:, None], OPTIONS.IS_PRECISE)
    p = tl.where(is_seen[None, :] & rows.sees[:, None], p, 0.0)
    dp = chunk_scores(rows.dout, v, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    ds = score_gradients(s, p, dp, rows.d[:, None], scalars, OPTIONS)
    return p, ds.to(type_of(OPTIONS.DTYPE))


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
    rows = load_rows(token, queries, gradients, more_strides, sizes, OPTIONS)
    dq = zero_chunks(BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
    for n0 in tl.range(0, token.count * OPTIONS.SELECT_SIZE, OPTIONS.BLOCK_N):
        page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
        k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
        _, ds = key_gradients(queries, rows, k, v, is_seen, pointers, scalars, OPTIONS)
        dq = add_chunk_products(dq, ds, k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
    store_dq(dq, token, queries, head_tile, gradients, scalars, OPTIONS)


@triton.jit
def _rows_of_tokens(i, stop, head_tile, at, pointers, gradients, strides, OPTIONS: tl.constexpr):
    """BLOCK_M rows: entries of an inverse list from `i` on, times PACK heads of a KV head's group.
    `at`: entry 0 of the group's list, its KV head, sizes and further strides.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    PACK: tl.constexpr = min(triton.next_power_of_2(OPTIONS.GROUP_SIZE), BLOCK_M)
    r = tl.arange(0, BLOCK_M)
    entry, in_group = i + r // PACK, head_tile * PACK + r % PACK
    exists = (entry < stop) & (in_group < OPTIONS.GROUP_SIZE)
    token = tl.load(gradients.tokens + at.entries + entry, mask=exists, other=0)
    head = at.kv_head * OPTIONS.GROUP_SIZE + tl.minimum(in_group, OPTIONS.GROUP_SIZE - 1)
    of_row = head.to(tl.int64) * at.total_q + token
    lse = tl.load(gradients.lse + of_row, mask=exists, other=float("-inf"))
    exists = exists & (lse > float("-inf"))
    offsets = token * strides.q_token + head.to(tl.int64) * strides.q_head
    q = load_chunks(
        pointers.q, offsets, exists, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    offsets = token * at.more.dout_token + head.to(tl.int64) * at.more.dout_head
    dout = load_chunks(
        gradients.dout, offsets, exists, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    return named("q dout lse d exists first position length")(
        q=q,
        dout=dout,
        lse=tl.where(exists, lse, 0.0),
        d=tl.load(gradients.d + of_row, mask=exists, other=0.0),
        exists=exists,
        first=tl.load(gradients.first_rows + token, mask=exists, other=0),
        position=tl.load(gradients.positions + token, mask=exists, other=0),
        length=tl.load(gradients.lengths + token, mask=exists, other=0),
    )


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _selected_dkdv_kernel(
    pointers, gradients,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, more_strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """sizes: of the forward, with the entries of a group's inverse list for `entries` and the
    number of bounds for `max_pages`.
    """
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PACK: tl.constexpr = min(triton.next_power_of_2(OPTIONS.GROUP_SIZE), BLOCK_M)
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + PACK - 1) // PACK
    K_FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    kv_head = tl.program_id(1)
    # of strides, index_group is 0 if all KV heads share a list
    group = tl.where(strides.index_group == 0, 0, kv_head).to(tl.int64)
    bounds_ptr = gradients.bounds + group * sizes.max_pages + tl.program_id(0)
    begin, stop = tl.load(bounds_ptr), tl.load(bounds_ptr + 1)
    at = named("entries kv_head total_q more")(
        entries=group * sizes.entries, kv_head=kv_head, total_q=sizes.total_q, more=more_strides
    )
    # units that no list names are 0 already
    if begin < stop:
        first_token = tl.load(gradients.tokens + at.entries + begin)
        unit = tl.load(gradients.units + at.entries + begin)
        in_unit = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
        key = unit * OPTIONS.SELECT_SIZE + in_unit
        is_key = (in_unit < OPTIONS.SELECT_SIZE) & (key < tl.load(gradients.lengths + first_token))
        row = tl.load(gradients.first_rows + first_token) + key
        is_key = is_key & (row >= 0) & (row < sizes.num_rows)
        page = tl.zeros([BLOCK_N], tl.int64)
        k, v = load_keys(page, row, is_key, kv_head, pointers, strides, OPTIONS)
        dk = zero_chunks(BLOCK_N, OPTIONS.K_LOW, OPTIONS.K_HIGH)
        dv = zero_chunks(BLOCK_N, OPTIONS.V_LOW, OPTIONS.V_HIGH)
        for i in tl.range(begin, stop, BLOCK_M // PACK):
            for head_tile in tl.static_range(HEAD_TILES):
                x = _rows_of_tokens(i, stop, head_tile, at, pointers, gradients, strides, OPTIONS)
                s = chunk_scores(x.q, k, OPTIONS.K_HIGH, OPTIONS.CHAIN) * scalars.scale
                if OPTIONS.HAS_SOFTCAP:
                    s = softcapped(s, scalars.softcap, OPTIONS.IS_PRECISE, type_of(OPTIONS.DTYPE))
                # overlapping sequences number a row's key differently
                own_key = row[None, :] - x.first[:, None]
                is_seen = x.exists[:, None] & is_key[None, :] & (own_key < x.length[:, None])
                if OPTIONS.HAS_RIGHT:
                    is_seen = is_seen & (own_key <= x.position[:, None] + scalars.right)
                if OPTIONS.HAS_LEFT:
                    is_seen = is_seen & (own_key >= x.position[:, None] - scalars.left)
                p = probabilities(s, x.lse[:, None], OPTIONS.IS_PRECISE)
                p = tl.where(is_seen, p, 0.0)
                dp = chunk_scores(x.dout, v, OPTIONS.V_HIGH, OPTIONS.CHAIN)
                ds = score_gradients(s, p, dp, x.d[:, None], scalars, OPTIONS)
                # a key of the unit that no query sees may be NaN
                ds = tl.where(is_seen, ds, 0.0)
                p = tl.trans(p.to(type_of(OPTIONS.DTYPE)))
                ds = tl.trans(ds.to(type_of(OPTIONS.DTYPE)))
                dv = add_chunk_products(dv, p, x.dout, OPTIONS.V_HIGH, OPTIONS.IS_PRECISE)
                dk = add_chunk_products(dk, ds, x.q, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE)
        dk = (dk[0] * scalars.scale, dk[1] * scalars.scale)
        heads: tl.constexpr = OPTIONS.NUM_HEADS // OPTIONS.GROUP_SIZE
        row = row * heads + kv_head
        if gradients.dk is not None:
            store_chunks(
                gradients.dk + row * OPTIONS.HEAD_DIM, dk, is_key, OPTIONS.K_LOW, OPTIONS.K_HIGH,
                OPTIONS.HEAD_DIM, K_FORMAT,
            )  # fmt: skip
        if gradients.dv is not None:
            store_chunks(
                gradients.dv + row * OPTIONS.HEAD_DIM_V, dv, is_key, OPTIONS.V_LOW,
                OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, K_FORMAT,
            )  # fmt: skip
