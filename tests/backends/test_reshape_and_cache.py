"""`reshape_and_cache` on every backend: exactly the bytes the reference writes, and no other."""

from typing import NamedTuple

import pytest
import torch
from same_bits import assert_same_bits

from torch_paged_attn import reference

SHORT = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
    torch.int8: "i8",
}
FLOATS, EIGHT_BITS = tuple(SHORT)[:3], tuple(SHORT)[3:]
PAIRS = [(f, f) for f in FLOATS] + [(f, e) for f in FLOATS for e in EIGHT_BITS]
# how a cache lies, and its page size
LAYOUTS = {"hnd": 32, "nhd": 16, "interleaved": 64, "packed_last": 5}
SLOTS = 320
WRITES = {
    f"{SHORT[dtype]}-{SHORT[stored]}-{layout}": (dtype, stored, layout)
    for dtype, stored in PAIRS
    for layout in LAYOUTS
}


def make(dtype, cache_dtype, layout="hnd", tokens=150, heads=3, slots=SLOTS, dim=24, dim_v=24):
    """Keys, values, caches full of 77, and slots: some negative, some next to one another."""
    g = torch.Generator().manual_seed(0)
    page_size = LAYOUTS[layout]
    num_pages = -(-slots // page_size)
    key = (torch.randn(tokens, heads, dim, generator=g) * 3).to(dtype)
    value = (torch.randn(tokens, heads, dim_v, generator=g) * 3).to(dtype)
    # of two tokens that have slots
    key[22] *= 1000  # saturates
    key[23] *= 1e-4  # subnormal in eight bits
    mapping = torch.randperm(slots, generator=g)[:tokens]
    mapping[20:50] = torch.arange(67, 97)
    mapping[:20][(mapping[:20] >= 67) & (mapping[:20] < 97)] = -1
    mapping[50:][(mapping[50:] >= 67) & (mapping[50:] < 97)] = -7
    mapping[::7] = -1
    if layout == "packed_last":  # keys beside values
        both = torch.full((num_pages, heads, page_size, dim + dim_v), 77.0).to(cache_dtype)
        caches = both.split([dim, dim_v], -1)
    elif layout == "interleaved":  # pages of keys and of values take turns
        both = torch.full((num_pages, 2, page_size, heads, max(dim, dim_v)), 77.0).to(cache_dtype)
        caches = [both[:, i].transpose(1, 2)[..., :n] for i, n in ((0, dim), (1, dim_v))]
    elif layout == "nhd":
        shapes = ((num_pages, page_size, heads, n) for n in (dim, dim_v))
        caches = [torch.full(shape, 77.0).to(cache_dtype).transpose(1, 2) for shape in shapes]
    else:
        shapes = ((num_pages, heads, page_size, n) for n in (dim, dim_v))
        caches = [torch.full(shape, 77.0).to(cache_dtype) for shape in shapes]
    return key, value, tuple(caches), mapping


def scales_of(cache_dtype):
    if cache_dtype not in EIGHT_BITS:
        return None, None
    return torch.tensor(0.03), torch.tensor([0.5, 0.002, 0.1])


def expected(key, value, caches, slots, *scales):
    """What the reference writes into copies of the caches, one tensor or two."""
    if isinstance(caches, torch.Tensor):
        copy = caches.clone()
        reference.reshape_and_cache(key, value, copy, slots, *scales)
        return copy
    copies = tuple(cache.clone() for cache in caches)
    reference.reshape_and_cache_split(key, value, *copies, slots, *scales)
    return copies


def assert_same_bytes(found, wanted):
    if isinstance(found, torch.Tensor):
        found, wanted = [found], [wanted]
    assert_same_bits(found, wanted)


def check_write(runner, *args):
    wanted = expected(*args)
    assert_same_bytes(runner.write(*args), wanted)


@pytest.mark.over(WRITES)
def test_write(case, runner):
    dtype, cache_dtype, layout = case
    args = make(dtype, cache_dtype, layout, tokens=runner.write_tokens, dim_v=17)
    check_write(runner, *args, *scales_of(cache_dtype))


@pytest.mark.over(
    {f"{SHORT[d]}-{layout}": (d, layout) for d in (FLOATS[1], EIGHT_BITS[0]) for layout in LAYOUTS}
)
def test_write_megabytes(case, runner):
    """They may bypass a processor's caches: keys are whole cache lines, values not."""
    sizes = {"tokens": 2048, "heads": 8, "slots": 2560, "dim": 128, "dim_v": 136}
    cache_dtype, layout = case
    scales = (torch.tensor(0.5), torch.tensor(0.3)) if cache_dtype in EIGHT_BITS else (None, None)
    args = *make(torch.bfloat16, cache_dtype, layout, **sizes), *scales
    check_write(runner, *args)


@pytest.mark.over(
    {f"{SHORT[d]}-{scale}": (d, scale) for d in EIGHT_BITS for scale in (2.0, 2.0**-9, 0.3, -0.5)}
)
def test_write_every_bfloat16(case, runner):
    """Ties, subnormals, infinities; scales that are powers of two, one of them negative, or not."""
    cache_dtype, scale = case
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 1, 128)
    every = every.where(~every.isnan(), 0.0)
    caches = torch.zeros(2, 32, 1, 16, 128).to(cache_dtype)
    scales = (torch.tensor(scale), torch.tensor(scale))
    args = every, every, caches, torch.arange(len(every)), *scales
    check_write(runner, *args)


