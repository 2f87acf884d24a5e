"""The keys of a list: which sequence a token is in, where its selected keys are, and its logits.

Kernels of selected keys share this. A program has one query token and some heads of one KV head's
group, and gathers BLOCK_N keys of the token's list at a time. Keys that the token does not see are
not read.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_chunks
from torch_paged_attn.backends.triton.portable.common.logits import softcapped
from torch_paged_attn.backends.triton.portable.common.named import named, type_of
from torch_paged_attn.backends.triton.portable.common.products import chunk_scores


class SelectedPointers(NamedTuple):
    """Tensors that all kernels of selected keys read; None for those that a call does not have."""

    q: Any
    k: Any
    v: Any
    key_indices: Any
    num_selected: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    block_table: Any
    q_latent: Any
    k_start: Any
    q_position: Any
    q_descale: Any
    k_descale: Any
    v_descale: Any
    sinks: Any


class SelectedStrides(NamedTuple):
    """Strides in elements; 0 for a dimension along which a tensor is broadcast."""

    q_token: Any
    q_head: Any
    k_page: Any  # 0 for packed keys, which are one long page
    k_head: Any
    k_slot: Any
    v_page: Any
    v_head: Any
    v_slot: Any
    latent_token: Any
    latent_head: Any
    index_group: Any
    index_entry: Any
    count_group: Any
    q_descale_batch: Any
    q_descale_head: Any
    k_descale_batch: Any
    k_descale_head: Any
    v_descale_batch: Any
    v_descale_head: Any
    v_descale_page: Any  # the last three: of scales by column
    v_descale_slot: Any
    v_descale_column: Any


class SelectedSizes(NamedTuple):
    """Numbers that change from call to call, for which kernels are not compiled."""

    total_q: Any
    batch: Any
    entries: Any
    num_rows: Any  # packed: total_k; pages: num_pages
    stride_index_token: Any
    stride_count_token: Any
    stride_table: Any
    max_pages: Any
    splits: Any


class SelectedScalars(NamedTuple):
    """Numbers that depend on the options of a call."""

    scale: Any
    left: Any
    right: Any
    softcap: Any


class SelectedOptions(NamedTuple):
    """Compile-time constants."""

    HEAD_DIM: int
    K_LOW: int  # chunks of a row, see `gather_scatter.py`
    K_HIGH: int
    HEAD_DIM_V: int
    V_LOW: int
    V_HIGH: int
    NUM_HEADS: int
    GROUP_SIZE: int
    SELECT_SIZE: int
    PAGE_SIZE: int  # 0: packed keys
    IS_SLOTS: bool
    HAS_LEFT: bool
    HAS_RIGHT: bool
    HAS_SOFTCAP: bool
    IS_V_IN_K: bool  # the values are the first chunk of the keys
    IS_SPLIT: bool
    Q_FORMAT: str
    K_FORMAT: str
    V_FORMAT: str
    OUT_FORMAT: str
    DTYPE: str  # of the factors of matrix products
    IS_PRECISE: bool
    CHAIN: int
    BLOCK_M: int
    BLOCK_N: int
    SCALED_COLUMNS: int  # of values, that share a scale; 0: those of a head do
    COPIES: int  # of the number of each of a tile's keys (`_numbers_of_tile`)
    FINDS_AHEAD: bool  # pages and slots of the next tile are held while one is multiplied


# sequences whose bounds a program reads at a time
SEARCH = tl.constexpr(256)

# that 32 bits number
MOST_KEYS = tl.constexpr(2**31 - 1)


@triton.jit
def find_token(token, kv_head, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """A query token: its sequence, position, and list for a KV head. `exists` is False for a row of
    padding, whose list is empty.
    """
    b = tl.zeros([], tl.int32)
    for first in tl.range(0, sizes.batch, SEARCH):
        at = first + tl.arange(0, SEARCH)
        ends = tl.load(pointers.cu_seqlens_q + 1 + at, mask=at < sizes.batch, other=2147483647)
        b += tl.sum((ends <= token).to(tl.int32), 0)
    exists = b < sizes.batch
    q_start = tl.load(pointers.cu_seqlens_q + b, mask=exists, other=0)
    k_first = tl.zeros([], tl.int64)
    if OPTIONS.IS_SLOTS:
        key_len = tl.cast(sizes.num_rows, tl.int64) * OPTIONS.PAGE_SIZE
        position = tl.zeros([], tl.int64)
    else:
        bounds = pointers.cu_seqlens_q
        if pointers.cu_seqlens_k is not None:
            bounds = pointers.cu_seqlens_k
        k_first = tl.load(bounds + b, mask=exists, other=0).to(tl.int64)
        if pointers.seqused_k is not None:
            key_len = tl.load(pointers.seqused_k + b, mask=exists, other=0).to(tl.int64)
        else:
            key_len = tl.load(bounds + b + 1, mask=exists, other=0).to(tl.int64) - k_first
        if pointers.k_start is not None:
            k_first = tl.load(pointers.k_start + b, mask=exists, other=0).to(tl.int64)
        if pointers.q_position is not None:
            position = tl.load(pointers.q_position + b, mask=exists, other=0).to(tl.int64)
        else:
            q_stop = tl.load(pointers.cu_seqlens_q + b + 1, mask=exists, other=0)
            position = key_len - (q_stop - q_start)
        position += token - q_start
    row = tl.cast(token, tl.int64)
    count = tl.where(exists, sizes.entries, 0)
    if pointers.num_selected is not None:
        count_ptr = pointers.num_selected + row * sizes.stride_count_token
        listed = tl.load(count_ptr + kv_head * strides.count_group, mask=exists, other=0)
        count = tl.maximum(tl.minimum(count, listed), 0)
    list_ptr = pointers.key_indices + row * sizes.stride_index_token
    return named("b exists row position key_len k_first count list_ptr")(
        tl.minimum(b, sizes.batch - 1), exists, row, position, key_len, k_first, count,
        list_ptr + kv_head * strides.index_group,
    )  # fmt: skip


@triton.jit
def find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The page, and the slot within it, of BLOCK_N keys of a token's list from key n0 on, and
    whether the token sees them. Packed keys are one long page.
    """
    unit = find_units(n0, token, strides, OPTIONS)
    return place_keys(n0, unit, token, pointers, sizes, scalars, OPTIONS)


