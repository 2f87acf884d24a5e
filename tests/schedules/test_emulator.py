"""The emulator: programs by hand, and kernels whose DMAs one can count by hand."""

import aot
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundles import read_program
from emulator import EmulationError, run
from generations import GENERATIONS
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

V5E = GENERATIONS["v5e"]

LOOP = """
     0   :  { %s1_s0 = smov.u32 0 }
   0x1 LB: > { %s2_s0 = sadd.s32 1, %s1_s0  ;;  %v1_v0 = vadd.f32 %v0_v1, %v0_v1 }
   0x2   : > { %p3_p0 = scmp.lt.s32.totalorder %s2_s0, 3 }
   0x3   : > { %4 = sbr.rel (%p3_p0) target bundleno = 1 (0x1), region = 7 }
   0x4   : > {}
   0x5   : > {}
   0x6   : > {}
   0x7   : > { %s5_s1 = sadd.s32 10, %s5_s1 /* a delay slot (counts) */ } /* End region 7 */
   0x8   :  { %6 = sst [smem:[#allocation1]] %s5_s1 }
"""


@pytest.fixture
def program(tmp_path):
    def read(text):
        path = tmp_path / "kernel-packed-bundles-post-ra.txt"
        path.write_text(text)
        return read_program(path)

    return read


def test_loops_run_their_delay_slots(program):
    counts = run(program(LOOP), V5E, {})
    assert counts.bundles == 1 + 3 * 7 + 1
    assert counts.issued == counts.bundles - 3 * 3
    assert counts.units["alu"] == 3


def test_an_unread_operand_leaves_its_register(program):
    text = """
     0   :  { %s9_s3 = smov.u32 2  ;;  %s8_s3 = inlined_call_operand.hbm [index: 0] }
   0x1   :  { %p1_p0 = scmp.ne.s32.totalorder %s9_s3, 2 }
   0x2   :  { %2 = shalt.err (%p1_p0) }
"""
    assert run(program(text), V5E, {}).bundles == 3


def test_arithmetic_without_a_sign(program):
    text = """
     0   :  { %s1_s1 = smov.u32 4294967295  ;;  %s2_s2 = smov.u32 5 }
   0x1   :  { %s3_s3 = smulhi.u32 %s1_s1, %s2_s2  ;;  %s4_s4 = sshllo.u32 %s2_s2, %s2_s2 }
   0x2   :  { %p1_p0 = scmp.ne.s32.totalorder %s3_s3, 4 }
   0x3   :  { %p2_p1 = scmp.ne.s32.totalorder %s4_s4, 191 }
   0x4   :  { %p3_p2 = por %p1_p0, %p2_p1 }
   0x5   :  { %5 = shalt.err (%p3_p2) }
"""
    assert run(program(text), V5E, {}).bundles == 6


def test_a_general_dma_says_where_it_goes(program):
    text = """
     0   :  { %1 = dma.general /*src=*/0, 64, 0, [#allocation1], 0 /* vmem-to-hbm */ }
   0x1   :  { %2 = dma.done.wait [#allocation1], 64 }
"""
    counts = run(program(text), V5E, {})
    assert counts.hbm_bytes == 64 * 32
    assert counts.dmas == {"vmem_to_hbm": 1}


def test_what_hangs_on_vectors_is_an_error(program):
    text = """
     0   :  { %1 = vpush %v0_v0 }
   0x1   :  { %s2_s0 = spop %1 }
   0x2   :  { %p3_p0 = scmp.eq.s32.totalorder %s2_s0, 0 }
   0x3   :  { %4 = sbr.rel (%p3_p0) target bundleno = 0 (0x0), region = 1 }
"""
    with pytest.raises(EmulationError, match="vector"):
        run(program(text), V5E, {})


def test_an_unknown_instruction_is_an_error(program):
    with pytest.raises(EmulationError, match="sfoo"):
        run(program("     0   :  { %1 = sfoo.u32 1 }\n"), V5E, {})


def test_a_wait_for_nothing_is_a_deadlock(program):
    with pytest.raises(EmulationError, match="deadlock"):
        run(program("     0   :  { %1 = dma.done.wait [#allocation1], 32 }\n"), V5E, {})


def _copy_pages(pages, count):
    """Sum the pages that a table names, each fetched by a DMA of its own."""

    def kernel(table, count, pages_hbm, out, page, arrived):
        out[...] = jnp.zeros_like(out)

        def body(i, _):
            copy = pltpu.make_async_copy(pages_hbm.at[table[i]], page, arrived)
            copy.start()
            copy.wait()
            out[...] += page[...]

        lax.fori_loop(0, count[0], body, None)

    def call(table, count, pages):
        grid_spec = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=pl.BlockSpec(memory_space=pltpu.VMEM),
            scratch_shapes=[pltpu.VMEM(pages.shape[1:], pages.dtype), pltpu.SemaphoreType.DMA],
        )
        out = jax.ShapeDtypeStruct(pages.shape[1:], pages.dtype)
        return pl.pallas_call(kernel, out, grid_spec=grid_spec, name="sum_pages")(
            table, count, pages
        )

    shape = jax.ShapeDtypeStruct((pages, 256, 1024), jnp.float32)
    # every second page, in an order that XLA has to compute first
    return (
        lambda table, count, pages: call(table[::-1] * 2, count, pages),
        (np.arange(pages // 2, dtype=np.int32), np.array([count], np.int32), shape),
    )


@pytest.mark.parametrize("name", GENERATIONS)
def test_dma_bytes_are_those_counted_by_hand(name):
    generation = GENERATIONS[name]
    function, arguments = _copy_pages(pages=64, count=29)
    [kernel] = aot.compile_kernels(function, arguments, generation)
    assert kernel.name.startswith("sum_pages")
    assert list(kernel.operands[0][:3]) == [62, 60, 58]
    assert kernel.vmem_bytes >= 256 * 1024 * 4
    counts = kernel.counts(generation)
    assert counts.dmas["hbm_to_vmem"] == 29
    assert counts.dma_bytes["hbm_to_vmem"] == 29 * 256 * 1024 * 4


def test_bundles_follow_the_work():
    def bundles(count):
        [kernel] = aot.compile_kernels(*_copy_pages(64, count), V5E)
        return kernel.counts(V5E).bundles

    one, two, ten = bundles(1), bundles(2), bundles(10)
    assert ten - two == 8 * (two - one) > 0
