"""The emulator refuses what misuses a compute engine, each instruction for its own fault."""

import re

import numpy as np
import pytest
from nki_emulator import Violation, nisa, nl
from tiles import empty, ones, tile

pytestmark = pytest.mark.usefixtures("machine")
gen2, gen4 = (
    pytest.mark.parametrize("machine", [n], indirect=True, ids=[f"gen{n}"]) for n in (2, 4)
)


def matmul(depth=128, rows=128, columns=512, a=nl.bfloat16, b=nl.bfloat16, out=nl.float32, **kw):
    left, right = ones(depth, rows, dtype=a), ones(depth, columns, dtype=b)
    nisa.nc_matmul(empty(rows, columns, dtype=out, buffer=nl.psum), left, right, **kw)


def across_banks():
    out = empty(128, 600, buffer=nl.psum)
    nisa.nc_matmul(out[:, 50:562], ones(128, 128), ones(128, 512))


def onto_memset():
    out = empty(128, 8, buffer=nl.psum)
    nisa.memset(out, 0.0)
    nisa.nc_matmul(out, ones(128, 128), ones(128, 8), accumulate=True)


def select(data, comp_op0=nl.greater_equal, **kw):
    bounds = ones(8, 1), ones(8, 1)
    nisa.range_select(empty(8, 4), data, comp_op0, nl.less, *bounds, **kw)


