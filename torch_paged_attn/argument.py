"""How a dataclass lists the arguments of an operator: one field for each, with its meaning."""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Python type of a field -> its type in an operator schema
KINDS = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    float | None: "float?",
    bool: "bool",
    str: "str",
    torch.dtype | None: "ScalarType?",
    tuple[bool, bool, bool, bool, bool]: "bool[5]",
}


class Argument(NamedTuple):
    """One argument of the list."""

    name: str
    type: Any
    default: Any  # dataclasses.MISSING where there is none
    shape: str
    meaning: str
    # a tensor with this many dimensions has one entry per sequence in its first dimension
    per_sequence: int | None
    # a scheduling hint, on which no result depends. The public functions compute a missing one;
    # the schema has no default for it
    is_hint: bool
    # whether the op's backward takes it as well
    in_backward: bool
    # whether the op writes into it
    is_written: bool
    # a backend need not support it: it then refuses a call that gives it (`ops/lacking.py`)
    is_optional: bool
    # a tensor of floats that has no gradient
    is_constant: bool

    @property
    def kind(self) -> str:
        """The type as the schema writes it, such as `Tensor?` or `SymInt`."""
        return "Tensor(a!)" if self.is_written else KINDS[self.type]

    @property
    def is_tensor(self) -> bool:
        return self.kind.startswith("Tensor")

    @property
    def keyword_only(self) -> bool:
        """Whether it can only be passed by name, as all but tensors and hints are."""
        return not self.is_tensor and not self.is_hint


def argument(
    default: Any = dataclasses.MISSING,
    *,
    shape: str = "",
    meaning: str,
    per_sequence: int | None = None,
    is_hint: bool = False,
    in_backward: bool = True,
    is_written: bool = False,
    is_optional: bool = False,
    is_constant: bool = False,
) -> Any:
    """A dataclass field that is an argument of the operators.

    Arguments that follow one another with the same shape and meaning share one entry in the
    generated docstrings (`ops/signature.py`).
    """
    metadata = dict(
        shape=shape,
        meaning=meaning,
        per_sequence=per_sequence,
        is_hint=is_hint,
        in_backward=in_backward,
        is_written=is_written,
        is_optional=is_optional,
        is_constant=is_constant,
    )
    return dataclasses.field(default=default, metadata=metadata)


def listed(owner: type) -> tuple[Argument, ...]:
    """The arguments among the fields of a class."""
    fields = [field for field in dataclasses.fields(owner) if field.metadata]
    return tuple(Argument(x.name, x.type, x.default, **x.metadata) for x in fields)
