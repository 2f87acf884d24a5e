"""Two consumers with the same rows, each with every other tile of keys: where all queries of a
sequence fit in 64 rows, a tile of keys is a chain of products and exponentials, and two chains run
beside each other. One consumer leaves its sums in shared memory; the other adds them to its own,
and writes the result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.softmax import finite_or_zero
from torch_paged_attn.backends.triton.hopper.common.records import record
from torch_paged_attn.backends.triton.hopper.common.results import (
    of_heads,
    place_of_result,
    store_result,
)
from torch_paged_attn.backends.triton.hopper.common.softmax import scale_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.consumer import (
    leave_result,
    read_rows,
    sum_values,
)

# consumers of the same rows
SHARING = gl.constexpr(2)


@record
class Halves:
    """What the second consumer leaves of a tile: weighted sums of values, float32, and by row
    references in base two and sums of weights."""

    sums: gl.shared_memory_descriptor
    references: gl.shared_memory_descriptor
    totals: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def acquire(self, tile):
        """Wait until what was left of the tile before has been taken."""
        mbarrier.wait(self.empty.index(0), (tile & 1) ^ 1)

    @gluon.jit
    def commit(self, m_i, total):
        """Leave references and sums of weights, beside sums of values that were left before."""
        self.references.store(m_i)
        self.totals.store(total)
        thread_barrier()
        mbarrier.arrive(self.full.index(0), count=1)

    @gluon.jit
    def joined(self, tile, acc, m_i, total):
        """Sums, references and sums of weights of all keys, from those of a half."""
        by_row: gl.constexpr = m_i.type.layout
        mbarrier.wait(self.full.index(0), tile & 1)
        m_left, total_left = self.references.load(by_row), self.totals.load(by_row)
        left = self.sums.load(acc.type.layout)
        thread_barrier()
        mbarrier.arrive(self.empty.index(0), count=1)
        m_all = gl.maximum(m_i, m_left)
        shift = finite_or_zero(m_all)
        own, other = gl.exp2(m_i - shift), gl.exp2(m_left - shift)
        # where nothing was left, the memory may hold anything
        is_left = gl.expand_dims(
            gl.convert_layout(m_left > -float("inf"), gl.SliceLayout(1, acc.type.layout)), 1
        )
        acc = scale_rows(acc, own) + scale_rows(gl.where(is_left, left, 0.0), other)
        return acc, m_all, total * own + total_left * other


@gluon.jit
def new_halves(ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Room for one tile's."""
    # eight rows of a product's layout lie in banks of their own
    of_sums: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    of_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sums = gl.allocate_shared_memory(gl.float32, [ROWS, WIDTH], of_sums)
    references = gl.allocate_shared_memory(gl.float32, [ROWS], of_rows)
    totals = gl.allocate_shared_memory(gl.float32, [ROWS], of_rows)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], barrier)
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(empty.index(0), count=1)
    return Halves(sums, references, totals, full, empty)


@gluon.jit
def consume_split(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The rows of every tile of queries, and every other tile of keys, from the last one or the one
    before it on."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.BLOCK_N, 16])
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    queries, work_info, halves = pipelines.q, pipelines.work_info, pipelines.halves
    r = gl.arange(0, OPTIONS.BLOCK_M, score_rows)
    first_fill = 0
    tile = 0
    queries.consumer_wait(0)
    num_kv_tiles = work_info.get(0, WORD.NUM_KV_TILES)
    while num_kv_tiles > 0:
        rows = read_rows(r, params, pipelines, tile, OPTIONS, 0)
        if INDEX == 0:
            acc, m_i, total = _sum_values(
                rows, first_fill, num_kv_tiles, tile, params, pipelines, OPTIONS, INDEX
            )
            sums = halves.joined(tile, acc, m_i, total)
            token = rows.position - rows.context_len
            at = (r, token, of_heads(token < rows.stop_token, r, OPTIONS), rows.is_sequence)
            place = place_of_result(rows.box, params.out_desc)
            stop_token = leave_result(sums, place, at, rows, params, pipelines, tile, OPTIONS, 0)
            if OPTIONS.FLOAT32_COLUMNS == 0:
                store_result(rows.box, rows, stop_token, params, OPTIONS)
            if queries.STAGES == 1:
                tma.store_wait(0)
                queries.consumer_release(tile)
        else:
            halves.acquire(tile)
            if num_kv_tiles > INDEX:
                acc, m_i, total = _sum_values(
                    rows, first_fill, num_kv_tiles, tile, params, pipelines, OPTIONS, INDEX
                )
                halves.sums.store(acc)
                halves.commit(m_i, total)
            else:
                none = gl.full([OPTIONS.BLOCK_M], -float("inf"), gl.float32, score_rows)
                halves.commit(none, gl.zeros_like(none))
            queries.consumer_release(tile)
        first_fill += num_kv_tiles
        tile += 1
        queries.consumer_wait(tile)
        num_kv_tiles = work_info.get(tile, WORD.NUM_KV_TILES)
    if INDEX == 0:
        tma.store_wait(0)


@gluon.jit
def _sum_values(
    rows, first_fill, num_kv_tiles, tile, params, pipelines, OPTIONS: gl.constexpr,
    INDEX: gl.constexpr,
):  # fmt: skip
    """Weighted sums of values, references and sums of weights of this consumer's tiles of keys, of
    which there is at least one."""
    gl.static_assert(OPTIONS.STRETCH == 0 and not OPTIONS.CONVERTS_V)
    BLOCK_M: gl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    q = rows.box.reshape([BLOCK_M, OPTIONS.WIDTH])
    pending, m_i, total, n = sum_values(
        q, zeros, params.scalars.scale_log2, rows, first_fill + INDEX, num_kv_tiles, tile, params,
        pipelines, OPTIONS, INDEX, SHARING, INDEX,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=[pending])
    pipelines.v.consumer_release(n)
    return acc, m_i, total
