"""Triton's interpreter without what it repeats, which takes more than half of its time.

It puts its own functions into the language for a launch, and again for each call of a function of
the device; makes a table of NumPy's types for each number that it converts; and names the type of
each tuple, which nothing reads. Here a launch does the first once, for the language and its core,
and takes it back at its end; the table is made once, and a name where it is read. No result has
other bits: tests/triton/test_interpreter.py.
"""

import functools
import types
from typing import Any

import triton
import triton.language as tl
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


def init(self: Any, types: Any, fields: Any = None) -> None:
    """Of a tuple's type, but for its name."""
    self.types = types
    self.fields = fields or [""] * len(types)


class Name:
    """The name of a tuple's type."""

    def __get__(self, owner: Any, kind: Any = None) -> str:
        pairs = zip(owner.fields, owner.types, strict=False)
        return "[" + ",".join(f"{field}:{x}" for field, x in pairs) + "]"


CHANGES: tuple[tuple[Any, str, Any], ...] = (
    (interpreter, "_patch_lang", patch_language),
    (interpreter, "_get_np_dtype", np_dtype),
    (interpreter.InterpretedFunction, "__call__", call),
    (tl.tuple_type, "__init__", init),
)
ORIGINALS = tuple((owner, name, getattr(owner, name, None)) for owner, name, _ in CHANGES)


def use() -> None:
    """From now on, in this process."""
    if IS_KNOWN:
        for owner, name, value in CHANGES:
            setattr(owner, name, value)
        tl.tuple_type.name = Name()
