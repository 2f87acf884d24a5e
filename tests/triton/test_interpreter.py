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


BLOCK = tl.block_type(tl.pointer_type(tl.float32), [4, 2])
MADE = [
    (tl.tuple_type, [tl.int32, tl.tuple_type([tl.float32])]),
    (tl.tuple_type, [tl.int32, tl.tuple_type([tl.float32])], ["a", "b"]),
    (tl.block_type, tl.int32, [2, tl.constexpr(4)]),
    (tl.block_type, tl.pointer_type(tl.int8), tl.tuple([tl.constexpr(16)])),
    (tl.constexpr, tl.constexpr(3)),
    (tl.tuple, [tl.constexpr(1), tl.constexpr(2.5)]),
    (tl.tuple, [tl.constexpr(1)], [tl.int32]),
    (tl.tensor, None, BLOCK),
    (tl.tensor, None, tl.float16),
]


@pytest.mark.parametrize("made", MADE, ids=[f"{kind.__name__}-{len(x)}" for kind, *x in MADE])
def test_what_is_made_late_is_the_same(made):
    kind, *args = made
    (init,) = (x for owner, name, x in quick.ORIGINALS if owner is kind and name == "__init__")
    wanted, late = kind.__new__(kind), {name for owner, name, _ in quick.LATE if owner is kind}
    init(wanted, *args)
    found = kind(*args)
    if not (kind is tl.tuple and len(args) == 2):  # then its type is given
        assert late <= vars(wanted).keys() and late.isdisjoint(vars(found))
    for name, value in vars(wanted).items():
        late_one = getattr(found, name)
        assert type(late_one) is type(value) and str(late_one) == str(value), name
    assert vars(found).keys() == vars(wanted).keys()


@pytest.mark.parametrize(
    ("shape", "error"), [([], TypeError), ([3], ValueError), ([2.0], TypeError)]
)
def test_shapes_that_no_block_has_are_errors(shape, error):
    for _ in range(2):
        with pytest.raises(error):
            tl.block_type(tl.int32, shape)


def test_no_assertion_about_sums_is_left_out():
    """Those that the interpreter prepares are not made: its option `debug` is off."""
    builder = quick.interpreter.InterpreterBuilder()
    assert builder.options.sanitize_overflow and not builder.options.debug
    assert quick.interpreter.interpreter_builder.options != builder.options


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
