"""Sums over stretches of keys, for calls whose bits must depend on a sequence alone
(`batch_invariant`).

Keys are cut into stretches at the same positions for all queries: the first 16 stretches have
STRETCH keys each, the next eight twice as many, the next eight four times, and so on. Long
sequences then have few stretches, and short ones enough to be divided. Each stretch is summed up
from zero, and the sums are added one after the other, the last keys first. The result is the same
whether each stretch had a consumer of its own (`pieces.py`) or one consumer had them all.

A consumer that has them all lacks registers for two sums of values. It adds the sum of a finished
stretch to its own part of the workspace, which stays in the cache, by additions that it does not
wait for while it computes the next scores. The sums there are scaled by a reference logit, which
changes only when a stretch's largest logit exceeds it by far.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.common.records import record

# by how much, in base two, a stretch's reference may exceed that of the sum of those before
MOST_APART = gl.constexpr(16.0)
_ONE, _SIXTEEN = gl.constexpr("0f3F800000"), gl.constexpr("0f41800000")

# the state of a consumer's sums of finished stretches. NONE_LEFT: there are none. FIRST: those of
# the tile's first stretch are to be written next. SOME_LEFT: all are written. ONE_MORE: some are
# written, and those of one more stretch are to be added next
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


@record
class Left:
    """Of the stretches that consumers have finished, by row: references in base two, and sums of
    weights."""

    references: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor

    @gluon.jit
    def keep(self, INDEX: gl.constexpr, m, total):
        """Write those of consumer number INDEX."""
        self.references.index(INDEX).store(m)
        self.totals.index(INDEX).store(total)

    @gluon.jit
    def rows(self, INDEX: gl.constexpr, state, layout: gl.constexpr):
        """Those of consumer number INDEX, if it has left any of its tile."""
        m = self.references.index(INDEX).load(layout)
        total = self.totals.index(INDEX).load(layout)
        is_any = state > NONE_LEFT
        return gl.where(is_any, m, -float("inf")), gl.where(is_any, total, 0.0)


@gluon.jit
def new_left(CONSUMERS: gl.constexpr, ROWS: gl.constexpr):
    """Room for the rows of all consumers."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    references = gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS], layout)
    return Left(references, gl.allocate_shared_memory(gl.float32, [CONSUMERS, ROWS], layout))


@gluon.jit
def next_reference(m_all, m_part):
    """The reference of sums that have one more stretch, and how far its own is above theirs: more
    than MOST_APART if theirs is replaced."""
    apart = gl.where(m_part == -float("inf"), m_part, m_part - m_all)
    return gl.where(apart > MOST_APART, m_part, m_all), apart


@gluon.constexpr_function
def _factors(apart, old, weight):
    """PTX: what sums before, and those of a stretch, are multiplied by."""
    return f"""
        neg.f32 {old}, {apart};
        ex2.approx.ftz.f32 {old}, {old};
        ex2.approx.ftz.f32 {weight}, {apart};
        setp.gt.f32 p, {apart}, {_SIXTEEN.value};
        selp.f32 {old}, {old}, {_ONE.value}, p;
        selp.f32 {weight}, {_ONE.value}, {weight}, p;"""


@gluon.constexpr_function
def _factors_alone():
    return f"{{.reg .pred p; {_factors('$2', '$0', '$1')}}}"


@gluon.jit
def factors(apart):
    """The same, as values of the kernel."""
    program: gl.constexpr = _factors_alone()
    return gl.inline_asm_elementwise(
        program, "=&f,=&f,f", [apart], (gl.float32, gl.float32), True, 1
    )


