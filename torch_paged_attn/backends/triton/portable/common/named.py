"""Named tuples and types in device code.

torch.compile prints a kernel with every function that it calls, but without classes. So device code
cannot use a NamedTuple class, and makes the class of a group on the spot.
"""

import triton


@triton.constexpr_function
def named(fields):
    """The class of named tuples with these fields: `named("low high")(low=x, high=y)`."""
    from collections import namedtuple

    return namedtuple("Group", fields)


@triton.constexpr_function
def named_constants(items):
    """Pairs of a name and a constant as a named tuple."""
    from collections import namedtuple

    return namedtuple("Group", [name for name, _ in items])(*[value for _, value in items])


@triton.constexpr_function
def type_of(name):
    """Triton's type of this name. Kernels are compiled for the name, which JSON can write: Triton
    hands constants to hooks on compilation as JSON.
    """
    import triton.language as tl

    return tl.dtype(name)
