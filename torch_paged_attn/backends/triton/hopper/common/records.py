"""Groups of values that kernels have functions for."""

from typing import dataclass_transform

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@dataclass_transform()
def record(cls):
    """An aggregate that is made of its fields' values, in their order. Some are constants."""
    kinds = cls.__annotations__

    def fill(self, *values):
        for name, value in zip(kinds, values, strict=True):
            setattr(self, name, gl.constexpr(value) if kinds[name] is gl.constexpr else value)

    cls.__init__ = gluon.constexpr_function(fill)
    return aggregate(cls)
