"""8-bit floats taken apart and put together bit by bit, as on chips that know none, or others.

gfx942 has float8 types of its own (no -0, one exponent more): there these functions do it all.
"""

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

# after conftest.py has decided whether kernels are interpreted
from torch_paged_attn.backends.triton.cache_write.quantize_rows import LARGEST  # noqa: E402
from torch_paged_attn.backends.triton.common.dequant import decode, encode  # noqa: E402
from torch_paged_attn.backends.triton.common.int4 import (  # noqa: E402
    decode_fours,
    decode_raised_fours,
    decode_two,
    encode_two,
)
from torch_paged_attn.backends.triton.runtime.target import target_of  # noqa: E402

FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}


@triton.jit
def _decode_kernel(x_ptr, out_ptr, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.arange(0, WIDTH)
    tl.store(out_ptr + i, decode(tl.load(x_ptr + i), FORMAT, tl.float32))


@triton.jit
def _encode_kernel(x_ptr, out_ptr, FORMAT: tl.constexpr, WIDTH: tl.constexpr):
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    tl.store(out_ptr + i, encode(tl.load(x_ptr + i), tl.uint8, FORMAT))


@pytest.mark.parametrize("name", FORMATS)
def test_every_code_decodes_to_its_number(name, device):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256, device=device)
    _decode_kernel[(1,)](codes.to(device), out, name, 256)
    assert torch.equal(out.cpu().nan_to_num(1e9), codes.view(FORMATS[name]).float().nan_to_num(1e9))


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_rounded_to_nearest_even_and_saturated(name, device):
    """All float16, and what is as far from one as float32 allows: ties, and next to ties."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    half = half[half.isfinite()]
    up, down = (half.nextafter(torch.tensor(s * float("inf"))) for s in (1, -1))
    x = torch.cat([half, up, down, torch.tensor([float("inf"), -float("inf"), 1e30, -1e-30])])
    x = torch.cat([x, x.new_zeros(-len(x) % 4096)])
    largest = torch.finfo(FORMATS[name]).max
    want = x.clamp(-largest, largest).to(FORMATS[name]).view(torch.uint8)
    out = torch.zeros(len(x), dtype=torch.uint8, device=device)
    _encode_kernel[(len(x) // 4096,)](x.to(device), out, name, 4096)
    assert torch.equal(out.cpu(), want)


@pytest.mark.parametrize("name", FORMATS)
def test_nan_stays_nan(name, device):
    out = torch.zeros(16, dtype=torch.uint8, device=device)
    _encode_kernel[(1,)](torch.full((16,), float("nan"), device=device), out, name, 16)
    assert out.cpu().view(FORMATS[name]).float().isnan().all()


@triton.jit
def _int4_kernel(x_ptr, out_ptr, IN_PTX: tl.constexpr, WIDTH: tl.constexpr):
    """Codes of 16 bits as four numbers, once as they are and once raised; two bytes as two numbers,
    and these as a byte again.
    """
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    x = tl.load(x_ptr + i)
    fours, raised = decode_fours(x, IN_PTX), decode_raised_fours(x, IN_PTX)
    for n in tl.static_range(4):
        tl.store(out_ptr + 8 * i + n, fours[n].to(tl.float32))
        tl.store(out_ptr + 8 * i + 4 + n, raised[n].to(tl.float32) * 16777216.0)


@triton.jit
def _two_kernel(x_ptr, out_ptr, WIDTH: tl.constexpr):
    """Bytes as two numbers, and these, with a little more, as bytes again."""
    i = tl.arange(0, WIDTH)
    even, odd = decode_two(tl.load(x_ptr + i), tl.float32)
    tl.store(out_ptr + 3 * i, even)
    tl.store(out_ptr + 3 * i + 1, odd)
    tl.store(out_ptr + 3 * i + 2, encode_two(even + 0.49, odd - 0.49).to(tl.float32))


def int4_of(codes, count):
    """The numbers of codes, the one in the lowest bits first."""
    bits = codes.int()[:, None] >> (4 * torch.arange(count)) & 0xF
    return torch.where(bits > 7, bits - 16, bits).float()


def test_every_four_numbers_of_int4(device):
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    out = torch.zeros(2**16, 8, device=device)
    _int4_kernel[(16,)](codes.to(device), out, target_of(out.device).converts_float8, 4096)
    want, large = int4_of(codes, 4), torch.tensor([1.0, 16.0, 1.0, 16.0])
    assert torch.equal(out.cpu(), torch.cat([want * large, (want + 8.0) * 16.0], 1))


def test_every_byte_of_int4(device):
    codes = torch.arange(256, dtype=torch.uint8)
    out = torch.zeros(256, 3, device=device)
    _two_kernel[(1,)](codes.to(device), out, 256)
    assert torch.equal(out.cpu(), torch.cat([int4_of(codes, 2), codes[:, None].float()], 1))


def test_one_correction_makes_a_product_with_the_inverse_the_quotient():
    """As `quantize_rows.py` divides, for all bfloat16 numbers and largest ones of a row, but for
    powers of two of both, in float32; float64 holds each product and its sum exactly."""
    mantissas = 1 + np.arange(128, dtype=np.float32) / 128
    numbers = np.concatenate([mantissas * np.float32(2.0**-e) for e in range(14)])

    def fma(a, b, c):
        return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)

    for largest in LARGEST.values():
        scale = (mantissas / np.float32(largest))[:, None]
        inverse = np.float32(1) / scale
        x = np.broadcast_to(numbers, (len(scale), len(numbers)))
        quotient = x * inverse
        found = fma(fma(quotient, -scale, x), inverse, quotient)
        assert (found == x / scale)[x <= mantissas[:, None]].all()
