"""Attention forward for Hopper, warp-specialised, in Gluon.

One program stays on each multiprocessor. Its producers, a warp each, draw tiles of queries, longest
first (`tile_scheduler.py`), and have the tensor memory accelerator fetch queries, keys and values
into rings in shared memory; two or three consumers, four warps and 64 rows each, multiply and
write the result from shared memory. While one tile of queries ends, the next ones are on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.consumer import consume
from torch_paged_attn.backends.triton.hopper.pipeline import new_ring
from torch_paged_attn.backends.triton.hopper.producer import WORDS, follow, lead
from torch_paged_attn.backends.triton.hopper.tma import ring_of_boxes, rows_of_box

# sizes that differ from call to call: a kernel is not compiled anew for each of their divisors
VARYING = (
    "stride_table",
    "k_page_rows",
    "v_page_rows",
    "num_pages",
    "stride_alibi_batch",
    "stride_alibi_head",
    "num_heads",
    "batch",
    "total_q",
    "left",
    "right",
    "wave",
    "layout_heads",
    "groups",
)


@gluon.jit(do_not_specialize=VARYING)
def _hopper_attention_fwd_kernel(
    lse_ptr,
    order_ptr,
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    table_ptr,
    entries_ptr,
    spans_ptr,
    alibi_ptr,
    sinks_ptr,
    stride_table,
    k_page_rows,
    v_page_rows,
    num_pages,
    stride_alibi_batch,
    stride_alibi_head,
    num_heads,
    batch,
    total_q,
    left,
    right,
    factor,
    squash,
    alibi_unit,
    wave,
    layout_heads,
    groups,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    WIDTH: gl.constexpr,
    WIDTH_V: gl.constexpr,
    PACK: gl.constexpr,
    GROUP_SIZE: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    KEYS: gl.constexpr,
    Q_BLOCK: gl.constexpr,
    POSITIONS: gl.constexpr,
    LAYOUT_GROUP: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    TAKE_TURNS: gl.constexpr,
):
    # a lane of each warpgroup has 512 between them, dealt out by eights
    GROUPS: gl.constexpr = CONSUMERS + 1
    LEFT: gl.constexpr = 512 // GROUPS // 8 * 8 * GROUPS - CONSUMERS * REGISTERS
    dtype: gl.constexpr = q_desc.dtype
    swizzled: gl.constexpr = q_desc.layout
    q_shape: gl.constexpr = [Q_STAGES * CONSUMERS, 1, 1, BLOCK_M // PACK, PACK, WIDTH]
    k_shape: gl.constexpr = ring_of_boxes(STAGES, k_desc.block_shape, BLOCK_N)
    v_shape: gl.constexpr = ring_of_boxes(STAGES, v_desc.block_shape, BLOCK_N)
    # many boxes to a tile are loaded by two producers
    BOXES: gl.constexpr = BLOCK_N // rows_of_box(k_desc.block_shape)
    PARTS: gl.constexpr = 2 if PAGE_SIZE > 0 and BOXES >= 4 else 1
    queries = new_ring(dtype, q_shape, swizzled, Q_STAGES, CONSUMERS, 1)
    keys = new_ring(dtype, k_shape, swizzled, STAGES, CONSUMERS, PARTS)
    values = new_ring(dtype, v_shape, swizzled, STAGES, CONSUMERS, PARTS)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [Q_STAGES * WORDS, 1], word)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    announced = gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], barrier)
    for i in gl.static_range(Q_STAGES):
        mbarrier.init(announced.index(i), count=1)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS, 0)),
                (consume, (out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS, 1)),
                (lead, (q_desc, k_desc, queries, keys, announced, notes, order_ptr, table_ptr,
                        entries_ptr, spans_ptr, stride_table, k_page_rows, num_pages, num_heads,
                        left, right, wave, layout_heads, groups, BLOCK_M, BLOCK_N, CONSUMERS, PACK,
                        GROUP_SIZE, PAGE_SIZE, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS,
                        LAYOUT_GROUP, PARTS)),
                (follow, (k_desc, queries, keys, announced, notes, table_ptr, entries_ptr,
                          stride_table, k_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 1, PARTS)),
                (follow, (v_desc, queries, values, announced, notes, table_ptr, entries_ptr,
                          stride_table, v_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 0, PARTS)),
                (follow, (v_desc, queries, values, announced, notes, table_ptr, entries_ptr,
                          stride_table, v_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 1, PARTS)),
            ],
            [4, 1, 1, 1, 1],
            [REGISTERS, LEFT, LEFT, LEFT, LEFT],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS, 0)),
                (consume, (out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS, 1)),
                (consume, (out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS, 2)),
                (lead, (q_desc, k_desc, queries, keys, announced, notes, order_ptr, table_ptr,
                        entries_ptr, spans_ptr, stride_table, k_page_rows, num_pages, num_heads,
                        left, right, wave, layout_heads, groups, BLOCK_M, BLOCK_N, CONSUMERS, PACK,
                        GROUP_SIZE, PAGE_SIZE, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS,
                        LAYOUT_GROUP, PARTS)),
                (follow, (k_desc, queries, keys, announced, notes, table_ptr, entries_ptr,
                          stride_table, k_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 1, PARTS)),
                (follow, (v_desc, queries, values, announced, notes, table_ptr, entries_ptr,
                          stride_table, v_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 0, PARTS)),
                (follow, (v_desc, queries, values, announced, notes, table_ptr, entries_ptr,
                          stride_table, v_page_rows, num_pages, BLOCK_N, GROUP_SIZE, PAGE_SIZE,
                          HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, 1, PARTS)),
            ],
            [4, 4, 1, 1, 1, 1],
            [REGISTERS, REGISTERS, LEFT, LEFT, LEFT, LEFT],
        )  # fmt: skip
