"""Errors for arguments of a wrong type, which torch's dispatcher refuses before any check here."""

import re
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops.checks import fail

# what a schema calls a type -> the Python types that are right, and their name in an error
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "ScalarType": ((torch.dtype,), "a dtype"),
    "bool": ((bool, torch.SymBool), "True or False"),
    "float": ((int, float, torch.SymInt, torch.SymFloat), "a number"),
    "int": ((int, torch.SymInt), "an integer"),
}


def call_operator(op: torch._ops.OpOverload, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """What the operator returns for arguments by position and by name.

    Raises:
        TypeError: an argument is of the wrong type.
    """
    try:
        return op(*args, **options)
    except RuntimeError as error:
        _refuse_types(error, op, args, options)
        raise


def _refuse_types(
    error: RuntimeError, op: torch._ops.OpOverload, args: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Raise TypeError if `error` is the dispatcher's for an argument of the wrong type. The
    dispatcher's own text prints the values and the whole schema.
    """
    refused = re.search(r"Expected a value of type .* for argument '(\w+)'", str(error))
    if refused is None:
        return
    schema = op._schema
    given = {x.name: value for x, value in zip(schema.arguments, args, strict=False)} | options
    for argument in schema.arguments:
        if argument.name == refused[1]:
            name, kind = schema.name.removeprefix("paged_attn::"), str(argument.real_type)
            _refuse(name, argument.name, given[argument.name], kind)


def _refuse(op: str, name: str, value: Any, kind: str) -> None:
    """Raise unless the value is of a kind of the schema, such as `List[Tensor]`."""
    if kind.startswith("Optional["):
        kind = kind[len("Optional[") : -1]
    got = "None" if value is None else type(value).__name__
    if kind.startswith("List["):
        if not isinstance(value, tuple | list):
            fail(op, name, got, "a list or a tuple", TypeError)
        for i, element in enumerate(value):
            _refuse(op, f"{name}[{i}]", element, kind[len("List[") : -1])
    elif not isinstance(value, TYPES[kind][0]):
        fail(op, name, got, TYPES[kind][1], TypeError)
