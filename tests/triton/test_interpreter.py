"""The interpreter without what it repeats is the interpreter."""

import pytest
import torch
import triton
import triton.language as tl
from covering import some
from same_bits import assert_same_bits

from torch_paged_attn.testing import PROBLEMS, build

if torch.cuda.is_available():
    pytest.skip("kernels are not interpreted where there is a GPU", allow_module_level=True)

quick = pytest.importorskip("quick_interpreter")
if not quick.IS_KNOWN:
    pytest.skip("this Triton's interpreter is used as it is", allow_module_level=True)

NAMES = "sglang/page1/f16", "llama3_8b/mixed/kv_int8"


@pytest.mark.parametrize("name", some(NAMES, "sglang/page1/f16"))
def test_no_bit_differs(name, run, monkeypatch):
    call = build(PROBLEMS[name])
    found = run(call)
    for owner, attribute, value in quick.ORIGINALS:
        assert getattr(owner, attribute) is not value
        monkeypatch.setattr(owner, attribute, value)
    # what the interpreter itself does not take back
    scope = quick._patch_lang(quick._LANGUAGE)
    wanted = run(call)
    scope.restore()
    assert_same_bits(found, wanted)


TYPES = [
    *(tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32),
    *(tl.float8e4nv, tl.float8e5, tl.pointer_type(tl.int8), tl.block_type(tl.bfloat16, [4])),
    tl.block_type(tl.pointer_type(tl.float32), [2, 2]),
]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_types_of_numbers(dtype):
    assert quick.np_dtype(dtype) == quick._np_dtype(dtype)


def test_a_type_that_numpy_lacks_is_an_error():
    with pytest.raises(KeyError):
        quick.np_dtype(tl.void)


@pytest.mark.parametrize("fields", [None, ["a", "b"]])
def test_names_of_types(fields):
    given = [tl.int32, tl.tuple_type([tl.float32])], fields
    (init,) = (value for owner, _, value in quick.ORIGINALS if owner is tl.tuple_type)
    wanted = tl.tuple_type.__new__(tl.tuple_type)
    init(wanted, *given)
    found = tl.tuple_type(*given)
    assert "name" in vars(wanted) and "name" not in vars(found)
    assert str(found) == found.name == wanted.name and found == wanted


@triton.jit
def _refusing(x, IS_RIGHT: tl.constexpr):
    tl.static_assert(IS_RIGHT)
    return x + 1


@triton.jit
def _adding_kernel(x, IS_RIGHT: tl.constexpr):
    tl.store(x, _refusing(tl.load(x), IS_RIGHT))


def test_a_launch_takes_back_what_it_changed():
    def builtins():
        owners = tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base
        return [name for x in owners for name in dir(x) if tl.core.is_builtin(getattr(x, name))]

    before, x = builtins(), torch.zeros(1)
    assert "load" in before
    _adding_kernel[(1,)](x, IS_RIGHT=True)
    assert x == 1 and builtins() == before
    with pytest.raises(triton.runtime.errors.InterpreterError):
        _adding_kernel[(1,)](x, IS_RIGHT=False)
    assert x == 1 and builtins() == before
