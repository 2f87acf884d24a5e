"""What the emulator computes beyond single instructions (`test_instructions.py`): views, state."""

import ml_dtypes
import numpy as np
import pytest
from nki_emulator import nisa, nl, simulate
from tiles import empty, hbm, tile

pytestmark = pytest.mark.usefixtures("machine")
RNG = np.random.default_rng(0)


def randn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_matmul_contracts_partitions(dtype):
    a, b = randn(96, 32).astype(dtype), randn(96, 512).astype(dtype)
    out = empty(32, 512, buffer=nl.psum)
    nisa.nc_matmul(out, tile(a), tile(b))
    expected = a.astype(np.float32).T @ b.astype(np.float32)
    np.testing.assert_array_equal(out.read(), expected)


def test_matmul_accumulates_when_told_and_by_itself():
    a, b = tile(randn(64, 32)), tile(randn(64, 40))
    product = a.read().T @ b.read()
    out = empty(32, 40, buffer=nl.psum)
    nisa.nc_matmul(out, a, b, accumulate=False)
    nisa.nc_matmul(out, a, b, accumulate=True)
    np.testing.assert_array_equal(out.read(), product + product)
    nisa.nc_matmul(out, a, b)
    np.testing.assert_array_equal(out.read(), product + product + product)
    nisa.nc_matmul(out, a, b, accumulate=False)
    np.testing.assert_array_equal(out.read(), product)


def test_transpose_keeps_bits():
    values = randn(128, 80).astype(ml_dtypes.bfloat16)
    values[3, 4] = np.nan
    out = empty(80, 128, dtype=nl.bfloat16, buffer=nl.psum)
    nisa.nc_transpose(out, tile(values))
    np.testing.assert_array_equal(out.read().view(np.int16), values.T.view(np.int16))
    small = randn(32, 32)
    out = empty(32, 32)
    nisa.nc_transpose(out, tile(small), engine=nisa.engine.vector)
    np.testing.assert_array_equal(out.read(), small.T)


def test_integers_are_exact_in_sbuf_and_float32_elsewhere():
    x = np.full((4, 2), 2**24 + 1, np.int32)
    one = np.ones((4, 2), np.int32)
    out = empty(4, 2, dtype=nl.int32)
    nisa.tensor_tensor(out, tile(x), tile(one), nl.add)
    assert (out.read() == 2**24 + 2).all()
    nisa.tensor_scalar(out, tile(x), nl.add, 1.0)
    assert (out.read() == 2**24).all()  # 2**24 + 1 is no float32; ties go to even


def test_reduce_takes_the_last_dimensions():
    x = randn(16, 3, 5)
    out = empty(16, 1)
    nisa.tensor_reduce(out, nl.maximum, tile(x), axis=(1, 2), negate=True)
    np.testing.assert_array_equal(out.read()[:, 0], -x.max((1, 2)))
    out = empty(16, 3)
    nisa.tensor_reduce(out, nl.add, tile(x), axis=2)
    np.testing.assert_array_equal(out.read(), x.sum(2))


def test_activation_scales_shifts_and_sums():
    # two numbers have one sum, in whatever order
    x, scale, bias = randn(64, 2), randn(64, 1), randn(64, 1)
    out, total = empty(64, 2, dtype=nl.bfloat16), empty(64, 1)
    for command, times in ((nisa.reduce_cmd.reset_reduce, 1), (nisa.reduce_cmd.reduce, 2)):
        nisa.activation(
            out,
            nl.exp,
            tile(x),
            bias=tile(bias),
            scale=tile(scale),
            reduce_op=nl.add,
            reduce_res=total,
            reduce_cmd=command,
        )
        expected = np.exp(x * scale + bias)
        np.testing.assert_array_equal(out.read(), expected.astype(ml_dtypes.bfloat16))
        np.testing.assert_array_equal(total.read()[:, 0], times * expected.sum(1))


