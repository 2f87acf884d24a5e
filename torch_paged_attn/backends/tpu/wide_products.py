"""Products of 32 x 32 bits in vectors, both halves.

v6e and TPU7x have an instruction for each half; Mosaic reaches them by `arith.mului_extended`, but
JAX has no rule of `lax.mulhi` for it. Where JAX is another one, 16-bit pieces give the same bits.
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


def mulhilo(a: int, b: Array) -> tuple[Array, Array]:
    """High and low halves of the products of a number and each uint32 of `b`."""
    if HAS_MULHI:
        return lax.mulhi(b, jnp.full(b.shape, a, jnp.uint32)), jnp.uint32(a) * b
    return _of_pieces(a, b), jnp.uint32(a) * b


def _of_pieces(a: int, b: Array) -> Array:
    """The high halves from products of 16 bits."""
    a_low, a_high = jnp.uint32(a & 0xFFFF), jnp.uint32(a >> 16)
    b_low, b_high = b & jnp.uint32(0xFFFF), b >> jnp.uint32(16)
    left = a_high * b_low + (a_low * b_low >> jnp.uint32(16))
    right = a_low * b_high + (left & jnp.uint32(0xFFFF))
    return a_high * b_high + (left >> jnp.uint32(16)) + (right >> jnp.uint32(16))