@pytest.mark.over({"int32": torch.int32, "int64": torch.int64})
def test_write_slots(case, runner):
    """One tensor for both caches, and slots of either type."""
    key, value, _, slots = make(torch.bfloat16, torch.bfloat16, tokens=70)
    args = key, value, torch.randn(2, 10, 3, 32, 24).bfloat16(), slots.to(case)
    check_write(runner, *args)


def test_write_outside(runner):
    """A slot past the end: the CPU writes nothing at all, an accelerator skips the token."""
    key, value, _, slots = make(torch.bfloat16, torch.bfloat16, tokens=70)
    slots[3], slots[4] = SLOTS, 2**62
    cache = torch.randn(2, 10, 3, 32, 24).bfloat16()
    if runner.skips_slots:
        inside = slots.where(slots < SLOTS, -1)
        wanted = expected(key, value, cache, inside)
        assert_same_bytes(runner.write(key, value, cache, slots), wanted)
    else:
        with pytest.raises(IndexError, match="slot_mapping"):
            runner.write(key, value, cache, slots)


def test_write_padding(runner):
    """Rows of key past the slots are none."""
    key, value, caches, slots = make(torch.float32, torch.float32)
    args = key, value, caches, slots[:99]
    check_write(runner, *args)


def test_write_none(runner):
    key, value, caches, slots = make(torch.float32, torch.float32)
    check_write(runner, key, value, caches, slots[:0])


def test_write_twice(runner):
    """Of two tokens for one slot one wins, whole."""
    key, value, caches, slots = make(torch.float32, torch.float32, tokens=70)
    slots[:] = 5
    written = runner.write(key, value, caches, slots)
    winners = {
        int((cache[0, :, 5] == new).all((1, 2)).nonzero()[0, 0])
        for cache, new in zip(written, (key, value), strict=True)
    }
    assert len(winners) == 1
    assert not runner.last_wins or winners == {key.shape[0] - 1}


class Quantize(NamedTuple):
    """Dtype of new tokens, of the cache, and how cache and scales lie."""

    dtype: torch.dtype
    stored: torch.dtype
    layout: str
    op: str = "reshape_and_cache.quantize"


INT4 = torch.uint8
QUANTIZES = {
    f"{SHORT[x.dtype]}-{SHORT.get(x.stored, 'i4')}-{x.layout}": x
    for x in (
        Quantize(torch.bfloat16, torch.int8, "hnd"),
        Quantize(torch.bfloat16, torch.float8_e4m3fn, "nhd"),
        Quantize(torch.float16, torch.float8_e5m2, "hnd"),
        Quantize(torch.float32, torch.int8, "rows"),
        Quantize(torch.float32, INT4, "rows"),
        Quantize(torch.bfloat16, INT4, "nhd"),
    )
}


def in_rows(num_pages, page_size, heads, widths, dtype):
    """Caches and scales that are views of one memory: of each token and head its key, the key's
    scale, its value and the value's scale.
    """
    memory = torch.full((num_pages, page_size, heads, sum(widths) + 8), 77, dtype=torch.uint8)
    parts = memory.split([widths[0], 4, widths[1], 4], -1)
    parts = [x.view(torch.float32)[..., 0] if x.shape[-1] == 4 else x.view(dtype) for x in parts]
    k_cache, k_scale, v_cache, v_scale = (x.transpose(1, 2) for x in parts)
    return (k_cache, v_cache), (k_scale, v_scale)


