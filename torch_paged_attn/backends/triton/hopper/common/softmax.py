"""The running softmax of a consumer's rows, in base two.

FlashAttention-4's rescaling: a row keeps the reference that its exponents are taken against until a
score exceeds it by far, so that its result is rarely multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.softmax import finite_or_zero

# by how much, in base two, a score may exceed its row's reference: probabilities up to 256 are
# rounded like those below 1, and sums are float32
RESCALE_THRESHOLD = gl.constexpr(8.0)


@gluon.jit
def _pin(x):
    """x, computed before what follows.

    The assembler moves a wait for products above everything that does not need their result, and
    nothing would overlap. It does not move it above another barrier that reads x. This one is never
    taken: no maximum has these bits.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.eq.u32 p, $1, 0xFFC12345; mov.b32 $0, $1; @p bar.arrive 15, 128;}",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def row_max(s):
    """Maxima of rows, in two steps, so that a thread has twice as many chains of maxima that do not
    wait for each other."""
    partial = gl.max(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)
    return gl.convert_layout(gl.max(partial, 1), gl.SliceLayout(1, s.type.layout), True)


@gluon.jit
def partial_sum(p):
    """(rows, 4): the part of a row's sum that each thread adds up; the parts are added up after the
    last tile."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def update_softmax(s, m_i, l_i, scale_log2, IS_FUSED: gl.constexpr = True):
    """Fold a tile of scores into the rows' references, which are near their maxima (scaled by
    `scale_log2`), and partial sums. Returns the probabilities, the new references and sums, and the
    factors by which the sums of values of earlier tiles are to be multiplied. Unless IS_FUSED, the
    compiler fuses no product with a sum by itself."""
    m_new = gl.maximum(m_i, row_max(s) * scale_log2)
    m_new = _pin(gl.where(m_new > m_i + RESCALE_THRESHOLD, m_new, m_i))
    shift = finite_or_zero(m_new)
    if IS_FUSED:
        p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
    else:
        p = gl.exp2(gl.fma(s, scale_log2, -gl.expand_dims(shift, 1)))
    shrink = gl.exp2(m_i - shift)
    total = partial_sum(p)
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    l_new = l_i * gl.expand_dims(gl.convert_layout(shrink, rows, True), 1) + total
    return p, m_new, l_new, shrink


@gluon.constexpr_function
def _multiply_unless_one(n):
    """PTX: multiply n registers by as many factors, unless these are 1 in the whole warp. They
    belong to two rows, which alternate by pairs."""
    products = (f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
        .reg .pred p;
        setp.neu.f32 p, ${2 * n}, 0f3F800000;
        setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra DONE;
        {" ".join(products)}
        DONE:
    }}"""


@gluon.constexpr_function
def _in_place(n):
    """The constraints of that program's operands: n results, which are the first n arguments, and
    n factors."""
    return ",".join(("=f",) * n + tuple(str(i) for i in range(n)) + ("f",) * n)


@gluon.jit
def rescale(acc, shrink):
    """acc * shrink by rows; where no row of a warp has a new reference, nothing is done."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128  # elements of a thread
    program: gl.constexpr = _multiply_unless_one(OWN)
    operands: gl.constexpr = _in_place(OWN)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
    return gl.inline_asm_elementwise(program, operands, [acc, shrink], gl.float32, False, OWN)


@gluon.jit
def scale_rows(acc, factor):
    """acc * factor by rows. No branch: one after the loop would have the assembler schedule the
    loop worse."""
    return acc * gl.expand_dims(gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout)), 1)
