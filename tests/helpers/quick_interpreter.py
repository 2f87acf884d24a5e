"""Triton's interpreter without what it repeats, which takes more than half of its time.

It puts its own functions into the language for a launch, and again for each call of a function of
the device; makes a table of NumPy's types for each number that it converts; computes sums and
products of integers again in 64 bits, for an assertion that it then leaves out; and for each tensor
makes types, names and shapes of constants, which are seldom read. Here a launch does the first
once, for the language and its core, and takes it back at its end; the table is made once, and the
rest where it is read. No result has other bits: tests/triton/test_interpreter.py.
"""

import builtins
import functools
import types
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

# the internals of others, which may lack some, have not been read: they are used as they are
IS_KNOWN = triton.__version__.startswith("3.6.")

_patch_lang: Any = getattr(interpreter, "_patch_lang", None)
_np_dtype: Any = getattr(interpreter, "_get_np_dtype", None)
# the interpreter looks for the language in the globals of a function
_LANGUAGE = types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core})


def patch_language(fn: Any) -> Any:
    """What a launch changes, whatever of it the kernel names: functions of the device are not asked
    again.
    """
    return _patch_lang(_LANGUAGE)


def call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """A call of a function of the device, within a launch."""
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


@functools.cache
def _of_scalar(dtype: Any) -> Any:
    return _np_dtype(dtype)


def np_dtype(dtype: Any) -> Any:
    """NumPy's type of a number, or of a block's numbers; pointers are numbers of 64 bits."""
    if isinstance(dtype, tl.block_type):
        dtype = dtype.element_ty
    return _np_dtype(dtype) if isinstance(dtype, tl.pointer_type) else _of_scalar(dtype)


def unwrap(o: Any) -> Any:
    """A constant's value, or those of a sequence of constants."""
    kind = type(o)
    if kind is int or kind is tl.tensor:
        return o
    if isinstance(o, tl.constexpr):
        return o.value
    for kind in list, builtins.tuple, tl.tuple:
        if isinstance(o, kind):
            return kind(unwrap(x) for x in o)
    return o


def unwrap_shape(shape: Any) -> list[Any]:
    """The values of a shape."""
    if isinstance(shape, tl.constexpr):
        shape = shape.value
    return [unwrap(x) for x in shape]


def init_tuple_type(self: Any, types: Any, fields: Any = None) -> None:
    """Of a tuple's type, but for its name."""
    self.types = types
    self.fields = fields or [""] * len(types)


def init_tuple(self: Any, args: Any, type: Any = None) -> None:
    """Of a tuple, whose type is made where it is read unless it is given."""
    self.values = [*args]
    if type is not None:
        self.type = type if isinstance(type, tl.tuple_type) else tl.tuple_type(type)


@functools.lru_cache(maxsize=None, typed=True)  # 2.0 is no 2
def _numbers_in(*shape: int) -> int:
    """How many numbers a block has; an error where it may not have this shape."""
    return core.validate_block_shape(shape)


def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Of a block's type, but for its name."""
    self.element_ty = element_ty
    shape = unwrap_shape(shape)
    if not shape:
        raise TypeError("0d block_type is forbidden")
    self.shape, self.numel = tl.tuple(shape), _numbers_in(*shape)


def init_constant(self: Any, value: Any) -> None:
    """Of a constant, but for its type."""
    while isinstance(value, tl.constexpr):
        value = value.value
    self.value = value


def init_tensor(self: Any, handle: Any, type: Any) -> None:
    """Of a tensor, but for its shape of constants and for how many numbers it has."""
    self.handle, self.type, self.dtype = handle, type, type.scalar


def is_dtype(self: Any, other: Any) -> bool:
    """Whether a type is another one; most often it is the same object."""
    return self is other or _is_dtype(self, other)


def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """Two tensors in one shape; most often they are in one."""
    left, right = lhs.type, rhs.type
    if left.is_block():
        if right.is_block() and left.shape.values == right.shape.values:
            return lhs, rhs
    elif not right.is_block():
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


class Late:
    """An attribute that is computed where it is first read."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        self.compute = compute

    def __set_name__(self, kind: Any, name: str) -> None:
        self.name = name

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        if owner is None:
            return self
        value = vars(owner)[self.name] = self.compute(owner)
        return value


def _name_of_tuple_type(kind: Any) -> str:
    pairs = zip(kind.fields, kind.types, strict=False)
    return "[" + ",".join(f"{field}:{x}" for field, x in pairs) + "]"


def _shape(tensor: Any) -> Any:
    is_block = tensor.type.is_block()
    return tl.tuple([tl.constexpr(x) for x in tensor.type.shape] if is_block else [])


def _numel(tensor: Any) -> Any:
    return tl.constexpr(tensor.type.numel if tensor.type.is_block() else 1)


def changes() -> tuple[tuple[Any, str, Any], ...]:
    """What is put where: an owner, a name, a value."""
    options = interpreter.InterpreterOptions(sanitize_overflow=False)
    return (
        (interpreter, "_patch_lang", patch_language),
        (interpreter, "_get_np_dtype", np_dtype),
        (interpreter.InterpretedFunction, "__call__", call),
        (interpreter.interpreter_builder, "options", options),
        (core, "_unwrap_if_constexpr", unwrap),
        (core, "_unwrap_shape", unwrap_shape),
        (tl.tuple_type, "__init__", init_tuple_type),
        (tl.tuple, "__init__", init_tuple),
        (tl.block_type, "__init__", init_block_type),
        (tl.constexpr, "__init__", init_constant),
        (tl.tensor, "__init__", init_tensor),
        (tl.dtype, "__eq__", is_dtype),
        (TritonSemantic, "broadcast_impl_value", broadcast),
    )


_is_dtype: Any = tl.dtype.__eq__
_broadcast: Any = getattr(TritonSemantic, "broadcast_impl_value", None)
CHANGES = changes() if IS_KNOWN else ()
ORIGINALS = tuple((owner, name, getattr(owner, name, None)) for owner, name, _ in CHANGES)

LATE: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (tl.tuple_type, "name", _name_of_tuple_type),
    (tl.tuple, "type", lambda x: core._type_for_tuple_values(x.values)),
    (tl.block_type, "name", lambda x: f"<{x.shape}, {x.element_ty}>"),
    (tl.constexpr, "type", lambda x: core.constexpr_type(x.value)),
    (tl.tensor, "shape", _shape),
    (tl.tensor, "numel", _numel),
)


def use() -> None:
    """From now on, in this process."""
    if IS_KNOWN:
        for owner, name, value in CHANGES:
            setattr(owner, name, value)
        for owner, name, compute in LATE:
            late = Late(compute)
            late.__set_name__(owner, name)
            setattr(owner, name, late)