def test_predicated_copy_selects_and_does_not_multiply():
    x, mask = np.full((8, 4), np.nan, np.float32), RNG.integers(0, 2, (8, 4)).astype(np.uint8)
    out = tile(x)
    nisa.tensor_copy_predicated(out, 0.0, tile(mask))
    np.testing.assert_array_equal(out.read(), np.where(mask, 0, x))
    nisa.tensor_copy_predicated(out, 1.0, tile(mask), reverse_pred=True)
    np.testing.assert_array_equal(out.read(), np.where(mask, 0.0, 1.0))


def test_iota_counts_partitions_and_patterns():
    out = empty(4, 2, 3, dtype=nl.int32)
    nisa.iota(out, pattern=[[100, 2], [1, 3]], offset=7, channel_multiplier=10)
    p, i, j = np.ogrid[:4, :2, :3]
    np.testing.assert_array_equal(out.read(), 7 + 10 * p + 100 * i + j)


def test_gather_moves_rows_with_an_offset_and_a_stride():
    cache = randn(10, 12)
    index = np.array([[7], [0], [7], [9]], np.int32)
    out = empty(4, 2, 3, dtype=nl.bfloat16)
    rows = hbm(cache).ap(
        pattern=[[12, 4], [6, 2], [1, 3]], offset=2, vector_offset=tile(index), indirect_dim=0
    )
    nisa.dma_copy(out, rows, dge_mode=nisa.dge_mode.swdge)
    expected = cache.reshape(10, 2, 6)[index[:, 0], :, 2:5]
    np.testing.assert_array_equal(out.read(), expected.astype(ml_dtypes.bfloat16))


def test_scatter_skips_what_is_outside_when_told():
    cache, new = hbm(np.zeros((6, 3), np.float32)), randn(4, 3)
    index = np.array([[5], [-1], [2], [6]], np.int32)
    rows = cache.ap(pattern=[[3, 4], [1, 3]], vector_offset=tile(index), indirect_dim=0)
    nisa.dma_copy(rows, tile(new), oob_mode=nisa.oob_mode.skip)
    expected = np.zeros((6, 3), np.float32)
    expected[[5, 2]] = new[[0, 2]]
    np.testing.assert_array_equal(cache.read(), expected)


def test_scalar_offset_from_a_tile_and_from_a_register():
    table = hbm(randn(5, 4, 3))
    for offset in (tile(np.array([[3]], np.int32)), nisa.register_alloc(3)):
        out = empty(4, 3)
        nisa.dma_copy(out, table.ap([[3, 4], [1, 3]], scalar_offset=offset, indirect_dim=0))
        np.testing.assert_array_equal(out.read(), table.read()[3])


def test_a_start_that_is_outside_is_skipped_when_told():
    table, out = hbm(randn(5, 3)), tile(np.zeros((1, 3), np.float32))
    for row in (-1, 5):
        start = tile(np.array([[row]], np.int32))
        for dst, src in (
            (out, table.ap([[3, 1], [1, 3]], scalar_offset=start)),
            (table.ap([[3, 1], [1, 3]], scalar_offset=start), out),
        ):
            before = table.read().copy()
            nisa.dma_copy(dst, src, oob_mode=nisa.oob_mode.skip)
            np.testing.assert_array_equal(table.read(), before)
            assert not out.read().any()


def test_slices_and_reshapes_are_views():
    values = randn(8, 4, 6)
    whole = tile(values)
    np.testing.assert_array_equal(whole[:, 1, 2:6:2].read(), values[:, 1, 2:6:2])
    np.testing.assert_array_equal(whole[3].read(), values[3:4])
    np.testing.assert_array_equal(whole[:, nl.ds(1, 2)].read(), values[:, 1:3])
    np.testing.assert_array_equal(whole.reshape((8, 24)).read(), values.reshape(8, 24))


def test_registers_move_through_memory():
    register, out = nisa.register_alloc(), empty(1, 1, dtype=nl.int32)
    nisa.register_load(register, tile(np.array([[41]], np.int32)))
    nisa.register_store(out, register)
    assert out.read().item() == 41


def test_programs_share_their_results():
    def kernel(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        program = nl.program_id(0)
        nisa.dma_copy(out[program : program + 1], x[program : program + 1])
        return out

    x = randn(2, 5)
    for reverse in (False, True):
        np.testing.assert_array_equal(simulate(kernel, 2, reverse)(x), x)
