"""Caches with a scale for each token and head lie as in vLLM's TRITON_ATTN."""

import pytest
import torch
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_quant_mode

from torch_paged_attn.integrations import _vllm_backend as ours

HEADS, KV_HEADS, DIM, BLOCK, BLOCKS = 4, 2, 32, 16, 5
STORED = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.uint8}
LARGEST = {"int8_per_token_head": 127.0, "fp8_per_token_head": 448.0}


def spec_of(name):
    return FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=DIM,
        dtype=STORED.get(name, torch.uint8),
        kv_quant_mode=get_kv_quant_mode(name),
    )


def cache_of(name, layout):
    spec = ours.PagedAttentionBackend.customize_spec(spec_of(name))
    order = {"heads first": (0, 1, 2, 3), "tokens first": (0, 2, 1, 3)}[layout]
    shape = BLOCKS, KV_HEADS, BLOCK, spec.state_content_size_bytes
    memory = torch.full([shape[i] for i in order], 77, dtype=torch.uint8)
    return memory.permute(order).view(STORED[name])


def impl_of(name):
    return ours.PagedAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, name)


@pytest.mark.parametrize("name", STORED)
def test_a_block_has_as_many_bytes(name):
    specs = [
        x.customize_spec(spec_of(name))
        for x in (ours.PagedAttentionBackend, TritonAttentionBackend)
    ]
    assert specs[0] == specs[1] and specs[0].page_size_bytes > spec_of(name).page_size_bytes


def test_other_caches_are_as_they_were():
    for name in ("auto", "fp8_e4m3"):
        assert ours.PagedAttentionBackend.customize_spec(spec_of(name)) == spec_of(name)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("name", STORED)
def test_views_are_vllms(name, layout):
    cache = cache_of(name, layout)
    theirs = TritonAttentionImpl.__new__(TritonAttentionImpl)
    theirs._kv_quant_mode, theirs.fp8_dtype = get_kv_quant_mode(name), torch.float8_e4m3fn
    padded = theirs._pth_key_value_caches(cache)
    wanted = [x[..., :DIM] for x in padded]
    wanted += [theirs._k_scale_cache, theirs._v_scale_cache]
    found = [x.transpose(1, 2) for x in impl_of(name)._pages(None, cache)]
    for x, y in zip(found, wanted, strict=True):
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert x.data_ptr() == y.data_ptr()


@pytest.mark.parametrize("name", STORED)
def test_what_is_written_is_what_vllm_reads(name):
    """A number of the cache times its scale is near the number that was written: by half a step of
    int8, or a sixteenth of float8's number.
    """
    cache, impl = cache_of(name, "heads first"), impl_of(name)
    key, value = torch.randn(2, 30, KV_HEADS, DIM)
    slots = torch.randperm(BLOCKS * BLOCK)[:30]
    impl.do_kv_cache_update(None, key, value, cache, slots)
    stored = [x.transpose(1, 2).flatten(0, 1)[slots] for x in impl._pages(None, cache)]
    for x, number, scale in zip((key, value), stored[:2], stored[2:], strict=True):
        assert torch.equal(scale, x.abs().amax(-1) / LARGEST[name])
        off = (number.float() * scale[..., None] - x).abs()
        step = (
            0.501 * scale[..., None] if name.startswith("int8") else x.abs() / 15 + scale[..., None]
        )
        assert (off <= step).all()


def test_int4_is_refused_with_the_reason():
    name = "int4_per_token_head"
    assert not ours.PagedAttentionBackend.supports_kv_cache_dtype(name)
    reason = ours.PagedAttentionBackend.supports_combination(
        64, torch.bfloat16, name, 16, False, False, False, False, None
    )
    assert "zero point" in reason and "int8_per_token_head" in reason