# name -> what the refusal says, and the program
FAULTS = {
    "matmul: 1024 columns": (
        "1024 elements a partition; at most 512",
        lambda: matmul(columns=1024),
    ),
    "more than a bank of PSUM": (
        "768 elements a partition; at most 512",
        lambda: nisa.tensor_copy(empty(8, 768), ones(8, 768, buffer=nl.psum)),
    ),
    "rank 5": (
        "tensor_copy: rank 5; at most 4",
        lambda: nisa.tensor_copy(empty(8, 1, 1, 1, 4), ones(8, 4)),
    ),
    "a stride that is no int16": (
        "a stride of 32768 elements; at most 32767",
        lambda: nisa.memset(empty(8, 2, 32768, dtype=nl.uint8)[:, :, 0:4], 0),
    ),
    "matmul: mixed float32": ("float32 goes with float32 only", lambda: matmul(b=nl.float32)),
    "matmul: integers": ("operand of int32", lambda: matmul(a=nl.int32, b=nl.int32)),
    "matmul: bfloat16 result": (
        "a bfloat16 result on generation 3",
        lambda: matmul(out=nl.bfloat16),
    ),
    "matmul: result in SBUF": (
        "writes PSUM",
        lambda: nisa.nc_matmul(empty(4, 4), ones(4, 4), ones(4, 4)),
    ),
    "matmul: operand in PSUM": (
        "reads SBUF",
        lambda: nisa.nc_matmul(empty(4, 4, buffer=nl.psum), ones(4, 4, buffer=nl.psum), ones(4, 4)),
    ),
    "matmul: other depth": (
        "8 and 4 partitions",
        lambda: nisa.nc_matmul(empty(4, 4, buffer=nl.psum), ones(8, 4), ones(4, 4)),
    ),
    "matmul: across banks": ("crosses a PSUM bank", across_banks),
    "matmul: accumulates on nothing": ("no product has started", lambda: matmul(accumulate=True)),
    "matmul: accumulates on memset": ("no product has started", onto_memset),
    "transpose: changes type": (
        "bfloat16 into float32",
        lambda: nisa.nc_transpose(empty(4, 8, buffer=nl.psum), ones(8, 4, dtype=nl.bfloat16)),
    ),
    "transpose: across banks": (
        "nc_transpose: the result crosses a PSUM bank",
        lambda: nisa.nc_transpose(empty(8, 600, buffer=nl.psum)[:, 450:578], ones(128, 8)),
    ),
    "transpose: wide on VectorE": (
        "at most 32 x 32",
        lambda: nisa.nc_transpose(empty(64, 8), ones(8, 64)),
    ),
    "two inputs in PSUM": (
        "both inputs lie in PSUM",
        lambda: nisa.tensor_tensor(
            empty(8, 4), ones(8, 4, buffer=nl.psum), ones(8, 4, buffer=nl.psum), nl.add
        ),
    ),
    "GpSimd in PSUM": (
        "GpSimd does not reach PSUM",
        lambda: nisa.tensor_copy(
            empty(8, 4), ones(8, 4, buffer=nl.psum), engine=nisa.engine.gpsimd
        ),
    ),
    "tiles of other shapes": (
        "(4, 8) into (8, 4)",
        lambda: nisa.tensor_copy(empty(8, 4), ones(4, 8)),
    ),
    "operand is a matrix": (
        "an operand of shape (8, 2)",
        lambda: nisa.tensor_scalar(empty(8, 4), ones(8, 4), nl.add, ones(8, 2)),
    ),
    "operand is bfloat16": (
        "an operand of bfloat16",
        lambda: nisa.tensor_scalar(empty(8, 4), ones(8, 4), nl.add, ones(8, 1, dtype=nl.bfloat16)),
    ),
    "bitwise with arithmetic": (
        "bitwise with arithmetic",
        lambda: nisa.tensor_scalar(
            empty(8, 4, dtype=nl.int32),
            ones(8, 4, dtype=nl.int32),
            nl.left_shift,
            1,
            op1=nl.add,
            operand1=1,
        ),
    ),
    "arithmetic with an operand on GpSimd": (
        "tensor_scalar: not on the gpsimd engine",
        lambda: nisa.tensor_scalar(empty(8, 4), ones(8, 4), nl.add, 1.0, engine=nisa.engine.gpsimd),
    ),
    "predicate is float": (
        "a predicate of float32",
        lambda: nisa.tensor_copy_predicated(ones(8, 4), 0.0, ones(8, 4)),
    ),
    "a constant of another kind": (
        "int into float32",
        lambda: nisa.tensor_copy_predicated(ones(8, 4), 0, ones(8, 4, dtype=nl.uint8)),
    ),
    "a tensor where the predicate is 0": (
        "reverse_pred with a tensor",
        lambda: nisa.tensor_copy_predicated(
            ones(8, 4), ones(8, 4), ones(8, 4, dtype=nl.uint8), reverse_pred=True
        ),
    ),
    "a predicate of rank 5": (
        "tensor_copy_predicated: rank 5; at most 4",
        lambda: nisa.tensor_copy_predicated(
            ones(8, 1, 1, 1, 4), 0.0, ones(8, 1, 1, 1, 4, dtype=nl.uint8)
        ),
    ),
    "a constant of rank 6": (
        "memset: rank 6; at most 5",
        lambda: nisa.memset(empty(8, 1, 1, 1, 1, 4), 0.0),
    ),
    "a reciprocal of rank 6": (
        "reciprocal: rank 6; at most 5",
        lambda: nisa.reciprocal(ones(8, 1, 1, 1, 1, 4), ones(8, 1, 1, 1, 1, 4)),
    ),
    "integers overflow": (
        "overflows uint32",
        lambda: nisa.tensor_tensor(
            empty(8, 4, dtype=nl.uint32),
            *[tile(np.full((8, 4), 2**17, np.uint32)) for _ in range(2)],
            nl.multiply,
        ),
    ),
    "select of integers": (
        "range_select of int32",
        lambda: select(ones(8, 4, dtype=nl.int32)),
    ),
    "select by arithmetic": ("are comparisons", lambda: select(ones(8, 4), comp_op0=nl.add)),
    "select with another filling": (
        "on_false_value is FP32_MIN",
        lambda: select(ones(8, 4), on_false_value=0.0),
    ),
    "select past what float32 counts": (
        "places below 2**24",
        lambda: select(ones(8, 4), range_start=2**24 - 3),
    ),
    "select from a number known on the chip": (
        "allowed: constants",
        lambda: select(ones(8, 4), range_start=nisa.register_alloc(0)),
    ),
    "maximum of rounded values": (
        "allowed: reduce_res of float32",
        lambda: nisa.range_select(
            empty(8, 4, dtype=nl.bfloat16),
            ones(8, 4),
            nl.greater_equal,
            nl.less,
            ones(8, 1),
            ones(8, 1),
            reduce_res=empty(8, 1, dtype=nl.bfloat16),
        ),
    ),
    "exponential on the third generation": (
        "came with the fourth generation",
        lambda: nisa.exponential(empty(8, 4), ones(8, 4)),
    ),
    "memset of ints with a float": (
        "memset of int32 with a float",
        lambda: nisa.memset(empty(8, 4, dtype=nl.int32), 1.0),
    ),
    "memset of floats with an int": (
        "memset of float32 with a int",
        lambda: nisa.memset(empty(8, 4), 1),
    ),
    "reduces partitions": (
        "allowed: the last free ones",
        lambda: nisa.tensor_reduce(empty(8, 1), nl.add, ones(8, 4), axis=(0, 1)),
    ),
    "log of 0": (
        "log outside",
        lambda: nisa.activation(empty(8, 4), nl.log, tile(np.zeros((8, 4), np.float32))),
    ),
    "activation of an operation": (
        "is not a function of ScalarE",
        lambda: nisa.activation(empty(8, 4), nl.add, ones(8, 4)),
    ),
    "odd first partition": ("2 partitions from 1 on", lambda: nisa.memset(empty(128, 4)[1:3], 0.0)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_refuses(fault):
    message, program = FAULTS[fault]
    with pytest.raises((Violation, TypeError), match=re.escape(message)):
        program()


@gen2
def test_second_generation_lacks(machine):
    with pytest.raises(Violation, match="writes float32"):
        nisa.nc_transpose(
            empty(4, 8, dtype=nl.bfloat16, buffer=nl.psum), ones(8, 4, dtype=nl.bfloat16)
        )
    with pytest.raises(Violation, match="bias from a tile"):
        nisa.activation(empty(8, 4), nl.exp, ones(8, 4), bias=1.0)
    with pytest.raises(Violation, match="range_select came with the third generation"):
        select(ones(8, 4))
    with pytest.raises(Violation, match="third generation"):
        nisa.tensor_copy(empty(8, 4), ones(8, 4), engine=nisa.engine.scalar)


@pytest.mark.parametrize("machine", [2, 3], indirect=True)
def test_e4m3fn_came_with_the_fourth_generation(machine):
    with pytest.raises(Violation, match="from the fourth on"):
        ones(8, 4, dtype=nl.uint8).view(nl.float8_e4m3fn)
    with pytest.raises(Violation, match="from the fourth on"):
        empty(8, 4, dtype=nl.float8_e4m3fn)


@gen4
def test_fourth_generation_has(machine):
    matmul(columns=4096, out=nl.float32)
    matmul(out=nl.bfloat16)
    matmul(a=nl.float8_e4m3fn, b=nl.float8_e4m3fn)


@gen4
def test_fourth_generation_refuses(machine):
    with pytest.raises(Violation, match="float8_e4m3 with float8_e4m3fn"):
        matmul(a=nl.float8_e4m3, b=nl.float8_e4m3fn)
    with pytest.raises(Violation, match="float32 into uint32"):
        nisa.exponential(empty(8, 4, dtype=nl.uint32), ones(8, 4))
    with pytest.raises(Violation, match="reduce_init without load_reduce"):
        nisa.exponential(empty(8, 4), ones(8, 4), reduce_init=1.0)
    with pytest.raises(Violation, match="rank 5; at most 4"):
        nisa.exponential(empty(8, 1, 1, 1, 4), ones(8, 4))
