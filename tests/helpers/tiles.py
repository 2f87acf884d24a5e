"""Tensors of the emulator, for its tests."""

import numpy as np
from nki_emulator import nl


def empty(*shape, dtype=nl.float32, buffer=nl.sbuf):
    """One that holds nothing yet."""
    return nl.ndarray(shape, dtype=dtype, buffer=buffer)


def tile(values, buffer=nl.sbuf):
    """One that holds `values`."""
    made = empty(*values.shape, dtype=values.dtype, buffer=buffer)
    made.write(values)
    return made


def ones(*shape, dtype=nl.float32, buffer=nl.sbuf):
    return tile(np.ones(shape, dtype), buffer)


def hbm(values):
    return tile(values, nl.shared_hbm)