@pytest.mark.over(QUANTIZES)
def test_quantize(case, runner):
    dtype, stored, layout, _ = case
    heads, page_size, slots = 3, 16, 320
    key, value, _, mapping = make(
        dtype, torch.float32, tokens=runner.write_tokens, heads=heads, dim=24, dim_v=40
    )
    key[24], value[24, 1] = 0.0, 0.0  # rows of zeros have scale 1
    widths = [n // 2 if stored == INT4 else n for n in (24, 40)]
    if layout == "rows":
        caches, scales = in_rows(slots // page_size, page_size, heads, widths, stored)
    else:
        shape = (slots // page_size, heads, page_size)
        order = (0, 2, 1) if layout == "nhd" else (0, 1, 2)
        shape = [shape[i] for i in order]
        caches = [torch.full((*shape, n), 77.0).to(stored).permute(*order, 3) for n in widths]
        scales = [torch.full(shape, 77.0).permute(*order) for _ in range(2)]
    wanted = [x.clone() for x in (*caches, *scales)]
    reference.reshape_and_cache_quantize(key, value, *wanted, mapping)
    found = runner.quantize(key, value, tuple(caches), tuple(scales), mapping)
    assert_same_bits(found, wanted)


def check_quantize(runner, key, value, mapping, slots, stored):
    """Against the reference, with caches and scales of `slots` in pages of 16. What is stored of a
    row whose scale is infinite says nothing.
    """
    pages = slots // 16, key.shape[1], 16
    caches, scales = [], []
    for x in (key, value):
        width = x.shape[-1] // 2 if stored == INT4 else x.shape[-1]
        caches.append(torch.full((*pages, width), 77.0).to(stored))
        scales.append(torch.full(pages, 77.0))
    wanted = [x.clone() for x in (*caches, *scales)]
    reference.reshape_and_cache_quantize(key, value, *wanted, mapping)
    found = runner.quantize(key, value, tuple(caches), tuple(scales), mapping)
    for cache, expected, scale in zip(found, wanted[:2], wanted[2:], strict=False):
        cache[scale.isinf()] = expected[scale.isinf()]
    assert_same_bits(found, wanted)


def from_bfloat16(**stored):
    return {name: Quantize(torch.bfloat16, dtype, "hnd") for name, dtype in stored.items()}


@pytest.mark.over(from_bfloat16(i8=torch.int8, e4m3=torch.float8_e4m3fn, i4=INT4))
def test_quantize_megabytes(case, runner):
    """They may bypass a processor's caches: keys are whole cache lines, values not."""
    sizes = {"tokens": 4096, "heads": 8, "slots": 5120, "dim": 128, "dim_v": 136}
    key, value, _, mapping = make(torch.bfloat16, torch.float32, **sizes)
    check_quantize(runner, key, value, mapping, 5120, case.stored)


@pytest.mark.over(from_bfloat16(i8=torch.int8, e5m2=torch.float8_e5m2, i4=INT4))
def test_quantize_every_bfloat16(case, runner):
    """Ties, subnormals, infinities: neighbours, and numbers far apart, beside each other."""
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16)
    every = every.where(~every.isnan(), 0.0)
    key, value = every.view(-1, 1, 128), every.view(128, -1).t().contiguous()[:, None]
    check_quantize(runner, key, value, torch.arange(len(key)), 512, case.stored)


@pytest.mark.over({"i4": Quantize(torch.float32, INT4, "hnd")})
def test_quantized_rows_that_are_not_finite(case, runner):
    """A NaN is in its own row alone, by the scale; what stands beside it is exact."""
    key = torch.randn(4, 2, 32, generator=torch.Generator().manual_seed(0))
    clean = key.clone()
    key[1, 0, 5] = float("nan")
    results = []
    for new in (key, clean):
        caches = [torch.zeros(1, 2, 16, 16, dtype=INT4) for _ in range(2)]
        scales = [torch.full((1, 2, 16), 77.0) for _ in range(2)]
        results.append(runner.quantize(new, new, tuple(caches), tuple(scales), torch.arange(4)))
    found, wanted = results
    assert found[2][0, 0, 1].isnan() and found[3][0, 0, 1].isnan()
    for x, y in zip(found, wanted, strict=True):
        x[0, 0, 1] = y[0, 0, 1]
    assert_same_bits(found, wanted)
