"""8-bit floats taken apart and put together bit by bit, as on chips that know none, or others.

gfx942 has float8 types of its own (no -0, one exponent more): there these functions do it all.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
tl = triton.language

# after conftest.py has decided whether kernels are interpreted
from torch_paged_attn.backends.triton.dequant import decode, encode  # noqa: E402

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
