"""Attention to float8 queries, keys and values: what is different from 16 bits.

Scores are float8 products, at twice the rate; Hopper adds these up in 14 bits, which is close enough
for the terms of a score and not for those of a context. So probabilities are float16, and so are
the values, of which each is exactly one: four warps convert a tile of values from one place in
shared memory to another, once for all consumers. Queries wait in registers, as the operand of
products: that spares shared memory's bandwidth, which would be used up.

Descales of queries and keys are part of the factor of scores, which is one number for a tile; that
of the values is multiplied into the result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.work_info import thread_barrier

# scores times this are 0; what is hidden, minus infinity, times this is not
LEAST_FACTOR = gl.constexpr(2.0**-110)

# numbers of a query that are held in registers
MOST_HELD = gl.constexpr(128)


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
    """What scores, and what values, of a query head of sequence b are multiplied by."""
    pointers, scalars = params.pointers, params.scalars
    kv_head = head // OPTIONS.GROUP_SIZE
    is_sequence = b < params.sizes.batch
    of_q = _of_head(
        pointers.q_descale, b, kv_head, scalars.q_descale_batch, scalars.q_descale_head, is_sequence
    )
    of_k = _of_head(
        pointers.k_descale, b, kv_head, scalars.k_descale_batch, scalars.k_descale_head, is_sequence
    )
    of_v = _of_head(
        pointers.v_descale, b, kv_head, scalars.v_descale_batch, scalars.v_descale_head, is_sequence
    )
    return of_q * of_k, of_v


@gluon.constexpr_function
def columns_at_once(width, is_float8):
    """Columns of values that one instruction multiplies: with four warpgroups, the assembler has no
    registers for 256."""
    return min(width, 128) if is_float8 else width


@gluon.jit
def _turned(q):
    """-q."""
    bits = gl.inline_asm_elementwise(
        "xor.b32 $0, $1, 0x80808080;", "=r,r", [q.to(gl.int8, bitcast=True)], gl.int8, True, 4
    )
    return bits.to(q.dtype, bitcast=True)


@gluon.jit
def take_queries(box, is_negative, layout: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Queries as the operand of products, in registers where there is room. Scores are multiplied
    by a number that is not negative: the queries take its sign."""
    smem = box.reshape([ROWS, WIDTH])
    if is_negative:
        smem.store(_turned(smem.load(layout)))
        fence_async_shared()
        thread_barrier()
    if WIDTH <= MOST_HELD:
        return smem.load(layout)
    else:
        return smem
