"""Keys and values of 8 bits, converted to the type of the products."""

from torch_paged_attn.backends.neuron.kernels.gather_scatter import P
from torch_paged_attn.backends.neuron.toolchain import nisa, nl

# float8_e4m3fn's one pattern of NaN, moved to where float16 has its bits
NAN_BITS = float(0x7F << 7)


def dequantize_head(tile, head, dtype, kv_dtype):
    """One head of gathered keys (P, chunks, heads, run, dim) as (P, chunks, 1, run, dim)."""
    chunks, run, dim = tile.shape[1], tile.shape[3], tile.shape[4]
    wide = nl.ndarray((P, chunks, 1, run, dim), dtype=dtype, buffer=nl.sbuf)
    for chunk in range(chunks):
        dequantize(wide[:, chunk, 0], tile[:, chunk, head], kv_dtype)
    return wide


def dequantize(dst, src, kv_dtype):
    """dst = src, whose bytes are of type `kv_dtype`: int8, float8_e5m2 or float8_e4m3fn."""
    if kv_dtype == "int8":
        nisa.tensor_copy(dst=dst, src=src)
    elif kv_dtype == "float8_e5m2":
        nisa.tensor_copy(dst=dst, src=src.view(nl.float8_e5m2))
    elif nisa.get_nc_version() == nisa.nc_version.gen4:
        nisa.tensor_copy(dst=dst, src=src.view(nl.float8_e4m3fn))
    else:
        dequantize_e4m3fn(dst, src)


def dequantize_e4m3fn(dst, src):
    """dst = src bit by bit, for chips whose own e4m3 ends at 240.

    Four bits of exponent and three of mantissa, at float16's places, are the value over 256; a
    fifth bit of exponent makes the pattern of NaN one of float16's.
    """
    shape = src.shape
    bits = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf)
    sign = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf)
    is_nan = nl.ndarray(shape, dtype=nl.uint16, buffer=nl.sbuf)
    nisa.tensor_copy(dst=bits, src=src)
    nisa.tensor_scalar(
        dst=sign, data=bits, op0=nl.bitwise_and, operand0=0x80, op1=nl.left_shift, operand1=8
    )
    nisa.tensor_scalar(
        dst=bits, data=bits, op0=nl.bitwise_and, operand0=0x7F, op1=nl.left_shift, operand1=7
    )
    nisa.tensor_scalar(dst=is_nan, data=bits, op0=nl.equal, operand0=NAN_BITS)
    nisa.tensor_scalar(dst=is_nan, data=is_nan, op0=nl.left_shift, operand0=14)
    nisa.tensor_tensor(dst=bits, data1=bits, data2=sign, op=nl.bitwise_or)
    nisa.tensor_tensor(dst=bits, data1=bits, data2=is_nan, op=nl.bitwise_or)
    nisa.tensor_scalar(dst=dst, data=bits.view(nl.float16), op0=nl.multiply, operand0=256.0)
