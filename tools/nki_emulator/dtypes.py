"""Element types, and how values change from one to another."""

import ml_dtypes
import numpy as np

float32 = np.dtype(np.float32)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
float16 = np.dtype(np.float16)
float8_e4m3 = np.dtype(ml_dtypes.float8_e4m3)  # largest value 240
float8_e4m3fn = np.dtype(ml_dtypes.float8_e4m3fn)  # largest value 448, fourth generation
float8_e5m2 = np.dtype(ml_dtypes.float8_e5m2)
int32 = np.dtype(np.int32)
uint32 = np.dtype(np.uint32)
int8 = np.dtype(np.int8)
uint8 = np.dtype(np.uint8)
uint16 = np.dtype(np.uint16)

FLOATS = frozenset((float32, bfloat16, float16, float8_e4m3, float8_e4m3fn, float8_e5m2))
INTEGERS = frozenset((int32, uint32, int8, uint8, uint16))


def is_float(dtype: np.dtype) -> bool:
    """Whether `dtype` is one of the floating-point types."""
    return dtype in FLOATS


def cast(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Through float32; to integers rounded to nearest even and saturated."""
    if values.dtype == dtype:
        return values
    if is_float(dtype):
        with np.errstate(all="ignore"):
            return values.astype(np.float32, copy=False).astype(dtype)
    limits = np.iinfo(dtype)
    if values.dtype.kind in "iu":
        whole = values.astype(np.int64, copy=False)
    else:
        whole = np.where(np.isnan(values), 0.0, np.rint(values.astype(np.float64)))
    return np.clip(whole, limits.min, limits.max).astype(dtype)


def as_float32(values: np.ndarray) -> np.ndarray:
    """What the engines compute with."""
    return values.astype(np.float32, copy=False)
