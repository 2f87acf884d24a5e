"""Gradients of selected units of keys for Hopper, in Gluon: each unit is read once for all tokens
that name it.

A program takes a unit of one KV head; each of two consumers owns half of its keys, whose gradients
stay in registers while the tokens that name the unit pass by in their order, PASS rows of queries
and of dout at a time, as a producer loads them. For each tile of rows:

    S^T = K Q^T, dP^T = V dO^T           keys are rows, so that P and dS are operands in registers
    P^T = exp2(S^T - lse), dS^T = P^T (dP^T - D)
    dV += P^T dO, dK += dS^T Q
    dQ part = dS K                       dS of both consumers goes through shared memory, and each
                                         computes half of the columns

The order of products is that of the dense backward in one pass (`backward/dkdv.py`). Parts of dQ
are left in float16 with a power of two as the scale of a row and a consumer's columns, which are in
the order in which lanes store them (`kernel.py`); a later kernel adds them up in the order of a
token's list, so that the bits are the same every time.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.hopper.backward.dkdv_steps import meet
from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_barriers, new_pipeline
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.softmax import row_max
from torch_paged_attn.backends.triton.hopper.common.tma import (
    ROW_BOUND,
    async_load,
    boxes,
    load_rows,
    shape_of_tiles,
)
from torch_paged_attn.backends.triton.hopper.units.gradient_arguments import (
    UnitGradientParams,
    UnitGradientSizes,
)
from torch_paged_attn.backends.triton.hopper.units.kernel import HIGHEST, by_lane


class GradientPipelines(NamedTuple):
    """What is on its way between the warps of a program. Gradients and statistics arrive together
    with queries, in stages of the same number."""

    q: Any
    dout: Any
    statistics: Any
    k: Any
    v: Any
    loaded: Any  # the barrier of k and v
    ds: Any


@gluon.jit
def _unit_of(params, OPTIONS: gl.constexpr):
    """A program's entries (first, one past the last), its row of k and keys of its unit that are
    in the sequence, and its KV head."""
    pointers, sizes = params.pointers, params.sizes
    number, head = gl.program_id(0), gl.program_id(1)
    group = (head * sizes.own_lists).to(gl.int64)
    at = (group * sizes.units + number) * sizes.runs + sizes.run
    bounds = pointers.bounds + at + group
    first, stop = gl.load(bounds), gl.load(bounds + 1)
    row = first * 0
    keys = first * 0
    if first < stop:
        at = group * sizes.listed + first
        token = gl.load(pointers.tokens + at)
        unit = number - gl.load(pointers.first_units + token)
        key = unit * OPTIONS.BLOCK_N
        keys = gl.load(pointers.lengths + token) - key
        row = gl.load(pointers.first_rows + token) + key
        keys = gl.minimum(gl.minimum(keys, sizes.num_rows - row), OPTIONS.BLOCK_N)
    count = gl.maximum(stop - first, 0)
    return (
        group * sizes.listed + first,
        count.to(gl.int32),
        row.to(gl.int32),
        keys.to(gl.int32),
        head,
    )


@gluon.jit
def _tokens_of(tile, entries, count, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The query rows that producer number INDEX loads for a tile; past the last token, its row."""
    OWN: gl.constexpr = OPTIONS.TOKENS // OPTIONS.PRODUCERS
    rows = ()
    for i in gl.static_range(OWN):
        place = tile * OPTIONS.TOKENS + INDEX * OWN + i
        row = gl.load(params.pointers.tokens + entries + gl.minimum(place, count - 1))
        rows = rows + (row.to(gl.int32),)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _produce(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Load queries, gradients and statistics of some tokens of each tile; the first producer loads
    the unit, too. Rows past the last token are zeros, and add nothing."""
    OWN: gl.constexpr = OPTIONS.TOKENS // OPTIONS.PRODUCERS
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    queries = pipelines.q
    entries, count, row, keys, head = _unit_of(params, OPTIONS)
    tiles = (count + OPTIONS.TOKENS - 1) // OPTIONS.TOKENS
    if count > 0:
        if INDEX == 0:
            barrier = pipelines.loaded.index(0)
            mbarrier.expect(
                barrier, params.k_desc.block_type.nbytes + params.v_desc.block_type.nbytes
            )
            load_rows(params.k_desc, row, keys, 0, head, barrier, pipelines.k.index(0))
            load_rows(params.v_desc, row, keys, 0, head, barrier, pipelines.v.index(0))
        rows = _tokens_of(0, entries, count, params, OPTIONS, INDEX)
        of_token: gl.constexpr = (
            params.q_desc.block_type.nbytes
            + params.dout_desc.block_type.nbytes
            + params.statistics_desc.block_type.nbytes
        )
        for t in range(tiles):
            # on their way before anything waits
            more = _tokens_of(t + 1, entries, count, params, OPTIONS, INDEX)
            queries.producer_acquire(t)
            barrier = queries.full_barrier(t)
            mbarrier.expect(barrier, OWN * of_token)
            stage = t % OPTIONS.STAGES
            for i in gl.static_range(OWN):
                exists = t * OPTIONS.TOKENS + INDEX * OWN + i < count
                size = gl.where(exists, 1, 0)
                box = queries.tile(t).slice(INDEX * OWN + i, 1, dim=2)
                load_rows(params.q_desc, rows[i], size, 0, head * GROUP_SIZE, barrier, box)
                box = pipelines.dout.index(stage).slice(INDEX * OWN + i, 1, dim=2)
                load_rows(params.dout_desc, rows[i], size, 0, head * GROUP_SIZE, barrier, box)
                place = gl.where(exists, rows[i] * gl.num_programs(1) + head, ROW_BOUND)
                box = pipelines.statistics.index(stage * OPTIONS.TOKENS + INDEX * OWN + i)
                async_load(params.statistics_desc, [place, 0], barrier, box)
            rows = more


@gluon.constexpr_function
def _by_token(tokens, group):
    """The layout of (tokens, heads) whose numbers lie as the columns of a product's scores."""

    def at(column):
        return [column // group, column % group]

    own, lanes = [at(1), at(8), at(16), at(32)], [at(2), at(4), [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[0, 0], [0, 0]], [], [tokens, group])


@gluon.constexpr_function
def _everywhere(tokens):
    """The layout of (tokens, 1) of which each thread has all numbers."""
    own = [[1 << i, 0] for i in range(tokens.bit_length() - 1)]
    return gl.DistributedLinearLayout(own, [[0, 0]] * 5, [[0, 0]] * 2, [], [tokens, 1])


@gluon.jit
def _fields(n, pipelines, OPTIONS: gl.constexpr):
    """The statistics of fill n, (tokens, fields times heads)."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shape: gl.constexpr = [OPTIONS.STAGES, OPTIONS.TOKENS, ROW_FIELDS * OPTIONS.GROUP_SIZE]
    return seen_as(pipelines.statistics, shape, plain).index(n % OPTIONS.STAGES)


@gluon.jit
def _statistic(fields, like, OPTIONS: gl.constexpr, FIELD: gl.constexpr):
    """One of the fields, of the rows of a fill, laid out like the columns of `like`."""
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    rows: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    x = fields.slice(FIELD * GROUP_SIZE, GROUP_SIZE, dim=1).load(_by_token(TOKENS, GROUP_SIZE))
    return gl.expand_dims(gl.convert_layout(gl.reshape(x, [TOKENS * GROUP_SIZE]), rows, True), 0)


@gluon.jit
def _of_tokens(fields, row, OPTIONS: gl.constexpr, FIELD: gl.constexpr):
    """A field that is the same for all heads, the number of a row of k: counted from `row` on."""
    x = fields.slice(FIELD * OPTIONS.GROUP_SIZE, 1, dim=1).load(_everywhere(OPTIONS.TOKENS))
    return gl.reshape(x, [OPTIONS.TOKENS]).to(gl.int32, bitcast=True) - row


@gluon.jit
def _mask(p, fields, key, row, OPTIONS: gl.constexpr):
    """p, and 0 where a token does not see a key. `key`: the numbers of the consumer's keys in the
    unit, which begins at `row`."""
    is_cut = gl.min(_of_tokens(fields, row, OPTIONS, 3), 0) < OPTIONS.BLOCK_N - 1
    if OPTIONS.HAS_LEFT:
        is_cut = is_cut | (gl.max(_of_tokens(fields, row, OPTIONS, 2), 0) > 0)
    if is_cut:
        of_key = gl.expand_dims(key, 1) + row
        seen = of_key <= _statistic(fields, p, OPTIONS, 3).to(gl.int32, bitcast=True)
        if OPTIONS.HAS_LEFT:
            low = _statistic(fields, p, OPTIONS, 2).to(gl.int32, bitcast=True)
            seen = seen & (of_key >= low)
        p = gl.where(seen, p, 0.0)
    return p


@gluon.jit
def _clear(tile, like, INDEX: gl.constexpr, STAY: gl.constexpr):
    """Write 0 in place of the numbers of a consumer's keys that are not finite: a key that no query
    sees may hold them."""
    own = tile.slice(INDEX * STAY, STAY, dim=0)
    x = own.load(like.type.layout)
    own.store(gl.where(gl.abs(x.to(gl.float32)) < float("inf"), x, 0.0).to(x.dtype))


@gluon.jit
def _leave(dq, n, entries, count, head, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Store a part of dQ: of the rows of fill n, a consumer's columns."""
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    PASS: gl.constexpr = OPTIONS.TOKENS * GROUP_SIZE
    COLUMNS: gl.constexpr = dq.shape[1]
    pointers, sizes = params.pointers, params.sizes
    rows: gl.constexpr = gl.SliceLayout(1, dq.type.layout)
    r = gl.arange(0, PASS, rows)
    entry = n * OPTIONS.TOKENS + r // GROUP_SIZE
    exists = entry < count
    place = gl.load(pointers.places + entries + entry, mask=exists, other=0)
    place += head.to(gl.int64) * sizes.head_places - sizes.first_place
    at = place * GROUP_SIZE + r % GROUP_SIZE
    largest = gl.convert_layout(row_max(gl.abs(dq)), rows, True)
    exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
    exponent = HIGHEST - 1 - gl.maximum(exponent, -100)
    up = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
    down = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
    gl.store(pointers.part_scales + at * OPTIONS.CONSUMERS + INDEX, down, mask=exists)
    part = by_lane((dq * gl.expand_dims(up, 1)).to(gl.float16))
    lanes: gl.constexpr = part.type.layout
    to = gl.convert_layout(at, gl.SliceLayout(1, lanes)) * OPTIONS.WIDTH + INDEX * COLUMNS
    is_stored = gl.convert_layout(exists, gl.SliceLayout(1, lanes))
    d = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, lanes)), 0)
    to = pointers.parts + gl.expand_dims(to, 1) + d
    gl.store(to, part, mask=gl.expand_dims(is_stored, 1))