@gluon.jit
def fold(x, part, old, weight):
    """x * old + part * weight, rounded as sums in memory are."""
    return gl.inline_asm_elementwise(
        "{.reg .f32 a, b; mul.rn.ftz.f32 a, $1, $3; mul.rn.ftz.f32 b, $2, $4;"
        " add.rn.ftz.f32 $0, a, b;}",
        "=f,f,f,f,f",
        [x, part, old, weight],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.constexpr_function
def _address(place, base):
    """PTX: where a thread's registers go."""
    return f"mad.wide.u32 at, ${place}, 16, ${base};"


@gluon.constexpr_function
def _at(i):
    """Where a thread has its registers from number i on, of which it stores four at once: those of
    a warpgroup lie side by side."""
    return f"[at + {512 * i}]"


@gluon.constexpr_function
def _names(first):
    return "{" + ", ".join(f"t{first + k}" for k in range(4)) + "}"


@gluon.constexpr_function
def _leave_or_multiply(n):
    """PTX: leave n registers in memory and make them zeros, if they are pending; else multiply them
    by factors, unless these are 1 in the whole warp."""
    shrink, apart, base, place, state = 2 * n, 3 * n, 4 * n, 5 * n, 6 * n
    four = _names(0)
    scaled, added, stored = [], [], []
    for i in range(0, n, 4):
        # a thread's numbers belong to two rows, which alternate by pairs
        scaled += [f"ld.relaxed.gpu.global.v4.f32 {four}, {_at(i)};"]
        scaled += [f"mul.rn.ftz.f32 t{k}, t{k}, old{k // 2};" for k in range(4)]
        scaled += [f"st.relaxed.gpu.global.v4.f32 {_at(i)}, {four};"]
        added += [f"mul.rn.ftz.f32 t{k}, ${i + k}, weight{k // 2};" for k in range(4)]
        added += [f"red.relaxed.gpu.global.add.v4.f32 {_at(i)}, {four};"]
        values = ", ".join(f"${i + k}" for k in range(4))
        stored += [f"st.relaxed.gpu.global.v4.f32 {_at(i)}, {{{values}}};"]
    zeros = " ".join(f"mov.f32 ${i}, 0f00000000;" for i in range(n))
    products = " ".join(f"mul.f32 ${i}, ${i}, ${shrink + i};" for i in range(n))
    return f"""{{
        .reg .pred p; .reg .b32 is_pending; .reg .b64 at;
        .reg .f32 t<4>; .reg .f32 old<2>; .reg .f32 weight<2>;
        and.b32 is_pending, ${state}, 1;
        setp.eq.s32 p, is_pending, 0;
        @p bra MULTIPLY;
        {_address(place, base)}
        setp.eq.s32 p, ${state}, {FIRST.value};
        @p bra STORE;
        {_factors(f"${apart}", "old0", "weight0")}
        {_factors(f"${apart + 2}", "old1", "weight1")}
        setp.eq.f32 p, old0, {_ONE.value};
        setp.eq.and.f32 p, old1, {_ONE.value}, p;
        vote.sync.all.pred p, p, 0xffffffff;
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
        setp.neu.f32 p, ${shrink}, {_ONE.value};
        setp.neu.or.f32 p, ${shrink + 2}, {_ONE.value}, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra DONE;
        {products}
        DONE:
    }}"""


@gluon.constexpr_function
def _join(n):
    """PTX: add what was left, if anything was, to n registers."""
    apart, base, place = 2 * n, 3 * n, 4 * n
    lines = []
    for first in range(0, n, 32):
        for i in range(0, 32, 4):
            lines += [f"ld.relaxed.gpu.global.v4.f32 {_names(i)}, {_at(first + i)};"]
        for i in range(32):
            e = first + i
            row = i // 2 % 2
            lines += [f"mul.rn.ftz.f32 t{i}, t{i}, old{row};"]
            lines += [f"mul.rn.ftz.f32 ${e}, ${e}, weight{row};"]
            lines += [f"add.rn.ftz.f32 ${e}, t{i}, ${e};"]
    return f"""{{
        .reg .pred p; .reg .b64 at;
        .reg .f32 t<32>; .reg .f32 old<2>; .reg .f32 weight<2>;
        {_address(place, base)}
        {_factors(f"${apart}", "old0", "weight0")}
        {_factors(f"${apart + 2}", "old1", "weight1")}
        {" ".join(lines)}
    }}"""


@gluon.constexpr_function
def _in_place(n, factors, numbers):
    """The operands: results, which are the first n arguments, factors, an address, and numbers."""
    own = tuple(str(i) for i in range(n))
    return ",".join(
        ("=f",) * n + own + ("f",) * (factors * n) + ("l",) * n + ("r",) * (numbers * n)
    )


@gluon.jit
def _of_rows(x, acc):
    """(rows, 1), as rows of `acc` lie."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout)), 1)


@gluon.jit
def _memory_of(params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The address where a consumer leaves sums: behind the parts of pieces."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    ROWS: gl.constexpr = OPTIONS.BLOCK_M
    at = OPTIONS.MOST_PARTS * CONSUMERS * ROWS * (OPTIONS.WIDTH_V + 2)
    at += (gl.program_id(0) * CONSUMERS + INDEX) * (ROWS * OPTIONS.WIDTH_V)
    return (params.pointers.parts + at).to(gl.int64)


@gluon.jit
def _thread_of(acc):
    """The number of the thread that has an element, of 128. With PTX's own number of a thread, the
    assembler has registers of threads for what all threads of the loop have in common."""
    layout: gl.constexpr = acc.type.layout
    row = gl.expand_dims(gl.arange(0, acc.shape[0], gl.SliceLayout(1, layout)), 1)
    column = gl.expand_dims(gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout)), 0)
    return (row // 16 * 8 + row % 8) * 4 + column % 8 // 2


@gluon.jit
def leave_or_rescale(acc, shrink, apart, state, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Leave sums of values that are pending, and return zeros; else acc * shrink by rows, as
    `softmax.rescale`. Returns the new state, too."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128  # elements of a thread
    program: gl.constexpr = _leave_or_multiply(OWN)
    base = _memory_of(params, OPTIONS, INDEX)
    operands: gl.constexpr = _in_place(OWN, 2, 2)
    acc = gl.inline_asm_elementwise(
        program,
        operands,
        [acc, _of_rows(shrink, acc), _of_rows(apart, acc), base, _thread_of(acc), state],
        gl.float32,
        False,
        OWN,
    )
    return acc, gl.where(state > NONE_LEFT, SOME_LEFT, NONE_LEFT)


@gluon.jit
def _join_left(acc, apart, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Sums of values with those that were left before."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128
    program: gl.constexpr = _join(OWN)
    base = _memory_of(params, OPTIONS, INDEX)
    operands: gl.constexpr = _in_place(OWN, 1, 1)
    return gl.inline_asm_elementwise(
        program,
        operands,
        [acc, _of_rows(apart, acc), base, _thread_of(acc)],
        gl.float32,
        False,
        OWN,
    )


@gluon.jit
def with_left(acc, apart, state, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The same, if any were left."""
    if state > NONE_LEFT:
        acc = _join_left(acc, apart, params, OPTIONS, INDEX)
    return acc
