"""Caches with scales by token and of int4: how far a result is from that of the numbers before they
were quantised, and faults, seeded one at a time, each of which has to be found.
"""

import numpy
import pytest
import torch

from torch_paged_attn import flash_varlen, reference, reshape_and_cache
from torch_paged_attn.testing import EXTENDED, SELECTED, Truth, assert_accurate, build

INT4 = torch.uint8


def swap_nibbles(x):
    return x << 4 | x >> 4


def of_the_next_token(scales):
    """Each slot of a page with the scale of the slot behind it; the unwritten ones are 1."""
    return scales.nan_to_num(1.0).roll(-1, -1)


def of_the_other_head(scales):
    return scales.roll(1, 1)


def read_linearly(scales):
    """Scales that lie by token, then by head, read as if they lay by head, then by token."""
    return scales.transpose(1, 2).contiguous().nan_to_num(1.0).view(scales.shape)


def of_the_next_columns(scales):
    """Of latents: the scale of the columns behind."""
    return scales.roll(-1, -1)


def by_token_of_latents(scales):
    """Each slot of a page with the scales of the slot behind it."""
    return scales.nan_to_num(1.0).roll(-1, -2)


def by_page(scales):
    """The scale of a page's first token for all of its tokens."""
    return scales[..., :1].expand_as(scales)


FAULTS = {
    "nibbles of keys swapped": ("vllm/tokens_int4/bf16", "k", swap_nibbles),
    "nibbles of values swapped": ("vllm/tokens_int4/bf16", "v", swap_nibbles),
    "unsigned int4": ("vllm/tokens_int4/bf16", "v", lambda x: x ^ 0x88),
    "page's value scale": ("vllm/tokens_int8/bf16", "v_descale", by_page),
    "no value scale": ("vllm/tokens_int8/bf16", "v_descale", torch.ones_like),
}
OF_SCALES = {"next token's": of_the_next_token, "other head's": of_the_other_head}
OF_SCALES["linearly read"] = read_linearly
FAULTS |= {
    f"{fault} {argument} of {name}": (name, argument, change)
    for name in ("vllm/tokens_int8/bf16", "vllm/tokens_e4m3/f16", "vllm/tokens_int4/bf16")
    for argument in ("k_descale", "v_descale")
    for fault, change in OF_SCALES.items()
}
FAULTS |= {
    f"other head's {argument} of e5m2": ("tokens/sparse_e5m2/f32", argument, of_the_other_head)
    for argument in ("k_descale", "v_descale")
}
LATENTS = "deepseek_v3_2/rows_of_656_bytes/bf16", "deepseek_mla/latent_columns/bf16"
FAULTS |= {
    f"next {which} scales of {name}": (name, "v_descale", change)
    for name in LATENTS
    for which, change in {"columns'": of_the_next_columns, "token's": by_token_of_latents}.items()
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault):
    name, argument, change = FAULTS[fault]
    call = build((EXTENDED | SELECTED)[name])
    wrong = call.args | {argument: change(call.args[argument])}
    results = getattr(reference, call.op)(**wrong, precision=reference.BASELINE)
    with pytest.raises(AssertionError):
        assert_accurate(*results, call.truth())


def attend(q, k, v):
    """Outputs and softmax_lse in float64, of queries (tokens, heads, dim) that see all keys."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * q.shape[-1] ** -0.5
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


def rounding(x, scale, stored):
    """By how much quantisation may change each number: half of the distance of two neighbours."""
    if stored in (torch.int8, INT4):
        half = scale / 2
    else:
        info = torch.finfo(stored)
        half = torch.maximum(x.abs() * info.eps / 2, scale * info.smallest_normal * info.eps / 2)
    return half.expand_as(x) * (1 + numpy.finfo(numpy.float32).eps * 4)  # of the quotient


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "stored", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, INT4], ids=str
)
def test_results_are_as_near_as_roundings_of_the_cache_allow(stored, seed):
    """With scores off by D at most, weights are off by factors of exp(2 D) at most."""
    torch.manual_seed(seed)
    tokens, heads, dim, size = 45, 2, 32, 16
    q = torch.randn(3, 2 * heads, dim)
    new = [torch.randn(tokens, heads, dim) * torch.rand(tokens, heads, 1) for _ in "kv"]
    width = dim // 2 if stored == INT4 else dim
    caches = [torch.zeros(3, heads, size, width).to(stored) for _ in "kv"]
    scales = [torch.ones(3, heads, size) for _ in "kv"]
    reshape_and_cache(*new, tuple(caches), torch.arange(tokens), *scales, quantize=True)

    def of_tokens(x):
        return x.transpose(1, 2).flatten(0, 1)[:tokens]

    real, error = [], []
    for x, cache, scale in zip(new, caches, scales, strict=True):
        numbers = of_tokens(cache)
        if stored == INT4:
            low, high = (numbers << 4).view(torch.int8) >> 4, numbers.view(torch.int8) >> 4
            numbers = torch.stack([low, high], -1).flatten(-2)
        of_row = of_tokens(scale[..., None]).double()
        real.append(numbers.double() * of_row)
        error.append(rounding(x.double(), of_row, stored))
        assert ((real[-1] - x).abs() <= error[-1]).all()

    wanted, wanted_lse = attend(q, *(x.double() for x in new))
    found, found_lse = attend(q, *real)
    group = q.shape[1] // heads
    moved = torch.einsum("qhd,khd->hqk", q.abs().double(), error[0].repeat_interleave(group, 1))
    off = (moved * dim**-0.5).amax(-1)
    assert ((found_lse - wanted_lse).abs() <= off).all()
    largest, rounded = (
        x.abs().amax(0).repeat_interleave(group, 0) for x in (new[1].double(), error[1])
    )
    assert ((found - wanted).abs() <= rounded + torch.expm1(2 * off).T[..., None] * largest).all()

    lengths = dict(cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32), cu_seqlens_k=None)
    lengths |= dict(max_seqlen_q=3, max_seqlen_k=tokens)
    lengths |= dict(seqused_k=torch.tensor([tokens], dtype=torch.int32))
    lengths |= dict(block_table=torch.arange(3, dtype=torch.int32)[None])
    args = dict(q=q, k=caches[0], v=caches[1], k_descale=scales[0], v_descale=scales[1], **lengths)
    assert_accurate(*flash_varlen(**args), Truth.of(reference.flash_varlen, **args))
