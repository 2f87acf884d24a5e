"""The steps by which a consumer of tiles of keys works on a tile of queries that passes by:
probabilities, products, and parts of dQ sent on their way. `dkdv.py` puts them in
order.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from torch_paged_attn.backends.triton.hopper.backward.sums import BY_BOX, add_registers, leave_part
from torch_paged_attn.backends.triton.hopper.backward.work import STATISTICS_ROWS
from torch_paged_attn.backends.triton.hopper.common.clear import clear_before
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.scores import probabilities

# a named barrier of both consumers: Triton uses the first few for its own
MEETING = gl.constexpr(8)


class KeyPipelines(NamedTuple):
    """What is on its way between the warps of a program."""

    k: Any
    v: Any
    q: Any
    dout: Any
    statistics: Any  # lse and D of a tile's rows; they arrive at the barriers of its queries
    p: Any  # shared memory for P; None unless IS_SPLIT
    ds: Any  # the same for dS; None unless IS_SPLIT or in one pass
    sums: Any  # parts of dQ on their way out; None unless BY_BOX
    done: Any  # barriers: results lie where keys and values lay, and can be stored
    info: Any
    claims: Any


class KeyTile(NamedTuple):
    """A consumer's keys of a tile and the queries that pass by them, as values of the kernel."""

    keys: Any  # (the consumer's first key, context_len, key_len)
    first: Any  # the first query that passes by
    steps: Any  # tiles of queries that pass by, of each head
    first_live: Any  # queries before this one see no key
    head: Any  # the first head of queries that passes by
    b: Any  # the sequence
    statistics_tile: Any  # of the first query that passes by


@gluon.jit
def meet():
    """Wait for the other consumer."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [MEETING], gl.int32, False, 1
    )


@gluon.jit
def statistics_of(n, row, like, pipelines, OPTIONS: gl.constexpr, IS_DELTA: gl.constexpr):
    """lse, or D, of the PASS queries of fill n, from `row` on, laid out like the columns of the
    scores `like`. A box of statistics has STATISTICS_ROWS of each, which may be several fills'."""
    layout: gl.constexpr = like.type.layout
    PASS: gl.constexpr = OPTIONS.PASS
    if PASS == STATISTICS_ROWS:
        box = pipelines.statistics.index(n % OPTIONS.FIRST_STAGES)
        return box.slice(PASS if IS_DELTA else 0, PASS, dim=1).load(layout)
    else:
        PARTS: gl.constexpr = STATISTICS_ROWS // PASS
        plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        shape: gl.constexpr = [OPTIONS.FIRST_STAGES * 2 * PARTS, 1, PASS]
        first = n % OPTIONS.FIRST_STAGES * (2 * PARTS) + (PARTS if IS_DELTA else 0)
        parts = seen_as(pipelines.statistics, shape, plain)
        return parts.index(first + row // PASS % PARTS).load(layout)


@gluon.jit
def probabilities_of(
    s, n, row, keys, slope, params, pipelines, OPTIONS: gl.constexpr, MAY_HIDE: gl.constexpr
):  # fmt: skip
    """What dP^T - D is multiplied by to give dS^T of fill n (see `scores.probabilities`); and P^T,
    as an operand of the product that gives dV. `row` is the fill's first query."""
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.WIDTH_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_v, 2)
    dtype: gl.constexpr = pipelines.k.tiles.dtype
    first_key, context_len, key_len = keys
    lse = statistics_of(n, row, s, pipelines, OPTIONS, False)
    position = context_len + row
    p, weight = probabilities(
        s, lse, first_key, position, key_len, slope, params, OPTIONS, True, MAY_HIDE
    )
    return weight, gl.convert_layout(p.to(dtype), operand)


@gluon.jit
def as_operand(ds, OPTIONS: gl.constexpr):
    """dS^T for the product that gives dK."""
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.WIDTH, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, of_k, 2)
    return gl.convert_layout(ds, operand)


@gluon.jit
def ask_for_dp(v, zeros, n, row, pipelines, OPTIONS: gl.constexpr):
    """Ask for dP^T - D of fill n: a product that is added to -D."""
    start = zeros - statistics_of(n, row, zeros, pipelines, OPTIONS, True)
    pipelines.dout.consumer_wait(n)
    dout = pipelines.dout.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V])
    return warpgroup_mma(v, dout.permute((1, 0)), start, is_async=True)


@gluon.jit
def leave(dq, n, number, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Send a part of dQ on its way: that of fill n, to tile `number` of the sums of all heads."""
    if OPTIONS.DQ_SUMS == BY_BOX:
        leave_part(dq, n, pipelines.sums, OPTIONS, INDEX)
    else:
        add_registers(dq, params.pointers.dq_sums, number, INDEX)


@gluon.jit
def wait_for_queries(pipelines, n, row, first_live, OPTIONS: gl.constexpr):
    """Fill n of the queries, (PASS, WIDTH), once it has arrived. Its rows before query `first_live`
    see no key and may hold NaN: they become zeros here, in queries and gradients."""
    pipelines.q.consumer_wait(n)
    q = pipelines.q.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH])
    if OPTIONS.HAS_RIGHT and row < first_live:
        clear_before(q, first_live - row)
        pipelines.dout.consumer_wait(n)
        clear_before(
            pipelines.dout.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V]), first_live - row
        )
    return q


@gluon.jit
def seen_tiles(first, steps, query_len, keys, params, OPTIONS: gl.constexpr):
    """Which tiles of the queries that pass by see a consumer's keys: how many come before the
    first one, and how many see them. Between two heads a consumer releases tiles that it does not
    need, one if PASS is STAY, while it holds the last one of the head before: hence the stages."""
    gl.static_assert(OPTIONS.GROUP_SIZE == 1 or OPTIONS.FIRST_STAGES >= 3)
    scalars = params.scalars
    first_key, context_len, key_len = keys
    skipped = 0
    seen = steps
    if OPTIONS.HAS_RIGHT:
        skipped = (
            gl.maximum(first_key - context_len - scalars.window_right - first, 0) // OPTIONS.PASS
        )
    if OPTIONS.HAS_LEFT:
        last_key = gl.minimum(first_key + OPTIONS.STAY, key_len) - 1
        stop = gl.minimum(query_len, last_key - context_len + scalars.window_left + 1)
        seen = gl.maximum((stop - first + OPTIONS.PASS - 1) // OPTIONS.PASS, 0)
    seen = gl.maximum(gl.where(first_key < key_len, seen, 0) - skipped, 0)
    return gl.minimum(skipped, steps - seen), seen