@gluon.jit
def _put_keys(ptr, x, row, keys, head, IS_SUM: gl.constexpr, INDEX: gl.constexpr):
    """Write gradients of a consumer's keys or values, or add them to float32 sums."""
    layout: gl.constexpr = x.type.layout
    STAY: gl.constexpr = x.shape[0]
    r = INDEX * STAY + gl.arange(0, STAY, gl.SliceLayout(1, layout))
    d = gl.expand_dims(gl.arange(0, x.shape[1], gl.SliceLayout(0, layout)), 0)
    at = ((row + r).to(gl.int64) * gl.num_programs(1) + head) * x.shape[1]
    to = ptr + gl.expand_dims(at, 1) + d
    exists = gl.expand_dims(r < keys, 1)
    if IS_SUM:
        x += gl.load(to, mask=exists, other=0.0)
    gl.store(to, x.to(ptr.dtype.element_ty), mask=exists)


@gluon.jit
def _consume(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """dK and dV of half of a unit's keys, and half of the columns of the parts of dQ."""
    STAY: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.CONSUMERS
    PASS: gl.constexpr = OPTIONS.TOKENS * OPTIONS.GROUP_SIZE
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    COLUMNS: gl.constexpr = WIDTH // OPTIONS.CONSUMERS
    HAS_BOUNDS: gl.constexpr = OPTIONS.HAS_LEFT or OPTIONS.HAS_RIGHT
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    queries, scalars = pipelines.q, params.scalars
    dtype: gl.constexpr = queries.tiles.dtype
    entries, count, row, keys, head = _unit_of(params, OPTIONS)
    tiles = (count + OPTIONS.TOKENS - 1) // OPTIONS.TOKENS
    if count > 0:
        zeros = gl.zeros([STAY, PASS], gl.float32, scores)
        zeros_q = gl.zeros([PASS, COLUMNS], gl.float32, of_q)
        dk = gl.zeros([STAY, WIDTH], gl.float32, of_k)
        dv = gl.zeros([STAY, WIDTH_V], gl.float32, of_v)
        key = INDEX * STAY + gl.arange(0, STAY, gl.SliceLayout(1, scores))
        k_tile = pipelines.k.index(0).reshape([OPTIONS.BLOCK_N, WIDTH])
        v_tile = pipelines.v.index(0).reshape([OPTIONS.BLOCK_N, WIDTH_V])
        k = k_tile.slice(INDEX * STAY, STAY, dim=0)
        v = v_tile.slice(INDEX * STAY, STAY, dim=0)
        own = k_tile.slice(INDEX * COLUMNS, COLUMNS, dim=1)
        mbarrier.wait(pipelines.loaded.index(0), 0)
        if HAS_BOUNDS:
            _clear(k_tile, dk, INDEX, STAY)
            _clear(v_tile, dv, INDEX, STAY)
            fence_async_shared()
            meet()
        for n in range(tiles):
            stage = n % OPTIONS.STAGES
            queries.consumer_wait(n)
            q = queries.tile(n).reshape([PASS, WIDTH])
            dout = pipelines.dout.index(stage).reshape([PASS, WIDTH_V])
            s_pending = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp_pending = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            fields = _fields(n, pipelines, OPTIONS)
            lse = _statistic(fields, zeros, OPTIONS, 0)
            s = warpgroup_mma_wait(1, deps=[s_pending])
            p = gl.exp2(s * scalars.scale_log2 - lse)
            if HAS_BOUNDS:
                p = _mask(p, fields, key, row, OPTIONS)
            elif keys < OPTIONS.BLOCK_N:
                p = gl.where(gl.expand_dims(key < keys, 1), p, 0.0)
            p16 = gl.convert_layout(p.to(dtype), gl.DotOperandLayout(0, of_v, 2))
            delta = _statistic(fields, zeros, OPTIONS, 1)
            dp = warpgroup_mma_wait(0, deps=[dp_pending])
            ds = (p * (dp - delta)).to(dtype)
            ds_tile = pipelines.ds.index(n % 2)
            ds_tile.slice(INDEX * STAY, STAY, dim=0).store(ds)
            ds = gl.convert_layout(ds, gl.DotOperandLayout(0, of_k, 2))
            dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
            fence_async_shared()
            meet()
            dq_pending = warpgroup_mma(
                ds_tile.permute((1, 0)), own, zeros_q, use_acc=False, is_async=True
            )
            dk_pending = warpgroup_mma(ds, q, dk, is_async=True)
            dv, p16, dq = warpgroup_mma_wait(1, deps=[dv_pending, p16, dq_pending])
            _leave(dq, n, entries, count, head, params, OPTIONS, INDEX)
            dk, ds = warpgroup_mma_wait(0, deps=[dk_pending, ds])
            queries.consumer_release(n)
        _put_keys(params.pointers.dk, dk * scalars.scale, row, keys, head, OPTIONS.ARE_SUMS, INDEX)
        _put_keys(params.pointers.dv, dv, row, keys, head, OPTIONS.ARE_SUMS, INDEX)


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    if NUMBER < OPTIONS.CONSUMERS:
        _consume(params, pipelines, OPTIONS, NUMBER)
    elif NUMBER < OPTIONS.CONSUMERS + OPTIONS.PRODUCERS:
        _produce(params, pipelines, OPTIONS, NUMBER - OPTIONS.CONSUMERS)


@gluon.jit(do_not_specialize=UnitGradientSizes._fields)
def _hopper_unit_gradients_kernel(
    q_desc, dout_desc, k_desc, v_desc, statistics_desc, pointers,
    num_rows, listed, units, runs, run, first_place, head_places, own_lists,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `gradient_arguments.py`."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    STAGES: gl.constexpr = OPTIONS.STAGES
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    PASS: gl.constexpr = TOKENS * GROUP_SIZE
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    dout_layout: gl.constexpr = dout_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    statistics_layout: gl.constexpr = statistics_desc.layout
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=2 * PASS, element_bitwidth=16, rank=2
    )
    q_shape: gl.constexpr = boxes(STAGES, [1, 1, TOKENS, GROUP_SIZE, OPTIONS.WIDTH])
    dout_shape: gl.constexpr = boxes(STAGES, [1, 1, TOKENS, GROUP_SIZE, OPTIONS.WIDTH_V])
    k_shape: gl.constexpr = shape_of_tiles(1, k_desc.block_shape, BLOCK_N)
    v_shape: gl.constexpr = shape_of_tiles(1, v_desc.block_shape, BLOCK_N)
    pipelines = GradientPipelines(
        q=new_pipeline(dtype, q_shape, q_layout, STAGES, OPTIONS.CONSUMERS, OPTIONS.PRODUCERS),
        dout=gl.allocate_shared_memory(dtype, dout_shape, dout_layout),
        statistics=gl.allocate_shared_memory(
            gl.float32, [STAGES * TOKENS, 1, ROW_FIELDS * GROUP_SIZE], statistics_layout
        ),
        k=gl.allocate_shared_memory(dtype, k_shape, k_layout),
        v=gl.allocate_shared_memory(dtype, v_shape, v_layout),
        loaded=new_barriers(1, 1),
        ds=gl.allocate_shared_memory(dtype, [2, BLOCK_N, PASS], ds_layout),
    )
    sizes = UnitGradientSizes(
        num_rows, listed, units, runs, run, first_place, head_places, own_lists
    )
    params = UnitGradientParams(
        q_desc, dout_desc, k_desc, v_desc, statistics_desc, pointers, sizes, scalars
    )
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS), warps_of(OPTIONS.CONSUMERS, 4),
        registers_of(OPTIONS.CONSUMERS, OPTIONS.REGISTERS),
    )  # fmt: skip