@triton.jit
def _numbers_of_tile(n0, OPTIONS: tl.constexpr):
    """n0 and the BLOCK_N - 1 numbers behind it, each COPIES times: (BLOCK_N, COPIES).

    Numbers that are as many as a program's threads are found by one thread each. Of fewer, each
    thread would find those of all rows that it copies, together with all lanes of its warp.
    """
    COPIES: tl.constexpr = OPTIONS.COPIES
    n = n0 + tl.arange(0, OPTIONS.BLOCK_N)
    if COPIES > 1:
        n = n[:, None] + tl.zeros([1, COPIES], tl.int32)
    return n


@triton.jit
def find_units(n0, token, strides, OPTIONS: tl.constexpr):
    """The units of BLOCK_N keys of a token's list from key n0 on; one number if they are in one."""
    entry = _numbers_of_tile(n0, OPTIONS) // OPTIONS.SELECT_SIZE
    if OPTIONS.SELECT_SIZE % OPTIONS.BLOCK_N == 0:
        entry = n0 // OPTIONS.SELECT_SIZE
    return tl.load(
        token.list_ptr + entry.to(tl.int64) * strides.index_entry,
        mask=entry < token.count,
        other=-1,
    )


@triton.jit
def seen_range(token, scalars, KEY: tl.constexpr, OPTIONS: tl.constexpr):
    """The first key that a token may see, and one past the last one; of type KEY."""
    first_key = tl.zeros([], tl.int64)
    stop_key = tl.maximum(token.key_len, 0)
    if OPTIONS.HAS_LEFT:
        first_key = tl.maximum(token.position - scalars.left, 0)
    if OPTIONS.HAS_RIGHT:
        stop_key = tl.maximum(tl.minimum(stop_key, token.position + scalars.right + 1), 0)
    if KEY.primitive_bitwidth == 32:
        first_key, stop_key = tl.minimum(first_key, MOST_KEYS), tl.minimum(stop_key, MOST_KEYS)
    return first_key.to(KEY), stop_key.to(KEY)


