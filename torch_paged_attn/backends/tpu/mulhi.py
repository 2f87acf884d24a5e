"""Products of 32 x 32 bits in vectors, both halves.

v6e and TPU7x have an instruction for each half; Mosaic reaches them by `arith.mului_extended`, but
JAX has no rule of `lax.mulhi` for it. v5e and v5p have one for the low half, and libtpu makes the
high one of 20 others; `_high_of_low` takes 9 or 10. The bits are the same.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def _teach_mosaic() -> bool:
    """Give Pallas' TPU compiler a rule for `lax.mulhi`, unless it has one; whether there is one."""
    try:
        from jax._src.pallas.mosaic import lowering
        from jaxlib.mlir.dialects import arith

        rules, primitive = lowering.lowering_rules, lax.mulhi_p
        register = lowering.register_lowering_rule
    except (ImportError, AttributeError):
        return False

    def rule(_context: Any, x: Any, y: Any) -> Any:
        return arith.MulUIExtendedOp(x, y).results[1]

    if not any(primitive in known for known in rules.values()):
        register(primitive)(rule)
    return True


HAS_MULHI = _teach_mosaic()


def mulhilo(a: int, b: Array, low_products_only: bool = False) -> tuple[Array, Array]:
    """High and low halves of the products of a number and each uint32 of `b`."""
    low = jnp.uint32(a) * b
    if HAS_MULHI and not low_products_only:
        return lax.mulhi(b, jnp.full(b.shape, a, jnp.uint32)), low
    return _high_of_low(a, b, low), low


def _high_of_low(a: int, b: Array, low: Array) -> Array:
    """The high halves from products modulo 2**32; `low` is `a * b`.

    Let `a = a_high * 2**16 + a_low`, `b` alike, `s = a_low * b_high + floor(a * b_low / 2**16)`:
    high is `a_high * b_high + floor(s / 2**16)`, and the last 16 bits of `s` are the first ones of
    `low`. So an estimate that is less than 2**16 above `s` will do: without those bits of `low` it
    has the same multiple of 2**16 in it. `(a_high + 1) * b_low` is one of `a * b_low / 2**16`.

    Where the estimate would not fit 32 bits, `-a` takes the place of `a`: `a_high + 1` stands for
    `a_high`, and what that is too much is estimated. `b_low` is `b - b_high * 2**16`, so that `b`
    itself is multiplied.
    """
    high, rest = a >> 16, a & 0xFFFF
    b_high, carried = b >> jnp.uint32(16), low >> jnp.uint32(16)
    if high + rest <= 2**16:
        estimate = _sum_of_products(high + 1, b, rest, b_high)
        return jnp.uint32(high) * b_high + ((estimate - carried) >> jnp.uint32(16))
    estimate = _sum_of_products(2**16 - high, b, 2**16 - rest, b_high)
    too_much = (estimate + carried) >> jnp.uint32(16)
    # (high + 1) * b_high + b_low
    return b + _word(high + 1 - 2**16) * b_high - too_much


def _sum_of_products(of_low: int, b: Array, of_high: int, b_high: Array) -> Array:
    """`of_low * b_low + of_high * b_high`."""
    return _word(of_low) * b + _word(of_high - (of_low << 16)) * b_high


def _word(number: int) -> Array:
    return jnp.uint32(number % 2**32)
