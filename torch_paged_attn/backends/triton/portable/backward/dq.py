"""dQ, and dbias of a bias with all heads: a program has a tile of queries and loops over keys.

The tile belongs to one head. The program visits the keys that the tile sees, in the order of the
forward, and adds up dX K. It writes dS of each tile directly as dbias, because each pair of a query
and a key is visited exactly once.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.backward_preprocess import (
    load_statistics,
    statistics_of,
)
from torch_paged_attn.backends.triton.common.dequant import encode
from torch_paged_attn.backends.triton.common.seqlen_info import find_tile
from torch_paged_attn.backends.triton.portable.backward.gradients import (
    dropped,
    gradient_of_scores,
    probabilities,
    survivors,
)
from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    find_pages,
    load_chunks,
    store_chunks,
    zero_chunks,
    zero_chunks_unless,
)
from torch_paged_attn.backends.triton.portable.common.groups import Sizes
from torch_paged_attn.backends.triton.portable.common.key_positions import key_position
from torch_paged_attn.backends.triton.portable.common.logits import load_bias, logits, scaled
from torch_paged_attn.backends.triton.portable.common.mask import (
    load_tail,
    tiles_of_phase,
    visible,
    whole_tiles,
)
from torch_paged_attn.backends.triton.portable.common.named import named, type_of
from torch_paged_attn.backends.triton.portable.common.products import (
    add_chunk_products,
    chunk_scores,
)
from torch_paged_attn.backends.triton.portable.forward.key_loop import tile_of_keys
from torch_paged_attn.backends.triton.portable.forward.queries import load_queries
from torch_paged_attn.backends.triton.portable.forward.query_tile import find_keys, rows_of, tile_at
from torch_paged_attn.backends.triton.portable.forward.work_info import sequence_at
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait


@triton.jit
def load_query_tile(tile, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """Load a tile of queries: its rows, the queries, and dout, lse and D of each row."""
    FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    rows = rows_of(tile, sizes, OPTIONS)
    is_query = rows.exists & (tile.b < sizes.batch)
    queries = load_queries(rows, pointers, strides, sizes, scalars, OPTIONS)
    # all rows of the tile have one head
    head = tl.cast(rows.first_head, tl.int64)
    offsets = rows.row * strides.dout_token + head * strides.dout_head
    dout = load_chunks(
        pointers.dout, offsets, is_query, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V,
        True, FORMAT, type_of(OPTIONS.DTYPE),
    )  # fmt: skip
    statistics = statistics_of(pointers.statistics, head, tile.q_start // 64 + tile.b, sizes)
    lse, delta = load_statistics(statistics, rows.token, is_query)
    return rows, queries, named("dout lse delta")(dout=dout, lse=lse, delta=delta)


@triton.jit
def key_tile_gradients(
    span, tile, keys, memory, pointers, strides, scalars, OPTIONS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """dS and dX, (queries, keys), of a tile of queries and a tile of keys; and the keys.

    span: (the tile's first key, the end of the keys that count)
    tile: what `load_query_tile` returns
    """
    n0, stop = span
    rows, queries, statistics = tile
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    j = n0 + tl.arange(0, BLOCK_N)
    position, keys_of_tile = rows.position[:, None], j[None, :]
    # instead of keys outside the range, the nearest one inside is loaded
    _, slot = find_pages(None, n0, keys.start, stop, 0, BLOCK_N, 0, not IS_MASKED)
    k = load_chunks(
        memory.k, slot * strides.k_slot, None, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM,
        False, FORMAT, DTYPE,
    )  # fmt: skip
    s = chunk_scores((queries.low, queries.high), k, OPTIONS.K_HIGH, OPTIONS.CHAIN)
    key_at = key_position(keys_of_tile, scalars, OPTIONS)
    seen = rows.exists[:, None]
    if IS_MASKED:
        in_range = (j >= keys.start) & (j < stop)
        seen = seen & visible(
            position, key_at, in_range[None, :], scalars.left, scalars.right,
            OPTIONS.HAS_LEFT, OPTIONS.HAS_RIGHT,
        )  # fmt: skip
    if pointers.tail_mask is not None:
        seen = seen & load_tail(
            memory.tail_rows[:, None], rows.exists[:, None], keys_of_tile, keys, strides
        )
    bias = 0.0
    if OPTIONS.BIAS != "":
        bias, allowed = load_bias(
            memory.bias_rows[:, None], rows.exists[:, None], keys_of_tile, strides, OPTIONS, False
        )
        seen = seen & allowed
    s = scaled(s, queries.scale, 0.0, OPTIONS)
    s, capped = logits(s, bias, queries.slope, position, key_at, pointers, scalars, OPTIONS)
    p = probabilities(s, statistics.lse[:, None], seen, scalars.factor, OPTIONS, IS_MASKED)
    survives = survivors(rows.b, rows.first_head, rows.token, n0, pointers, scalars, OPTIONS, False)
    v = load_chunks(
        memory.v, slot * strides.v_slot, None, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V,
        False, FORMAT, DTYPE,
    )  # fmt: skip
    dp = chunk_scores(statistics.dout, v, OPTIONS.V_HIGH, OPTIONS.CHAIN)
    dp = dropped(dp, survives, pointers, scalars)
    ds, dx = gradient_of_scores(
        p, dp, statistics.delta[:, None], seen, capped, scalars.softcap, OPTIONS, IS_MASKED
    )
    if OPTIONS.BIAS != "" or pointers.tail_mask is not None:
        # a mask may hide a key in the middle from all queries, which may then contain NaN
        k = zero_chunks_unless(tl.max(seen.to(tl.int32), 0) > 0, k, OPTIONS.K_HIGH)
    return ds, dx, k


@triton.jit
def key_memory(tile, rows, keys, pointers, strides, OPTIONS: tl.constexpr):
    """Pointers to a tile's keys, values, list of blocks, and rows of bias and tail mask."""
    kv_head, k_start = tl.cast(rows.kv_head, tl.int64), tl.cast(tile.k_start, tl.int64)
    # Triton functions cannot return None, so 0 stands for a missing pointer
    col_ptr = 0
    bias_rows = 0
    tail_rows = 0
    if OPTIONS.HAS_LAYOUT:
        col_ptr = pointers.col + keys.col_start
    if OPTIONS.BIAS != "":
        head = rows.head.to(tl.int64)
        bias_rows = pointers.bias + (rows.row * strides.bias_token + head * strides.bias_head)
    if pointers.tail_mask is not None:
        tail_rows = pointers.tail_mask + rows.row * strides.tail_token
    return named("col k v bias_rows tail_rows")(
        col=col_ptr,
        k=pointers.k + (k_start * strides.k_slot + kv_head * strides.k_head),
        v=pointers.v + (k_start * strides.v_slot + kv_head * strides.v_head),
        bias_rows=bias_rows,
        tail_rows=tail_rows,
    )


@triton.jit
def store_dbias(ds, j, rows, head, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """Write a tile of dS to a head of dbias, as far as the bias has columns for the keys j."""
    row_ptr = pointers.dbias + (head * sizes.total_q + rows.row) * strides.bias_width
    there = rows.exists[:, None] & (j < strides.bias_width)[None, :]
    FORMAT: tl.constexpr = OPTIONS.DBIAS_FORMAT
    stored = encode(ds, pointers.dbias.dtype.element_ty, FORMAT)
    tl.store(row_ptr[:, None] + j.to(tl.int64)[None, :], stored, mask=there)


@triton.jit
def _dq_of_tile(tile, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    FIRST_PHASE: tl.constexpr = OPTIONS.FIRST_PHASE
    FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    HAS_DBIAS: tl.constexpr = pointers.dbias is not None
    rows, queries, statistics = load_query_tile(tile, pointers, strides, sizes, scalars, OPTIONS)
    head = tl.cast(rows.first_head, tl.int64)
    keys = find_keys(tile, None, rows, pointers, strides, sizes, scalars, OPTIONS)
    memory = key_memory(tile, rows, keys, pointers, strides, OPTIONS)
    dq = zero_chunks(BLOCK_M, OPTIONS.K_LOW, OPTIONS.K_HIGH)
    i_start, i_stop = keys.i_start, keys.i_stop
    if HAS_DBIAS and not OPTIONS.HAS_LAYOUT:
        zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i in tl.range(0, tl.cdiv(strides.bias_width, BLOCK_N)):
            if (i < i_start) | (i >= i_stop):
                j = i * BLOCK_N + tl.arange(0, BLOCK_N)
                store_dbias(zeros, j, rows, head, pointers, strides, sizes, OPTIONS)

    # phases as in the forward: 0 at a window's left edge, 1 tiles that every row sees, 2 the rest
    i_full, i_tail = whole_tiles(
        i_start, i_stop, keys.full_start, keys.full_stop, BLOCK_N, FIRST_PHASE
    )
    for phase in tl.static_range(FIRST_PHASE, 3):
        i_first, i_last = tiles_of_phase(phase, i_start, i_full, i_tail, i_stop)
        for i in tl.range(i_first, i_last):
            n0, stop = tile_of_keys(i, keys, memory, strides, scalars, OPTIONS)
            ds, dx, k = key_tile_gradients(
                (n0, stop), (rows, queries, statistics), keys, memory, pointers, strides, scalars,
                OPTIONS, phase != 1,
            )  # fmt: skip
            if HAS_DBIAS:
                j = n0 + tl.arange(0, BLOCK_N)
                store_dbias(ds, j, rows, head, pointers, strides, sizes, OPTIONS)
            dq = add_chunk_products(
                dq, dx.to(type_of(OPTIONS.DTYPE)), k, OPTIONS.K_HIGH, OPTIONS.IS_PRECISE
            )

    # a row that sees no key has gradient 0, whatever it contains
    has_seen = (statistics.lse < float("inf"))[:, None]
    low = tl.where(has_seen, dq[0] * scalars.scale, 0.0)
    high = tl.where(has_seen, dq[1] * scalars.scale, 0.0)
    dq_rows = pointers.dq + (rows.row * scalars.num_heads + head) * OPTIONS.HEAD_DIM
    store_chunks(
        dq_rows, (low, high), rows.exists, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, FORMAT,
    )  # fmt: skip


@triton.jit
def query_tile_of_program(number, head, pointers, sizes, OPTIONS: tl.constexpr):
    """Tile `number` of the batch, of one head."""
    b, place = find_tile(number, pointers.cu_seqlens_q, sizes.batch, OPTIONS.TOKENS, OPTIONS.GAP)
    return tile_at(place, head, sequence_at(b, pointers, sizes, OPTIONS), OPTIONS)


@triton.jit(do_not_specialize=Sizes._fields)
def _attention_dq_kernel(
    pointers, strides,
    stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head, total_q,
    max_keys, num_pages, batch, layout_rows, nnz,
    scalars,
    OPTIONS: tl.constexpr, IS_BESIDE: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    # with IS_BESIDE, programs start while the last ones of the kernel of dK and dV run, which has
    # waited for the statistics; the wait at the end makes the next kernel wait for both
    if not IS_BESIDE:
        gdc_wait(IS_DEPENDENT)
    sizes = Sizes(
        stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head,
        total_q, max_keys, num_pages, batch, layout_rows, nnz,
    )  # fmt: skip
    # the last tiles of a causal sequence see the most keys: they start first
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    tile = query_tile_of_program(number, tl.program_id(1), pointers, sizes, OPTIONS)
    if tile.first_token < tile.query_len:
        _dq_of_tile(tile, pointers, strides, sizes, scalars, OPTIONS)
    if IS_BESIDE:
        gdc_wait(IS_DEPENDENT)