@triton.jit
def place_keys(n0, unit, token, pointers, sizes, scalars, OPTIONS: tl.constexpr):
    """As `find_keys`, of known units."""
    SELECT_SIZE: tl.constexpr = OPTIONS.SELECT_SIZE
    PAGE_SIZE: tl.constexpr = OPTIONS.PAGE_SIZE
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    # a tile is in one unit, and in one page
    IN_UNIT: tl.constexpr = SELECT_SIZE % BLOCK_N == 0
    IN_PAGE: tl.constexpr = IN_UNIT and PAGE_SIZE > 0 and PAGE_SIZE % BLOCK_N == 0
    # of a sequence, keys are numbered with 32 bits; of a cache, units are
    KEY: tl.constexpr = tl.int64 if OPTIONS.IS_SLOTS and SELECT_SIZE > 1 else tl.int32
    first_key, stop_key = seen_range(token, scalars, KEY, OPTIONS)
    # units that are not in this range may have keys that KEY does not hold
    is_seen = (unit >= 0) & (unit <= (stop_key - 1) // SELECT_SIZE)
    n = _numbers_of_tile(n0, OPTIONS)
    if IN_UNIT:
        first = unit.to(KEY) * SELECT_SIZE + n0 % SELECT_SIZE
        key = first + tl.arange(0, BLOCK_N)
    else:
        # Triton 3.6 takes the sum of [4 a, 4 b, ...] and [0, 1, 2, ...] for multiples of 4, and
        # would load four elements at once of rows that start anywhere: it is told that they are not
        key = unit.to(KEY) * SELECT_SIZE + n % SELECT_SIZE
        key = tl.multiple_of(key, [1, 1]) if OPTIONS.COPIES > 1 else tl.multiple_of(key, 1)
    is_unit = is_seen
    is_seen = is_seen & (key < stop_key)
    if OPTIONS.HAS_LEFT:
        is_seen = is_seen & (key >= first_key)
    if PAGE_SIZE == 0:
        page = 0 * n
        slot = token.k_first + key
        is_seen = is_seen & (slot >= 0) & (slot < sizes.num_rows)
    else:
        page = (key // PAGE_SIZE).to(tl.int32)
        slot = (key % PAGE_SIZE).to(tl.int32)
        if IN_PAGE:
            page = (first // PAGE_SIZE).to(tl.int32)
            slot = (first % PAGE_SIZE).to(tl.int32) + tl.arange(0, BLOCK_N)
        if not OPTIONS.IS_SLOTS:
            is_seen = is_seen & (page < sizes.max_pages)
            is_read = is_seen
            if IN_PAGE:
                is_read = is_unit & (first < token.key_len) & (page < sizes.max_pages)
            table_ptr = pointers.block_table + tl.cast(token.b, tl.int64) * sizes.stride_table
            page = tl.load(table_ptr + page, mask=is_read, other=0).to(tl.uint32)
            # an invalid page id is replaced by the last page: no other memory is read
            page = tl.minimum(page, tl.cast(sizes.num_rows - 1, tl.uint32)).to(tl.int32)
    if OPTIONS.COPIES > 1:
        # one number, because each exchange between threads waits for all of them
        place = (page.to(tl.int64) << 32) | slot.to(tl.int64)
        place = tl.max(tl.where(is_seen, place, -1), 1)
        is_seen = place >= 0
        page, slot = (place >> 32).to(tl.int32), place.to(tl.int32)
    return page, slot, is_seen


@triton.jit
def range_of_split(split, token, sizes, OPTIONS: tl.constexpr):
    """The keys (first, last + 1) of a token's list that a split has; all, unless IS_SPLIT."""
    keys = token.count * OPTIONS.SELECT_SIZE
    begin = tl.zeros([], tl.int32)
    stop = keys
    if OPTIONS.IS_SPLIT:
        tiles = (keys + OPTIONS.BLOCK_N - 1) // OPTIONS.BLOCK_N
        of_split = (tiles + sizes.splits - 1) // sizes.splits * OPTIONS.BLOCK_N
        begin = split * of_split
        stop = tl.minimum(keys, begin + of_split)
    return begin, stop


@triton.jit
def score_descales(token, kv_head, pointers, strides):
    """By what queries of a token's sequence and a KV head are multiplied, and their products with
    keys; 1 where nothing is given."""
    q_scale = 1.0
    if pointers.q_descale is not None:
        at = token.b * strides.q_descale_batch + kv_head * strides.q_descale_head
        q_scale = tl.load(pointers.q_descale + at)
    k_scale = q_scale
    if pointers.k_descale is not None:
        at = token.b * strides.k_descale_batch + kv_head * strides.k_descale_head
        k_scale = q_scale * tl.load(pointers.k_descale + at)
    return q_scale, k_scale


@triton.jit
def load_queries(token, kv_head, head_tile, pointers, strides, OPTIONS: tl.constexpr):
    """BLOCK_M heads of a KV head's group, and the token's factors of scores."""
    r = head_tile * OPTIONS.BLOCK_M + tl.arange(0, OPTIONS.BLOCK_M)
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    exists = (r < OPTIONS.GROUP_SIZE) & token.exists
    head = kv_head * OPTIONS.GROUP_SIZE + tl.minimum(r, OPTIONS.GROUP_SIZE - 1)
    offsets = token.row * strides.q_token + head.to(tl.int64) * strides.q_head
    q = load_chunks(
        pointers.q, offsets, exists, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
        Q_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    latent = (0.0, 0.0)
    if pointers.q_latent is not None:
        offsets = token.row * strides.latent_token + head.to(tl.int64) * strides.latent_head
        latent = load_chunks(
            pointers.q_latent, offsets, exists, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V,
            True, Q_FORMAT, type_of(OPTIONS.DTYPE),
        )  # fmt: skip
    q_scale, k_scale = score_descales(token, kv_head, pointers, strides)
    v_scale = 1.0
    if pointers.v_descale is not None and OPTIONS.SCALED_COLUMNS == 0:
        at = token.b * strides.v_descale_batch + kv_head * strides.v_descale_head
        v_scale = tl.load(pointers.v_descale + at)
    return named("low high latent head exists k_scale v_scale latent_scale")(
        q[0], q[1], latent, head, exists, k_scale, v_scale, q_scale * v_scale
    )


@triton.jit
def find_split(pointers, strides, sizes, OPTIONS: tl.constexpr):
    """The split, KV head and tile of heads of a program, its token, and the token's queries."""
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + OPTIONS.BLOCK_M - 1) // OPTIONS.BLOCK_M
    program = tl.program_id(0)
    split = program % sizes.splits
    kv_head, head_tile = tl.program_id(1) // HEAD_TILES, tl.program_id(1) % HEAD_TILES
    token = find_token(program // sizes.splits, kv_head, pointers, strides, sizes, OPTIONS)
    queries = load_queries(token, kv_head, head_tile, pointers, strides, OPTIONS)
    return split, kv_head, head_tile, token, queries


@triton.jit
def row_offsets(page, slot, page_stride, slot_stride):
    """Where rows of keys begin, in 64 bits."""
    return page.to(tl.int64) * page_stride + slot.to(tl.int64) * slot_stride


@triton.jit
def load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS: tl.constexpr):
    """Rows of keys and values, in two chunks each; 0 where the token does not see the key."""
    K_FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    V_FORMAT: tl.constexpr = OPTIONS.V_FORMAT
    offsets = row_offsets(page, slot, strides.k_page, strides.k_slot) + kv_head * strides.k_head
    k = load_chunks(
        pointers.k, offsets, is_seen, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
        K_FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    if OPTIONS.IS_V_IN_K:
        v = (k[0], 0.0)
    else:
        offsets = row_offsets(page, slot, strides.v_page, strides.v_slot) + kv_head * strides.v_head
        v = load_chunks(
            pointers.v, offsets, is_seen, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, True,
            V_FORMAT, type_of(OPTIONS.DTYPE),
        )  # fmt: skip
    return k, v


@triton.jit
def list_logits(queries, k, v, pointers, scalars, OPTIONS: tl.constexpr):
    """Logits (BLOCK_M, BLOCK_N) without the mask."""
    s = chunk_scores((queries.low, queries.high), k, OPTIONS.K_HIGH, OPTIONS.CHAIN)
    s = s * (scalars.scale * queries.k_scale)
    if pointers.q_latent is not None:
        more = chunk_scores(queries.latent, v, OPTIONS.V_HIGH, OPTIONS.CHAIN)
        s += more * (scalars.scale * queries.latent_scale)
    if OPTIONS.HAS_SOFTCAP:
        s = softcapped(s, scalars.softcap, OPTIONS.IS_PRECISE, type_of(OPTIONS.DTYPE))
    return s
