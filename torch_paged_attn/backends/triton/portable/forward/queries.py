"""The queries of a tile, in the chunks in which its keys are decoded, and the factors of scores."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import float16_range
from torch_paged_attn.backends.triton.portable.common.column_scales import load_groups
from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_rows
from torch_paged_attn.backends.triton.portable.common.named import named, type_of


@triton.jit
def load_queries(rows, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """A tile of queries in two chunks, or in four if keys are; as columns (BLOCK_M, 1): `scale`, by
    which products of a row are multiplied, `raised`, which is subtracted from them, and the ALiBi
    slope; and the same of q_latent.
    """
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    LOW: tl.constexpr = OPTIONS.K_LOW
    HIGH: tl.constexpr = OPTIONS.K_HIGH
    STEP: tl.constexpr = OPTIONS.K_STEP
    FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    LOADED: tl.constexpr = tl.float32 if OPTIONS.IS_Q_NORMED else DTYPE
    b, exists = rows.b, rows.exists
    offsets = rows.row * strides.q_token + rows.head.to(tl.int64) * strides.q_head
    q_ptr = pointers.q
    low, high = _load_two(q_ptr, offsets, exists, LOW, HIGH, STEP, HEAD_DIM, FORMAT, LOADED)
    third, fourth = low, low  # unused unless there are four chunks
    if STEP == 4:
        third = load_rows(q_ptr, offsets, exists, 2, LOW, HEAD_DIM, True, FORMAT, LOADED, STEP)
        fourth = load_rows(q_ptr, offsets, exists, 3, LOW, HEAD_DIM, True, FORMAT, LOADED, STEP)
    scale = tl.full([OPTIONS.BLOCK_M], 1.0, tl.float32) * scalars.scale
    if OPTIONS.IS_Q_NORMED:
        largest = tl.max(tl.abs(low), 1)
        if HIGH > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(high), 1))
        if STEP == 4:
            largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(third), tl.abs(fourth)), 1))
        enlarge, reduce = float16_range(largest)
        enlarge = enlarge[:, None]
        low, high = (low * enlarge).to(DTYPE), (high * enlarge).to(DTYPE)
        if STEP == 4:
            third, fourth = (third * enlarge).to(DTYPE), (fourth * enlarge).to(DTYPE)
        scale = scale * reduce
    if not OPTIONS.RAW_SCORES:
        scale = _descaled(
            scale, pointers.q_descale, strides.q_descale_batch, strides.q_descale_head,
            rows, sizes.batch,
        )  # fmt: skip
        if not OPTIONS.K_BY_TOKEN:
            scale = _descaled(
                scale, pointers.k_descale, strides.k_descale_batch, strides.k_descale_head,
                rows, sizes.batch,
            )  # fmt: skip
    latent, latent_scale = (0.0, 0.0), 0.0
    if pointers.q_latent is not None:
        offsets = rows.row * strides.latent_token + rows.head.to(tl.int64) * strides.latent_head
        if OPTIONS.SCALED_COLUMNS > 0:
            latent = load_groups(pointers.q_latent, offsets, exists, True, FORMAT, OPTIONS)
        else:
            latent = _load_two(
                pointers.q_latent, offsets, exists, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.V_STEP,
                OPTIONS.HEAD_DIM_V, FORMAT, DTYPE,
            )  # fmt: skip
        latent_scale = _latent_scale(rows, pointers, strides, sizes, scalars, OPTIONS)
    raised = 0.0
    if OPTIONS.IS_PAIRED and (OPTIONS.K_FORMAT == "INT8" or STEP == 4):
        # keys k are decoded as (k + 128) * 2**-24 or (k + 8) * 2**-20: a score has this added to it
        total = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
        if STEP == 4:
            total += tl.sum(third.to(tl.float32), 1) + tl.sum(fourth.to(tl.float32), 1)
            raised = (scale * (total * 8.0))[:, None]
            scale = scale * 1048576.0
        else:
            raised = (scale * (total * 128.0))[:, None]
            scale = scale * 16777216.0
    slope = 0.0
    if pointers.alibi is not None:
        alibi_ptr = pointers.alibi + b * strides.alibi_batch
        has_slope = exists & (b < sizes.batch)
        slope = tl.load(alibi_ptr + rows.head * strides.alibi_head, mask=has_slope, other=0.0)
        slope = slope[:, None]
    return named("low high third fourth scale raised slope latent latent_scale")(
        low, high, third, fourth, scale[:, None], raised, slope, latent, latent_scale
    )


@triton.jit
def _load_two(
    ptr,
    offsets,
    exists,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STEP: tl.constexpr,
    STOP: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows of queries in the first two chunks of `load_kv.py`. Without a second one, the first
    stands for it.
    """
    low = load_rows(ptr, offsets, exists, 0, LOW, STOP, True, FORMAT, DTYPE, STEP)
    high = low
    if HIGH > 0:
        START: tl.constexpr = 1 if STEP > 1 else LOW
        high = load_rows(ptr, offsets, exists, START, HIGH, STOP, True, FORMAT, DTYPE, STEP)
    return low, high


@triton.jit
def _descaled(scale, descale_ptr, stride_batch, stride_head, rows, batch):
    """`scale` times a descale of the row's sequence and KV head, if it is given."""
    if descale_ptr is not None:
        at = rows.b * stride_batch + rows.kv_head * stride_head
        scale = scale * tl.load(descale_ptr + at, mask=rows.b < batch, other=0.0)
    return scale


@triton.jit
def _latent_scale(rows, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The factor of products q_latent v, which have the values' descale."""
    scale = tl.full([], 1.0, tl.float32) * scalars.scale
    if not OPTIONS.RAW_SCORES:
        scale = _descaled(
            scale, pointers.q_descale, strides.q_descale_batch, strides.q_descale_head,
            rows, sizes.batch,
        )  # fmt: skip
        if not OPTIONS.V_BY_TOKEN:
            scale = _descaled(
                scale, pointers.v_descale, strides.v_descale_batch, strides.v_descale_head,
                rows, sizes.batch,
            )  # fmt: skip
    return scale
