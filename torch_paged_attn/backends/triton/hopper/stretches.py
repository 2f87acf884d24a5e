"""Sums of stretches of keys, where bits must depend on a sequence alone (`batch_invariant`).

Keys are cut at the same positions for all queries: at every STRETCH keys, the first 16 times, then
at every two, four, ... of them, eight times each; what is long in few pieces, and what is short in
many. Each stretch is summed up from zero, and the sums of stretches are added up one after the
other, the last keys first. Who does that is all the same: the consumers that each had one
stretch of a tile (`pieces.py`), or the one that had them all.

That one has no registers for two sums of values. It leaves those of a stretch in memory of its own,
which stays in the cache, by additions that nobody waits for, while the next scores are computed.
They are scaled for a reference that the sum of all keeps until a stretch's exceeds it by far.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# by how much, in base two, a stretch's reference may exceed that of the sum of those before
MOST_APART = gl.constexpr(16.0)

# what is pending of a consumer's sums: nothing, and nothing was left; the first of a tile; nothing,
# but some were left; one more
NONE_LEFT, FIRST, SOME_LEFT, ONE_MORE = (gl.constexpr(i) for i in range(4))


@triton.jit
def _doublings(unit):
    """How often stretches have doubled where the first keys of `unit`, of STRETCH keys, lie."""
    exponent = ((unit * 1.0).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return tl.maximum(exponent - 3, 0)


@triton.jit
def stretch_of(key, STRETCH: tl.constexpr):
    """The number of the stretch that holds a key."""
    unit = key // STRETCH
    doublings = _doublings(unit)
    return 8 * doublings + (unit >> doublings)


@triton.jit
def first_key_of(number, STRETCH: tl.constexpr):
    """The first key of a stretch."""
    doublings = tl.maximum(number // 8 - 1, 0)
    return ((number - 8 * doublings) << doublings) * STRETCH


@triton.jit
def first_key_with(key, STRETCH: tl.constexpr):
    """The first key of the stretch that holds a key."""
    unit = key // STRETCH
    doublings = _doublings(unit)
    return ((unit >> doublings) << doublings) * STRETCH


@gluon.jit
def next_reference(m_all, m_part):
    """The reference of sums that have one more stretch, and what the sums before, and its own, are
    multiplied by."""
    m_new = gl.where(m_part > m_all + MOST_APART, m_part, m_all)
    # rows that have seen no key yet keep -inf; shifting by 0 instead avoids inf - inf
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    return m_new, gl.exp2(m_all - shift), gl.exp2(m_part - shift)


@gluon.jit
def fold(x, old, part, weight):
    """x * old + part * weight, each rounded, as additions in memory round."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 a, b; mul.rn.ftz.f32 a, $1, $2; mul.rn.ftz.f32 b, $3, $4;"
        " add.rn.ftz.f32 $0, a, b;}",
        "=r,r,r,r,r",
        [x, old, part, weight],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _address(n, operand, consumers, index):
    """PTX: where a thread's part of n registers for each begins, in memory from an operand on."""
    return f"""
        mov.u32 thread, %ctaid.x;
        mad.lo.u32 thread, thread, {consumers}, {index};
        mul.wide.u32 at, thread, {512 * n};
        add.s64 at, at, ${operand};
        mov.u32 thread, %tid.x;
        and.b32 thread, thread, 127;
        mad.wide.u32 at, thread, 16, at;"""


@gluon.constexpr_function
def _at(i):
    """Where a thread has its registers from number i on, of which it stores four at once: those of
    a warpgroup lie side by side."""
    return f"[at + {512 * i}]"


@gluon.constexpr_function
def _names(first):
    return "{" + ", ".join(f"t{first + k}" for k in range(4)) + "}"


