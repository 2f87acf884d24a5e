"""The producer of the kernel for latent attention with keys of 8 bits, a warp: it finds its
program's share of the keys as `producer.py` does, and has the tensor memory accelerator load
them. Consumers read the queries themselves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.tma import load_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from torch_paged_attn.backends.triton.hopper.mla.producer import (
    find_boxes,
    first_share,
    rest_of,
    tile_of,
    write_tile_info,
)
from torch_paged_attn.backends.triton.hopper.mla.stages_8bit import BOX, KEYS, LATENT


@gluon.jit
def _load_block(n, boxes, params, keys, OPTIONS: gl.constexpr):
    """Load a block of keys as fill n; `boxes` are as `find_boxes` returns them."""
    ROWS: gl.constexpr = OPTIONS.BOX_ROWS
    OF_LATENT: gl.constexpr = params.k_desc.block_type.nbytes * (LATENT // BOX)
    OF_ROPE: gl.constexpr = params.k_rope_desc.block_type.nbytes
    keys.acquire(n)
    barrier = keys.full_barrier(n)
    stage = n % keys.STAGES
    latent, rope = keys.latent.index(stage), keys.rope.index(stage)
    mbarrier.expect(barrier, (OF_LATENT + OF_ROPE) * len(boxes))
    for i in gl.static_range(len(boxes)):
        first, size, row = boxes[i]
        rows = latent.slice(i * ROWS, ROWS, dim=2)
        for j in gl.static_range(LATENT // BOX):
            box = rows.slice(j * BOX, BOX, dim=4)
            load_rows(params.k_desc, first, size, row, 0, barrier, box, j * BOX)
        box = rope.slice(i * ROWS, ROWS, dim=2)
        load_rows(params.k_rope_desc, first, size, row, 0, barrier, box, LATENT)


@gluon.jit
def produce_bytes(params, pipelines, OPTIONS: gl.constexpr):
    """Write the words about each tile of a program's share, one after the other, and load its
    keys."""
    keys, work_info = pipelines.k, pipelines.work_info
    wait_for_kernel_before()
    # so that `combine.py` need only wait for the programs to end
    let_next_kernel_start()
    share = first_share(params, OPTIONS)
    n = 0
    tile = 0
    while share.unit < share.stop:
        found, context_len = tile_of(share, params, OPTIONS)
        if found.units > 0:
            mbarrier.wait(pipelines.read.index(0), (tile & 1) ^ 1)
            write_tile_info(tile, found, context_len, share, work_info, OPTIONS)
            work_info.publish(tile)
            start = found.first * OPTIONS.UNIT_KEYS
            for _ in range(found.units * (OPTIONS.UNIT_KEYS // KEYS)):
                boxes = find_boxes(
                    start, found.table, found.k_start, found.key_len, params, OPTIONS
                )
                _load_block(n, boxes, params, keys, OPTIONS)
                start += KEYS
                n += 1
            tile += 1
        share = rest_of(share, found)
    mbarrier.wait(pipelines.read.index(0), (tile & 1) ^ 1)
    work_info.put(tile, WORD.NUM_KV_TILES, 0)
    thread_barrier()
    work_info.publish(tile)
