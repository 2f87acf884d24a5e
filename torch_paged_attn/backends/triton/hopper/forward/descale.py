"""Descales of 8-bit queries, keys and values.

Those of queries and keys are part of the factor of scores, which is one number for a tile; that of
values is multiplied into the result. Scales by token are in `token_scales.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.common.work_info import thread_barrier

# scores times this are 0; what is hidden, minus infinity, times this is not
LEAST_FACTOR = gl.constexpr(2.0**-110)


@gluon.constexpr_function
def columns_at_once(width, converts):
    """Columns of values that one instruction multiplies: with four warpgroups, the assembler has no
    registers for 256."""
    return min(width, 128) if converts else width


@gluon.jit
def _of_head(descale, b, head, stride_batch, stride_head, is_sequence):
    """A descale of a KV head; 1 where none was given."""
    if descale is None:
        return 1.0
    else:
        at = descale + b * stride_batch + head * stride_head
        return gl.load(at, mask=is_sequence, other=1.0)


@gluon.jit
def descales_of(b, head, params, OPTIONS: gl.constexpr):
    """Of a query head of sequence b: whether the factor of scores is negative, its size, and the
    factor of values."""
    pointers, scalars = params.pointers, params.scalars
    kv_head = head // OPTIONS.GROUP_SIZE
    is_sequence = b < params.sizes.batch
    k_descale, v_descale = pointers.k_descale, pointers.v_descale
    if OPTIONS.BY_TOKEN:
        k_descale, v_descale = None, None
    of_q = _of_head(
        pointers.q_descale, b, kv_head, scalars.q_descale_batch, scalars.q_descale_head, is_sequence
    )
    of_k = _of_head(
        k_descale, b, kv_head, scalars.k_descale_batch, scalars.k_descale_head, is_sequence
    )
    of_v = _of_head(
        v_descale, b, kv_head, scalars.v_descale_batch, scalars.v_descale_head, is_sequence
    )
    of_scores = of_q * of_k * gl.full([], 1.0, gl.float32)
    return of_scores < 0, gl.abs(of_scores), of_v


@gluon.jit
def factor_of_scores(scale_log2, descale):
    """`scale_log2` times the size of a descale; its sign is the queries'."""
    factor = scale_log2 * descale
    return gl.where(factor < LEAST_FACTOR, LEAST_FACTOR, factor)


@gluon.jit
def _turned(q):
    """Queries with the other sign."""
    if q.dtype == gl.float8e4nv:
        bits = gl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [q.to(gl.int8, bitcast=True)], gl.int8, True, 4
        )
        return bits.to(q.dtype, bitcast=True)
    else:
        return -q


@gluon.jit
def take_queries(box, is_turned, layout: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Queries, which `is_turned` makes negative, as the operand of products."""
    smem = box.reshape([ROWS, WIDTH])
    if is_turned:
        smem.store(_turned(smem.load(layout)))
        fence_async_shared()
        thread_barrier()
    return smem
