"""flash-attn's functions take q, k and v of any strides, with the bits of contiguous ones."""

import pytest
import torch
from sequences import DIM, HEADS, KV_HEADS, cumulative

from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

BATCH, SEQLEN_Q, SEQLEN_K, NEW = 2, 5, 9, 3


def halves(x):
    """A slice of wider rows, as of a fused projection."""
    wide = torch.randn(*x.shape[:-1], 2 * x.shape[-1] + 3).to(x)
    wide[..., 1 : x.shape[-1] + 1] = x
    return wide[..., 1 : x.shape[-1] + 1]


def gaps(x):
    """Every other sequence, or row, of a larger tensor."""
    larger = torch.randn(2 * x.shape[0], *x.shape[1:]).to(x)
    larger[::2] = x
    return larger[::2]


def heads_first(x):
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def dims_before_heads(x):
    """The last dimension is not contiguous."""
    return x.mT.contiguous().mT


def every_other_number(x):
    """The last dimension is not contiguous."""
    return torch.stack([x, torch.randn_like(x)], -1)[..., 0]


WHOLE_ROWS = [halves, gaps, heads_first]
LAYOUTS = [*WHOLE_ROWS, dims_before_heads, every_other_number]


def tensors(dtype, *lengths):
    """q, and keys and values: (BATCH, length, heads, DIM), one for each length."""
    torch.manual_seed(0)
    heads = HEADS, *(KV_HEADS for _ in lengths[1:])
    return [torch.randn(BATCH, n, h, DIM).to(dtype) for n, h in zip(lengths, heads, strict=True)]


def each_in(layout, given):
    """Copies of the tensors, of which one after another, and then each, is laid out so."""
    plain = [x.clone() for x in given]
    for i, x in enumerate(given):
        yield [*plain[:i], layout(x), *plain[i + 1 :]]
    yield [layout(x) for x in given]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_dense_tensors(layout, dtype):
    given = tensors(dtype, SEQLEN_Q, SEQLEN_K, SEQLEN_K)
    expected = flash_attn_func(*given, causal=True, return_softmax_lse=True)
    for q, k, v in each_in(layout, given):
        got = flash_attn_func(q, k, v, causal=True, return_softmax_lse=True)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ragged_tensors(layout, dtype):
    given = [x.flatten(0, 1) for x in tensors(dtype, SEQLEN_Q, SEQLEN_K, SEQLEN_K)]
    bounds = cumulative([4, 6]), cumulative([7, 11])
    expected = flash_attn_varlen_func(*given, *bounds, causal=True, return_softmax_lse=True)
    for q, k, v in each_in(layout, given):
        got = flash_attn_varlen_func(q, k, v, *bounds, causal=True, return_softmax_lse=True)
        assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(layout):
    q, k, v = tensors(torch.float32, SEQLEN_Q, SEQLEN_K, SEQLEN_K)
    table = torch.tensor([[1], [0]], dtype=torch.int32)
    lengths = torch.tensor([9, 6], dtype=torch.int32)
    rows, bounds = q.flatten(0, 1), cumulative([SEQLEN_Q] * BATCH)
    options = {"block_table": table, "seqused_k": lengths, "causal": True}
    expected = flash_attn_varlen_func(rows, k, v, bounds, **options)
    for given in each_in(layout, [rows, k, v]):
        assert torch.equal(flash_attn_varlen_func(*given, bounds, **options), expected)


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_new_tokens_of_a_cache(layout, ragged):
    q, new_k, new_v, k_cache, v_cache = tensors(torch.float32, NEW, NEW, NEW, SEQLEN_K, SEQLEN_K)
    options = {"cache_seqlens": torch.tensor([5, 2], dtype=torch.int32), "causal": True}
    given = [q, new_k, new_v]
    if ragged:
        given = [x.flatten(0, 1) for x in given]
        bounds = cumulative([2, 4])
        options |= {"cu_seqlens_q": bounds, "cu_seqlens_k_new": bounds}

    def run(q, k, v):
        caches = k_cache.clone(), v_cache.clone()
        out = flash_attn_with_kvcache(q, *caches, k, v, **options)
        return out, *caches

    expected = run(*given)
    for laid_out in each_in(layout, given):
        assert all(map(torch.equal, run(*laid_out), expected))


@pytest.mark.parametrize("layout", WHOLE_ROWS)
def test_caches_are_written_where_they_lie(layout):
    q, new_k, new_v, *caches = tensors(torch.float32, NEW, NEW, NEW, SEQLEN_K, SEQLEN_K)
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    for k_cache, v_cache in each_in(layout, caches):
        contiguous = k_cache.clone().contiguous(), v_cache.clone().contiguous()
        both = [
            flash_attn_with_kvcache(q, *pair, new_k, new_v, cache_seqlens=lengths, causal=True)
            for pair in ((k_cache, v_cache), contiguous)
        ]
        assert torch.equal(*both)
        assert torch.equal(k_cache, contiguous[0]) and torch.equal(v_cache, contiguous[1])


def test_padding_in_front_of_pages_of_one_slot():
    """Such pages lie end to end at any distance: the stride within a page means nothing."""
    q, new_k, new_v, *caches = tensors(torch.float32, NEW, NEW, NEW, SEQLEN_K, SEQLEN_K)
    pages = [x.flatten(0, 1)[:, None] for x in caches]
    options = {
        "block_table": torch.arange(BATCH * SEQLEN_K, dtype=torch.int32).view(BATCH, SEQLEN_K),
        "cache_seqlens": torch.tensor([5, 2], dtype=torch.int32),
        "cache_leftpad": torch.tensor([3, 0], dtype=torch.int32),
    }
    contiguous = [x.clone() for x in pages]
    expected = flash_attn_with_kvcache(q, *contiguous, new_k, new_v, **options)
    for k_cache, v_cache in each_in(gaps, pages):
        got = flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, **options)
        assert torch.equal(got, expected)
        assert torch.equal(k_cache, contiguous[0]) and torch.equal(v_cache, contiguous[1])


def test_a_cache_without_whole_rows_is_refused_unwritten():
    q, new_k, new_v, *caches = tensors(torch.float32, NEW, NEW, NEW, SEQLEN_K, SEQLEN_K)
    for k_cache, v_cache in each_in(dims_before_heads, caches):
        before = k_cache.clone(), v_cache.clone()
        with pytest.raises(
            ValueError, match=r"to be contiguous in its last dimension, got strides"
        ):
            flash_attn_with_kvcache(q, k_cache, v_cache, new_k, new_v, cache_seqlens=1)
        assert torch.equal(k_cache, before[0]) and torch.equal(v_cache, before[1])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    def run(q, k, v):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        flash_attn_func(*leaves, causal=True, deterministic=True).square().sum().backward()
        return [x.grad for x in leaves]

    given = tensors(torch.float32, SEQLEN_Q, SEQLEN_K, SEQLEN_K)
    expected = run(*given)
    for laid_out in each_in(layout, given):
        assert all(map(torch.equal, run(*laid_out), expected))


def test_one_graph():
    compiled = torch.compile(flash_attn_func, backend="aot_eager", fullgraph=True)
    given = tensors(torch.float32, SEQLEN_Q, SEQLEN_K, SEQLEN_K)
    expected = flash_attn_func(*given, causal=True)
    for layout in LAYOUTS:
        got = compiled(*(layout(x) for x in given), causal=True)
        assert torch.equal(got, expected)
