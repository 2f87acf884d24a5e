"""The end of a consumer's tile: its rows' logsumexp, and the result by way of shared memory."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.common.softmax import LN2, with_sink
from torch_paged_attn.backends.triton.hopper.common.tma import store_rows

# what Triton 3.6 has as a private method
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def seen_as(smem, shape: gl.constexpr, layout: gl.constexpr, DTYPE: gl.constexpr = None):
    """The same shared memory in another shape, and of another type."""
    dtype: gl.constexpr = smem.dtype if DTYPE is None else DTYPE
    if HAS_REINTERPRET:
        return smem.reinterpret(dtype, shape, layout)
    else:
        return smem._reinterpret(dtype, shape, layout)


@gluon.jit
def of_heads(mask, r, OPTIONS: gl.constexpr):
    """A mask of a tile's rows, false in those that hold no head: BLOCK_M may be no multiple of the
    heads that share a tile."""
    ROWS: gl.constexpr = OPTIONS.TOKENS * OPTIONS.PACKED_HEADS
    if ROWS < OPTIONS.BLOCK_M:
        mask = mask & (r < ROWS)
    return mask


@gluon.jit
def store_lse(m_i, total, at, rows, params, OPTIONS: gl.constexpr):
    """Write rows' logsumexp; returns the factor of their sums of values. `at` are the rows' numbers
    and tokens, whether they exist, and whether a sequence has them: others have no sink."""
    r, token, exists, is_sequence = at
    pointers = params.pointers
    gain = 1.0
    m_i *= LN2
    if pointers.sinks is not None:
        sink_ptr = pointers.sinks + rows.head + r % OPTIONS.PACKED_HEADS
        sink = gl.load(sink_ptr, mask=is_sequence, other=-float("inf"))
        m_i, total, gain = with_sink(m_i, total, sink)
    lse = m_i + gl.log2(total) * LN2
    head = (rows.head + r % OPTIONS.PACKED_HEADS).to(gl.int64)
    row = pointers.lse + head * params.sizes.total_q + rows.q_start + token
    gl.store(row, lse, mask=exists)
    return gl.where(total > 0.0, gain / total, 0.0) * rows.v_descale


@gluon.jit
def place_of_result(box, out_desc):
    """Where a result goes on its way out, (rows, width): most often where the queries lay."""
    box_shape: gl.constexpr = out_desc.block_shape
    box_layout: gl.constexpr = out_desc.layout
    if box_shape[-1] < box.shape[-1]:
        box = seen_as(box, box_shape, box_layout)
    return box.reshape([box_shape[2] * box_shape[3], box_shape[4]])


@gluon.jit
def store_result(out, rows, stop_token, params, OPTIONS: gl.constexpr):
    """Write the result of a tile, which lies in shared memory, before `stop_token`."""
    out_desc = params.out_desc
    box_shape: gl.constexpr = out_desc.block_shape
    box_layout: gl.constexpr = out_desc.layout
    if box_shape[-1] < out.shape[-1]:
        out = seen_as(out, box_shape, box_layout)
    fence_async_shared()
    store_rows(out_desc, rows.q_start, stop_token, rows.first_token, rows.head, out)


@gluon.jit
def store_float32(acc, rows, stop_token, params, OPTIONS: gl.constexpr):
    """Write a float32 result from registers: it is twice as wide as the queries."""
    COLUMNS: gl.constexpr = OPTIONS.FLOAT32_COLUMNS
    layout: gl.constexpr = acc.type.layout
    r = gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)
    token = rows.first_token + r // OPTIONS.PACKED_HEADS
    head = rows.head + r % OPTIONS.PACKED_HEADS
    start = ((rows.q_start + token).to(gl.int64) * params.scalars.num_heads + head) * COLUMNS
    exists = gl.expand_dims(of_heads(token < stop_token, r, OPTIONS), 1)
    if acc.shape[1] > COLUMNS:
        exists = exists & (column < COLUMNS)
    gl.store(params.pointers.out + gl.expand_dims(start, 1) + column, acc, mask=exists)
