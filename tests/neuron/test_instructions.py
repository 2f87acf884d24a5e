"""One small kernel for each instruction, against NumPy: on the emulator, and on `nki.simulate`
where the wheel is installed.
"""

import contextlib
import dataclasses
import types
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import nki_emulator
import numpy as np
import pytest
from nki_emulator import emulated
from nki_emulator.signatures import ISA

RNG = np.random.default_rng(0)
P = 128
FP32_MIN = np.finfo(np.float32).min


def implementations():
    """`nl`, `nisa` and `simulate(kernel)`, by name."""
    found = {"emulator": nki_emulator}
    with contextlib.suppress(ImportError, AttributeError):  # what PyPI has raises, or is another
        import nki
        import nki.isa
        import nki.language

        found["nki.simulate"] = types.SimpleNamespace(
            nl=nki.language, nisa=nki.isa, simulate=nki.simulate
        )
    return found


IMPLEMENTATIONS = implementations()


@dataclasses.dataclass(frozen=True)
class Case:
    """`instruct(nki, dst, *tiles)` writes `expected` to dst, a tile like it in SBUF."""

    instruct: Callable
    expected: np.ndarray
    inputs: tuple = ()
    generation: int = 3


def f32(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def integers(*shape):
    """Small ones, whose products and sums float32 and bfloat16 hold in whatever order."""
    return RNG.integers(-8, 9, shape).astype(np.float32)


def u32(*shape):
    return RNG.integers(0, 2**32, shape, dtype=np.uint32)


def psum(nki, rows, columns, dtype=None):
    return nki.nl.ndarray((rows, columns), dtype=dtype or nki.nl.float32, buffer=nki.nl.psum)


def matmul(nki, dst, a, b, times=1):
    product = psum(nki, *dst.shape)
    for i in range(times):
        nki.nisa.nc_matmul(dst=product, stationary=a, moving=b, accumulate=i > 0)
    nki.nisa.tensor_copy(dst=dst, src=product)


def transpose(nki, dst, a):
    turned = psum(nki, *dst.shape, dtype=a.dtype)
    nki.nisa.nc_transpose(dst=turned, data=a, engine=nki.nisa.engine.tensor)
    nki.nisa.tensor_copy(dst=dst, src=turned)


def transpose_by_dma(nki, dst, a):
    nki.nisa.dma_transpose(dst=dst, src=a, axes=(2, 1, 0) if len(a.shape) == 3 else (1, 0))


def transpose_by_product(nki, dst, a):
    turned = psum(nki, *dst.shape)
    identity = nki.nl.shared_identity_matrix(P, dtype=a.dtype)
    nki.nisa.nc_matmul(
        dst=turned, stationary=a, moving=identity, is_moving_onezero=True, accumulate=False
    )
    nki.nisa.tensor_copy(dst=dst, src=turned)


def select_range(nki, dst, x, low, high):
    columns = x.shape[1]
    nki.nisa.range_select(
        dst=dst[:, 0:columns],
        on_true_tile=x,
        comp_op0=nki.nl.greater_equal,
        comp_op1=nki.nl.less,
        bound0=low,
        bound1=high,
        reduce_res=dst[:, columns : columns + 1],
    )


def exponential_and_sum(nki, dst, x, top):
    columns = x.shape[1]
    nki.nisa.exponential(
        dst=dst[:, 0:columns],
        src=x,
        max_value=top,
        reduce_res=dst[:, columns : columns + 1],
        reduce_cmd=nki.nisa.reduce_cmd.reset_reduce,
    )


def activation_and_sum(nki, dst, x, scale, bias):
    columns = x.shape[1]
    nki.nisa.activation(
        dst=dst[:, 0:columns],
        op=nki.nl.exp,
        data=x,
        scale=scale,
        bias=bias,
        reduce_op=nki.nl.add,
        reduce_res=dst[:, columns : columns + 1],
        reduce_cmd=nki.nisa.reduce_cmd.reset_reduce,
    )


def gather(nki, dst, x, index):
    """Rows of an array in HBM; those outside are skipped, and keep dst's zeros."""
    columns = x.shape[1]
    table = nki.nl.ndarray(x.shape, dtype=x.dtype, buffer=nki.nl.hbm)
    nki.nisa.dma_copy(dst=table, src=x)
    nki.nisa.memset(dst=dst, value=0.0)
    rows = table.ap(
        pattern=[[columns, dst.shape[0]], [1, columns]], vector_offset=index, indirect_dim=0
    )
    nki.nisa.dma_copy(
        dst=dst, src=rows, oob_mode=nki.nisa.oob_mode.skip, dge_mode=nki.nisa.dge_mode.swdge
    )


def scatter(nki, dst, x, index):
    columns = x.shape[1]
    table = nki.nl.ndarray(dst.shape, dtype=x.dtype, buffer=nki.nl.hbm)
    nki.nisa.memset(dst=dst, value=0.0)
    nki.nisa.dma_copy(dst=table, src=dst)
    rows = table.ap(
        pattern=[[columns, x.shape[0]], [1, columns]], vector_offset=index, indirect_dim=0
    )
    nki.nisa.dma_copy(
        dst=rows, src=x, oob_mode=nki.nisa.oob_mode.skip, dge_mode=nki.nisa.dge_mode.swdge
    )
    nki.nisa.dma_copy(dst=dst, src=table)


def row_of_register(nki, dst, x, index):
    table = nki.nl.ndarray((x.shape[0], 1, x.shape[1]), dtype=x.dtype, buffer=nki.nl.hbm)
    nki.nisa.dma_copy(dst=table, src=x)
    register = nki.nisa.register_alloc()
    nki.nisa.register_load(register, index)
    row = table.ap(pattern=[[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=register)
    nki.nisa.dma_copy(dst=dst, src=row)


def registers(nki, dst, x):
    """From a tile to a register, to another, and back."""
    register, other = nki.nisa.register_alloc(), nki.nisa.register_alloc(0)
    nki.nisa.register_load(register, x)
    nki.nisa.register_move(other, register)
    nki.nisa.register_store(dst, other)


def loop(nki, dst, x):
    """Rows one by one, in a loop whose end is a register."""
    columns = x.shape[1]
    table = nki.nl.ndarray((x.shape[0], 1, columns), dtype=x.dtype, buffer=nki.nl.hbm)
    nki.nisa.dma_copy(dst=table, src=x)
    nki.nisa.memset(dst=dst, value=0.0)

    def body(i):
        row = nki.nl.ndarray((1, columns), dtype=x.dtype, buffer=nki.nl.sbuf)
        nki.nisa.dma_copy(dst=row, src=table.ap([[columns, 1], [1, columns]], scalar_offset=i))
        nki.nisa.tensor_tensor(dst=dst, data1=dst, data2=row, op=nki.nl.add)

    nki.nl.fori_loop(0, nki.nisa.register_alloc(x.shape[0]), body)


def spread(nki, dst, x):
    """A column on every place of its row, by a stride of 0."""
    nki.nisa.tensor_copy(dst=dst, src=x.ap(pattern=[[x.shape[1], P], [0, dst.shape[1]]], offset=2))


A, B = integers(96, 32), integers(96, 64)
X, Y, C, D = f32(P, 6), f32(P, 6), f32(P, 1), f32(P, 1)
H, H3 = f32(P, 6).astype(ml_dtypes.bfloat16), f32(16, 3, P).astype(np.float16)
U, V = u32(P, 6), u32(P, 6)
SMALL = RNG.integers(0, 2**16, (2, P, 6), dtype=np.uint32)
MASK = RNG.integers(0, 2, (P, 6)).astype(np.uint8)
LOW, HIGH = (RNG.integers(0, 7, (P, 1)).astype(np.float32) for _ in range(2))
INSIDE = (np.arange(6) >= LOW) & (np.arange(6) < HIGH)
KEPT = np.where(INSIDE, X, FP32_MIN)
INDEX = np.array([[5], [-1], [2], [9]], np.int32)
ROWS = integers(6, 8)
PAIR = f32(P, 2)  # two numbers have one sum, in whatever order
BYTES = RNG.integers(0, 0x7C, (P, 6)).astype(np.uint8)  # no infinity of float8_e5m2, no NaN


def scalar(op0, operand0, **more):
    return lambda nki, dst, x: nki.nisa.tensor_scalar(
        dst=dst,
        data=x,
        op0=getattr(nki.nl, op0),
        operand0=operand0,
        **{k: getattr(nki.nl, v) if k == "op1" else v for k, v in more.items()},
    )


def tensors(op):
    return lambda nki, dst, x, y: nki.nisa.tensor_tensor(
        dst=dst, data1=x, data2=y, op=getattr(nki.nl, op)
    )


def with_sum(values):
    return np.concatenate([values, values.sum(1, keepdims=True)], 1)


CASES = {
    "nc_matmul": Case(matmul, A.T @ B, (A, B)),
    "nc_matmul accumulates": Case(
        lambda nki, dst, a, b: matmul(nki, dst, a, b, times=2), 2 * (A.T @ B), (A, B)
    ),
    "nc_matmul of bfloat16": Case(
        matmul,
        A.astype(ml_dtypes.bfloat16).astype(np.float32).T
        @ B.astype(ml_dtypes.bfloat16).astype(np.float32),
        (A.astype(ml_dtypes.bfloat16), B.astype(ml_dtypes.bfloat16)),
    ),
    "nc_transpose": Case(transpose, X.T.copy(), (X,)),
    "dma_transpose": Case(transpose_by_dma, H.T.copy(), (H,)),
    "dma_transpose of three dimensions": Case(
        transpose_by_dma, H3.transpose(2, 1, 0).copy(), (H3,)
    ),
    "transposing by a product": Case(transpose_by_product, X.T.copy(), (X,), generation=2),
    "tensor_scalar": Case(
        scalar("multiply", 3.0, op1="add", operand1=1.5), X * 3 + np.float32(1.5), (X,)
    ),
    "tensor_scalar reversed": Case(scalar("subtract", 2.0, reverse0=True), 2 - X, (X,)),
    "tensor_scalar of bits": Case(
        scalar("bitwise_and", 0xFFFF, op1="left_shift", operand1=16), (U & 0xFFFF) << 16, (U,)
    ),
    "shifts to the right are logical": Case(scalar("right_shift", 16), U >> 16, (U,)),
    "scalar_tensor_tensor": Case(
        lambda nki, dst, x, y, c: nki.nisa.scalar_tensor_tensor(
            dst=dst, data=x, op0=nki.nl.multiply, operand0=c, op1=nki.nl.add, operand1=y
        ),
        X * C + Y,
        (X, Y, C),
    ),
    "tensor_tensor": Case(tensors("maximum"), np.maximum(X, Y), (X, Y)),
    "tensor_tensor compares": Case(tensors("less"), (X < Y).astype(np.uint8), (X, Y)),
    "products of 16 bits are exact": Case(tensors("multiply"), SMALL[0] * SMALL[1], tuple(SMALL)),
    "comparisons of 32 bits are exact": Case(tensors("less"), (U < V).astype(np.uint32), (U, V)),
    "exclusive or": Case(tensors("bitwise_xor"), U ^ V, (U, V)),
    "or": Case(tensors("bitwise_or"), U | V, (U, V)),
    "tensor_reduce": Case(
        lambda nki, dst, x: nki.nisa.tensor_reduce(dst=dst, op=nki.nl.maximum, data=x, axis=1),
        X.max(1, keepdims=True),
        (X,),
    ),
    "activation sums": Case(activation_and_sum, with_sum(np.exp(PAIR * C + D)), (PAIR, C, D)),
    "reciprocal": Case(lambda nki, dst, x: nki.nisa.reciprocal(dst=dst, data=x), 1 / X, (X,)),
    "range_select": Case(
        select_range,
        np.concatenate([KEPT, KEPT.max(1, keepdims=True)], 1),
        (X, LOW, HIGH),
    ),
    "exponential": Case(exponential_and_sum, with_sum(np.exp(PAIR - C)), (PAIR, C), generation=4),
    "tensor_copy rounds to even": Case(
        lambda nki, dst, x: nki.nisa.tensor_copy(dst=dst, src=x),
        np.array([[0, 2, 2, -128, 127]], np.int8),
        (np.array([[0.5, 1.5, 2.5, -300.0, 300.0]], np.float32),),
    ),
    "tensor_copy_predicated": Case(
        lambda nki, dst, x, mask: (
            nki.nisa.tensor_copy(dst=dst, src=x),
            nki.nisa.tensor_copy_predicated(dst=dst, src=0.0, predicate=mask),
        ),
        np.where(MASK, 0, X),
        (X, MASK),
    ),
    "memset": Case(
        lambda nki, dst: nki.nisa.memset(dst=dst, value=0xD2511F53),
        np.full((P, 3), 0xD2511F53, np.uint32),
    ),
    "iota": Case(
        lambda nki, dst: nki.nisa.iota(
            dst=dst, pattern=[[100, 2], [1, 3]], offset=7, channel_multiplier=10
        ),
        np.float32(7 + 10 * np.arange(P)[:, None] + np.array([[0, 1, 2, 100, 101, 102]])),
    ),
    "gather skips": Case(
        gather, np.where((INDEX >= 0) & (INDEX < 6), ROWS[INDEX[:, 0] % 6], 0), (ROWS, INDEX)
    ),
    "scatter skips": Case(
        scatter,
        np.stack([ROWS[{5: 0, 2: 2}[i]] if i in (5, 2) else 0 * ROWS[0] for i in range(6)]),
        (ROWS[:4], INDEX),
    ),
    "scalar_offset": Case(row_of_register, ROWS[3:4], (ROWS, np.array([[3]], np.int32))),
    "registers": Case(registers, np.array([[41]], np.int32), (np.array([[41]], np.int32),)),
    "fori_loop": Case(loop, ROWS.sum(0, keepdims=True), (ROWS,)),
    "a stride of 0": Case(spread, np.repeat(X[:, 2:3], 5, 1), (X,)),
    "view": Case(
        lambda nki, dst, x: nki.nisa.tensor_copy(dst=dst, src=x.view(nki.nl.float8_e5m2)),
        BYTES.view(ml_dtypes.float8_e5m2).astype(np.float32),
        (BYTES,),
    ),
}


@pytest.mark.parametrize("instruction", sorted(ISA.keys() - {"get_nc_version"}))
def test_every_instruction_has_a_kernel(instruction):
    assert f"nki.nisa.{instruction}(" in Path(__file__).read_text()


def runs():
    """Every case on the emulator, those of the third generation on AWS's simulator too."""
    return [
        (implementation, name)
        for implementation in IMPLEMENTATIONS
        for name, case in CASES.items()
        if implementation == "emulator" or case.generation == 3
    ]


@pytest.mark.parametrize("implementation, name", runs())
def test_computes_what_is_documented(implementation, name):
    case, nki = CASES[name], IMPLEMENTATIONS[implementation]
    blank = np.zeros((1, 1), np.float32)
    arrays = (*case.inputs, *[blank] * (3 - len(case.inputs)))

    def kernel(a, b, c):
        tiles = []
        for array in (a, b, c)[: len(case.inputs)]:
            tile = nki.nl.ndarray(array.shape, dtype=array.dtype, buffer=nki.nl.sbuf)
            nki.nisa.dma_copy(dst=tile, src=array)
            tiles.append(tile)
        dtype = getattr(nki.nl, str(case.expected.dtype))
        dst = nki.nl.ndarray(case.expected.shape, dtype=dtype, buffer=nki.nl.sbuf)
        case.instruct(nki, dst, *tiles)
        out = nki.nl.ndarray(case.expected.shape, dtype=dtype, buffer=nki.nl.shared_hbm)
        nki.nisa.dma_copy(dst=out, src=dst)
        return out

    with emulated(case.generation):
        found = nki.simulate(kernel)(*(np.ascontiguousarray(a) for a in arrays))
    np.testing.assert_array_equal(found, case.expected)
