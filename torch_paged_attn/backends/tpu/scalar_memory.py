"""The scalar core's memory holds a kernel's tables whole: page ids, lengths, tiles, slots.

It has 1 MiB on every generation. libtpu says so when it compiles, in words of its own, and Pallas'
interpreter never does; here a call is refused by name before (`tests/schedules/test_limits.py`).
"""

import math
from typing import Any

from jax import Array
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.refusal import refuse
from torch_paged_attn.backends.tpu.registers import LANES

# numbers of 32 bits, without what the compiler keeps there: spilled registers, the grid's indices
MOST_WORDS = (1 << 18) - (1 << 13)


def require_room(
    op: str,
    scalars: dict[str, Array],
    inputs: dict[str, tuple[Array, Any]],
    scratch: dict[str, Any],
) -> None:
    """Raise NotImplementedError, with the largest tables, where a kernel has too many numbers.

    `scalars` lie there whole, and so do `inputs` and `scratch` of that memory; an input that comes
    by grid steps is there twice.
    """
    sizes = {name: _padded(x.shape) for name, x in scalars.items()}
    for name, (x, spec) in inputs.items():
        if spec.memory_space == pltpu.SMEM:
            block = spec.block_shape
            sizes[name] = _padded(x.shape) if block is None else 2 * _padded(block)
    for name, x in scratch.items():
        if getattr(x, "memory_space", None) == pltpu.SMEM:
            sizes[name] = _padded(x.shape)
    if (words := sum(sizes.values())) > MOST_WORDS:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:3]
        named = ", ".join(f"{name} {sizes[name]}" for name in largest)
        refuse(op, f"tables of {words} numbers ({named}); supported: {MOST_WORDS}")


def _padded(shape: tuple[int, ...]) -> int:
    """Words of an array, whose rows fill whole lanes."""
    return math.prod(shape[:-1]) * -(-shape[-1] // LANES) * LANES
