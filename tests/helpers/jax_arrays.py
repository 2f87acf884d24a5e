"""Torch tensors as JAX arrays and back, bit by bit: NumPy has no bfloat16 nor float8 of its own."""

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch
from torch import Tensor

FOREIGN = {
    torch.bfloat16: ml_dtypes.bfloat16,
    torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn,
    torch.float8_e5m2: ml_dtypes.float8_e5m2,
}
BITS = {1: torch.int8, 2: torch.int16}


def to_jax(value: Any) -> Any:
    """A tensor as an array, a torch type as a NumPy type, anything else as it is."""
    if isinstance(value, torch.dtype):
        return np.dtype(FOREIGN.get(value) or str(value).removeprefix("torch."))
    if not isinstance(value, Tensor):
        return value
    value = value.contiguous()
    if value.dtype in FOREIGN:
        bits = value.view(BITS[value.itemsize]).numpy()
        return jnp.asarray(bits.view(FOREIGN[value.dtype]))
    return jnp.asarray(value.numpy())


def to_torch(array: Any) -> Tensor:
    """An array as a tensor of its own."""
    values = np.array(array)
    for dtype, foreign in FOREIGN.items():
        if values.dtype == foreign:
            return torch.from_numpy(values.view(f"int{8 * values.itemsize}")).view(dtype)
    return torch.from_numpy(values)


def rng_words(rng_state: Tensor) -> Any:
    """Seed (two of them), offset and what follows as the 32-bit words that JAX can hold."""
    seed, offset, *base = (int(x) for x in rng_state)
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, offset & 0xFFFFFFFF, *base]
    return jnp.asarray(np.array(words, np.uint32))
