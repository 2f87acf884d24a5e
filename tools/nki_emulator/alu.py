"""The operations that instructions take as arguments: `nl.add`, `nl.exp`, ..."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Alu:
    """A binary operation of the vector engine."""

    name: str
    compute: Any  # of two arrays; a NumPy ufunc where it reduces
    reduces: bool = False
    is_bitwise: bool = False


@dataclasses.dataclass(frozen=True)
class Function:
    """A function of the scalar engine, and the inputs it is documented for."""

    name: str
    compute: Callable[[np.ndarray], np.ndarray]
    smallest: float = -np.inf
    largest: float = np.inf

    @property
    def is_limited(self) -> bool:
        """Whether there are inputs that it is not documented for."""
        return self.smallest > -np.inf or self.largest < np.inf


def _truth(compare: Callable) -> Callable:
    return lambda a, b: compare(a, b).astype(np.float32)


add = Alu("add", np.add, reduces=True)
subtract = Alu("subtract", np.subtract, reduces=True)
multiply = Alu("multiply", np.multiply, reduces=True)
maximum = Alu("maximum", np.maximum, reduces=True)
minimum = Alu("minimum", np.minimum, reduces=True)
equal = Alu("equal", _truth(np.equal))
not_equal = Alu("not_equal", _truth(np.not_equal))
less = Alu("less", _truth(np.less))
less_equal = Alu("less_equal", _truth(np.less_equal))
greater = Alu("greater", _truth(np.greater))
greater_equal = Alu("greater_equal", _truth(np.greater_equal))
logical_and = Alu("logical_and", _truth(np.logical_and))
logical_or = Alu("logical_or", _truth(np.logical_or))
bitwise_and = Alu("bitwise_and", np.bitwise_and, is_bitwise=True)
bitwise_or = Alu("bitwise_or", np.bitwise_or, is_bitwise=True)
bitwise_xor = Alu("bitwise_xor", np.bitwise_xor, is_bitwise=True)
left_shift = Alu("left_shift", np.left_shift, is_bitwise=True)
right_shift = Alu("right_shift", np.right_shift, is_bitwise=True)

copy = Function("copy", lambda x: x)
exp = Function("exp", np.exp)
tanh = Function("tanh", np.tanh)
square = Function("square", np.square)
log = Function("log", np.log, 2.0**-64, 2.0**64)
