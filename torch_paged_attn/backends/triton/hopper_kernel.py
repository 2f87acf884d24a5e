"""Attention forward for Hopper, warp-specialised, in Gluon.

One program stays on each multiprocessor. Its producer draws tiles of queries, longest first
(`tile_order.py`), and has the tensor memory accelerator fetch queries, keys and values into rings
in shared memory; two or three consumers, 64 rows each, multiply and write the result from shared
memory. While one tile of queries ends, the next ones are on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper_consumer import consume
from torch_paged_attn.backends.triton.hopper_producer import WORDS, produce
from torch_paged_attn.backends.triton.ring import new_ring

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
    dtype: gl.constexpr = q_desc.dtype
    swizzled: gl.constexpr = q_desc.layout
    q_shape: gl.constexpr = [Q_STAGES * CONSUMERS, 1, 1, BLOCK_M // PACK, PACK, WIDTH]
    k_shape: gl.constexpr = [STAGES, 1, 1, BLOCK_N, 1, WIDTH]
    v_shape: gl.constexpr = [STAGES, 1, 1, BLOCK_N, 1, WIDTH_V]
    queries = new_ring(dtype, q_shape, swizzled, Q_STAGES, CONSUMERS)
    keys = new_ring(dtype, k_shape, swizzled, STAGES, CONSUMERS)
    values = new_ring(dtype, v_shape, swizzled, STAGES, CONSUMERS)
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.int32, [Q_STAGES * WORDS, 1], word)
    fence_async_shared()
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (produce, (q_desc, k_desc, v_desc, queries, keys, values, notes, order_ptr,
                           table_ptr, entries_ptr, spans_ptr, stride_table, k_page_rows,
                           v_page_rows, num_pages, num_heads, left, right, wave, layout_heads,
                           groups, BLOCK_M, BLOCK_N, CONSUMERS, PACK, GROUP_SIZE, PAGE_SIZE,
                           HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, LAYOUT_GROUP)),
                (consume, (0, out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS)),
                (consume, (1, out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS)),
            ],
            [4, 4],
            [REGISTERS, REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (produce, (q_desc, k_desc, v_desc, queries, keys, values, notes, order_ptr,
                           table_ptr, entries_ptr, spans_ptr, stride_table, k_page_rows,
                           v_page_rows, num_pages, num_heads, left, right, wave, layout_heads,
                           groups, BLOCK_M, BLOCK_N, CONSUMERS, PACK, GROUP_SIZE, PAGE_SIZE,
                           HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK, POSITIONS, LAYOUT_GROUP)),
                (consume, (0, out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS)),
                (consume, (1, out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS)),
                (consume, (2, out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys,
                           values, notes, stride_alibi_batch, stride_alibi_head, batch, total_q,
                           left, right, factor, squash, alibi_unit, BLOCK_M, BLOCK_N, WIDTH,
                           WIDTH_V, CONSUMERS, PACK, IS_CAUSAL, HAS_LEFT, HAS_RIGHT, KEYS, Q_BLOCK,
                           POSITIONS, HAS_SOFTCAP, TAKE_TURNS)),
            ],
            [4, 4, 4],
            [REGISTERS, REGISTERS, REGISTERS],
        )  # fmt: skip