@gluon.constexpr_function
def _leave_or_multiply(n, consumers, index):
    """PTX: leave n registers in memory and make them zeros, if they are pending; else multiply them
    by factors, unless these are 1 in the whole warp."""
    shrink, weight, old, base, state = 2 * n, 3 * n, 4 * n, 5 * n, 6 * n
    four = _names(0)
    scaled, added, stored = [], [], []
    for i in range(0, n, 4):
        scaled += [f"ld.relaxed.gpu.global.v4.f32 {four}, {_at(i)};"]
        scaled += [f"mul.rn.ftz.f32 t{k}, t{k}, ${old + i + k};" for k in range(4)]
        scaled += [f"st.relaxed.gpu.global.v4.f32 {_at(i)}, {four};"]
        added += [f"mul.rn.ftz.f32 t{k}, ${i + k}, ${weight + i + k};" for k in range(4)]
        added += [f"red.relaxed.gpu.global.add.v4.f32 {_at(i)}, {four};"]
        values = ", ".join(f"${i + k}" for k in range(4))
        stored += [f"st.relaxed.gpu.global.v4.f32 {_at(i)}, {{{values}}};"]
    zeros = " ".join(f"mov.f32 ${i}, 0f00000000;" for i in range(n))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${shrink + i};" for i in range(n))
    one = "0f3F800000"
    return f"""{{
        .reg .pred p; .reg .f32 t<4>; .reg .b32 thread; .reg .b64 at;
        and.b32 thread, ${state}, 1;
        setp.eq.s32 p, thread, 0;
        @p bra MULTIPLY;
        {_address(n, base, consumers, index)}
        setp.eq.s32 p, ${state}, {FIRST.value};
        @p bra STORE;
        setp.eq.f32 p, ${old}, {one};
        setp.eq.and.f32 p, ${old + 2}, {one}, p;
        @p bra ADD;
        {" ".join(scaled)}
        ADD:
        {" ".join(added)}
        bra ZERO;
        STORE:
        {" ".join(stored)}
        ZERO:
        {zeros}
        bra DONE;
        MULTIPLY:
        setp.neu.f32 p, ${shrink}, {one};
        setp.neu.or.f32 p, ${shrink + 2}, {one}, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra DONE;
        {products}
        DONE:
    }}"""


@gluon.constexpr_function
def _join(n, consumers, index):
    """PTX: add what was left, if anything was, to n registers."""
    old, weight, base, state = 2 * n, 3 * n, 4 * n, 5 * n
    lines = []
    for first in range(0, n, 32):
        for i in range(0, 32, 4):
            lines += [f"ld.relaxed.gpu.global.v4.f32 {_names(i)}, {_at(first + i)};"]
        for i in range(32):
            e = first + i
            lines += [f"mul.rn.ftz.f32 t{i}, t{i}, ${old + e};"]
            lines += [f"mul.rn.ftz.f32 ${e}, ${e}, ${weight + e};"]
            lines += [f"add.rn.ftz.f32 ${e}, t{i}, ${e};"]
    return f"""{{
        .reg .pred p; .reg .f32 t<32>; .reg .b32 thread; .reg .b64 at;
        setp.ne.s32 p, ${state}, {SOME_LEFT.value};
        @p bra DONE;
        {_address(n, base, consumers, index)}
        {" ".join(lines)}
        DONE:
    }}"""


@gluon.constexpr_function
def _in_place(n, factors):
    """The operands: results, which are the first n arguments, factors, an address and a state."""
    own = tuple(str(i) for i in range(n))
    return ",".join(("=f",) * n + own + ("f",) * (factors * n) + ("l",) * n + ("r",) * n)


@gluon.jit
def _of_rows(x, acc):
    """(rows, 1), as rows of `acc` lie."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def _memory_of(params, OPTIONS: gl.constexpr):
    """The address of what consumers leave: behind the parts of pieces."""
    rows = OPTIONS.MOST_PARTS * OPTIONS.CONSUMERS * OPTIONS.BLOCK_M
    return (params.pointers.parts + rows * (OPTIONS.WIDTH_V + 2)).to(gl.int64)


@gluon.jit
def leave_or_rescale(
    acc, shrink, weight, old, state, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Leave sums of values that are pending, and return zeros; else acc * shrink by rows, as
    `softmax.rescale`. Returns the new state, too."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128  # elements of a thread
    program: gl.constexpr = _leave_or_multiply(OWN, OPTIONS.CONSUMERS, INDEX)
    base = _memory_of(params, OPTIONS)
    operands: gl.constexpr = _in_place(OWN, 3)
    acc = gl.inline_asm_elementwise(
        program,
        operands,
        [acc, _of_rows(shrink, acc), _of_rows(weight, acc), _of_rows(old, acc), base, state],
        gl.float32,
        False,
        OWN,
    )
    return acc, gl.where(state > NONE_LEFT, SOME_LEFT, NONE_LEFT)


@gluon.jit
def join_left(acc, old, weight, state, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Sums of values with those that were left before."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    program: gl.constexpr = _join(OWN, OPTIONS.CONSUMERS, INDEX)
    base = _memory_of(params, OPTIONS)
    operands: gl.constexpr = _in_place(OWN, 2)
    return gl.inline_asm_elementwise(
        program,
        operands,
        [acc, _of_rows(old, acc), _of_rows(weight, acc), base, state],
        gl.float32,
        False,
        OWN,
    )
