"""`assert_batch_invariant` passes functions that keep their bits, and names what breaks them."""

import pytest
import torch

import torch_paged_attn as tpa
from torch_paged_attn.testing import assert_batch_invariant


def _prompts():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, n, 2, 32, generator=generator) for n in (1, 5, 70, 33)]


def _packed(prompts):
    q, k, v = torch.cat(prompts, 1)
    lengths = torch.tensor([0, *(p.shape[1] for p in prompts)])
    bounds = lengths.cumsum(0).int()
    out, _ = tpa.flash_varlen(q, k, v, bounds, causal=True, batch_invariant=True)
    return out.split(lengths[1:].tolist())


def _decoded(prompts):
    """The same rows, one query at a time over a cache in pages."""
    outs = []
    for q, k, v in prompts:
        cache = tpa.PagedKVCache(1, num_pages=8, num_kv_heads=2, page_size=16, head_dim=32)
        rows = []
        for t in range(len(q)):
            cache.append("a", 1)
            batch = cache.batch(["a"], [1])
            pages = cache.kv_cache[0]
            tpa.reshape_and_cache(k[t : t + 1], v[t : t + 1], pages, batch.slot_mapping)
            options = {"causal": True, "batch_invariant": True}
            rows.append(tpa.flash_varlen(q[t : t + 1], *pages, **batch.arguments(), **options)[0])
        outs.append(torch.cat(rows))
    return outs


def test_attention_of_packed_prompts_and_of_decode_passes():
    assert_batch_invariant(_packed, _prompts(), _decoded)


def test_a_sum_over_the_batch_is_found():
    def leaks(prompts):
        return [p.sum() + 1e-3 * len(prompts) for p in prompts]

    with pytest.raises(AssertionError, match=r"input 0 in batch \[0, 1, 2, 3\] differs .* 1 of 1"):
        assert_batch_invariant(leaks, _prompts())


def test_another_way_with_other_bits_is_found():
    with pytest.raises(AssertionError, match="by function 1 of `others`"):
        assert_batch_invariant(
            lambda ps: [p + 1 for p in ps], _prompts(), lambda ps: [p + 1.1 for p in ps]
        )


def test_a_missing_result_is_found():
    with pytest.raises(AssertionError, match="expected model_fn to return 1 tensors"):
        assert_batch_invariant(lambda ps: [], _prompts())


def test_one_input_is_refused():
    with pytest.raises(ValueError, match="expected inputs to be two or more, got 1"):
        assert_batch_invariant(_packed, _prompts()[:1])
