"""FlashMLA's functions beside plain formulas, in float64 and in the dtype of the call."""

import math

import pytest
import torch

from torch_paged_attn import selected_attention
from torch_paged_attn.integrations import flash_mla
from torch_paged_attn.testing import assert_as_right_as

INF = math.inf


def draw(*shape, seed=0, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def lists_of(rows, count, entries, seed=0):
    """Different numbers below `count` for each row."""
    order = torch.rand(rows, count, generator=torch.Generator().manual_seed(seed)).argsort(-1)
    return order[:, :entries].int()


def formula(q, caches, scale, d_v, sink, dtype):
    """q (rows, heads, d); caches: rows of keys (n, d) with lists (rows, topk), -1 for none.

    returns: out (rows, heads, d_v) and lse (rows, heads), as FlashMLA defines them
    """
    logits, values = [], []
    for kv, lists in caches:
        keys = kv.to(dtype)[lists.clamp(min=0).long()]  # (rows, topk, d)
        scores = torch.einsum("rhd,rnd->rhn", q.to(dtype), keys) * scale
        logits.append(scores.masked_fill((lists < 0)[:, None], -INF))
        values.append(keys[..., :d_v])
    logits, values = torch.cat(logits, -1), torch.cat(values, 1)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -INF, 0)[..., None]).exp()
    out = torch.einsum("rhn,rnd->rhd", weights, values)
    if sink is not None:
        out = out * torch.sigmoid(lse - sink.to(dtype)).nan_to_num()[..., None]
    return out, lse.masked_fill(lse == -INF, INF)


def counted(lists, lengths, past):
    """Lists whose entries that do not count are -1."""
    place = torch.arange(lists.shape[-1])
    if lengths is not None:
        lists = lists.masked_fill(place >= lengths[:, None], -1)
    return lists.masked_fill((lists < 0) | (lists >= past), -1)


def assert_like(ours, lse, args):
    golden, golden_lse = formula(*args, torch.float64)
    theirs, their_lse = formula(*args, torch.float32)
    assert_as_right_as(ours, golden, theirs.to(ours.dtype))
    sees_keys = golden_lse < INF
    assert torch.equal(lse < INF, sees_keys)
    assert_as_right_as(lse[sees_keys], golden_lse[sees_keys], their_lse[sees_keys])


SINKS = {
    "without": None,
    "sink": torch.tensor([0.5, -3.0, INF, -INF]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
def test_sparse_fwd(sink, counts, dtype):
    q, kv = draw(9, 4, 72, dtype=dtype), draw(50, 1, 72, seed=1, dtype=dtype)
    kv[13] = float("nan")  # no list names it
    lists = lists_of(9, 60, 12)
    lists[lists == 13] = -1
    lists[2], lists[5, 3] = -1, 2**31 - 1
    lengths = torch.tensor([12, 5, 3, 0, 1, 12, 7, 2, 9], dtype=torch.int32) if counts else None
    out, largest, lse = flash_mla.flash_mla_sparse_fwd(
        q, kv, lists[:, None], 0.1, 64, attn_sink=sink, topk_length=lengths
    )
    assert out.shape == (9, 4, 64) and out.dtype == dtype and largest is None
    kept = counted(lists, lengths, 50)
    assert_like(out, lse, (q, [(kv[:, 0], kept)], 0.1, 64, sink))
    assert (out[2] == 0).all() and (lse[2] == INF).all()


def test_sparse_fwd_has_gradients():
    """They are those of the operator, whose accuracy tests/backends judges, and of the sink."""
    q, kv = (draw(*shape, dtype=torch.float32) for shape in ((60, 2, 24), (90, 1, 24)))
    lists, sink = lists_of(60, 90, 20)[:, None], torch.tensor([0.3, -0.2])
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (60, 90)]

    def by_function(q, kv):
        out, _, lse = flash_mla.flash_mla_sparse_fwd(q, kv, lists, 0.2, 16, sink)
        return out, lse

    def by_operator(q, kv):
        options = {"softmax_scale": 0.2, "causal": False}
        out, lse = selected_attention(q, kv, kv[..., :16], lists, *bounds, **options)
        return out * (lse - sink[:, None]).sigmoid().T[..., None], lse.T

    found = []
    for call in (by_function, by_operator):
        leaves = [x.clone().requires_grad_() for x in (q, kv)]
        out, lse = call(*leaves)
        (out.sin().sum() + lse.cos().sum()).backward()
        found.append([out, lse, *(x.grad for x in leaves)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("extra", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("sink", SINKS.values(), ids=SINKS)
def test_with_kvcache_and_indices(sink, counts, extra):
    q, cache, second = draw(2, 3, 4, 72), draw(5, 16, 1, 72, seed=1), draw(3, 4, 1, 72, seed=2)
    lists = lists_of(6, 90, 12)
    others = lists_of(6, 12, 5, seed=1)
    lists[1], others[1], lists[2, 4] = -1, -1, -1
    lengths = torch.tensor([7, 12], dtype=torch.int32) if counts else None
    others_length = torch.tensor([0, 4], dtype=torch.int32) if counts else None
    options = {"topk_length": lengths, "attn_sink": sink}
    if extra:
        options |= {
            "extra_k_cache": second,
            "extra_indices_in_kvcache": others.view(2, 3, 5),
            "extra_topk_length": others_length,
        }
    schedule, splits = flash_mla.get_mla_metadata()
    out, lse = flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 64, schedule, splits, 0.1, indices=lists.view(2, 3, 12), **options
    )
    assert out.shape == (2, 3, 4, 64) and out.dtype == q.dtype and lse.shape == (2, 4, 3)

    def of_rows(x):
        return None if x is None else x.repeat_interleave(3)

    caches = [(cache.flatten(0, 2), counted(lists, of_rows(lengths), 80))]
    if extra:
        caches.append((second.flatten(0, 2), counted(others, of_rows(others_length), 12)))
    rows = lse.transpose(1, 2).flatten(0, 1)
    assert_like(out.flatten(0, 1), rows, (q.flatten(0, 1), caches, 0.1, 64, sink))


def eight_bits(pages, size, seed):
    """A cache of 656 bytes a token, and what it stands for."""
    x = draw(pages, size, 1, 576, seed=seed)
    latents = x[..., :512].float().unflatten(-1, (4, 128))
    scales = latents.abs().amax(-1) / 448
    stored = (latents / scales[..., None]).to(torch.float8_e4m3fn)
    parts = stored.flatten(-2), scales, x[..., 512:]
    cache = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    real = (stored.float() * scales[..., None]).flatten(-2)
    return cache, torch.cat([real, x[..., 512:].float()], -1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_with_kvcache_of_656_bytes(dtype):
    q, lists = draw(2, 3, 4, 576), lists_of(6, 80, 12)
    lists[1], lists[2, 4] = -1, -1
    cache, real = eight_bits(5, 16, 1)
    extra, real_extra = eight_bits(3, 4, 2)
    others = lists_of(6, 12, 5, seed=1)
    args = q, cache.view(dtype), None, None, 512
    options = {"is_fp8_kvcache": True, "indices": lists.view(2, 3, 12)}
    options["extra_k_cache"] = extra.view(dtype)
    options["extra_indices_in_kvcache"] = others.view(2, 3, 5)
    out, lse = flash_mla.flash_mla_with_kvcache(*args, **options)
    caches = [(real.flatten(0, 2), lists), (real_extra.flatten(0, 2), others)]
    rows = lse.transpose(1, 2).flatten(0, 1)
    assert_like(out.flatten(0, 1), rows, (q.flatten(0, 1), caches, 576**-0.5, 512, None))


@pytest.mark.parametrize("causal", [False, True])
def test_with_kvcache_to_all_keys(causal):
    q, cache = draw(2, 3, 4, 72), draw(6, 16, 1, 72, seed=1)
    table = torch.tensor([[4, 1, 0], [2, 5, 3]], dtype=torch.int32)
    used = torch.tensor([20, 37], dtype=torch.int32)
    out, lse = flash_mla.flash_mla_with_kvcache(q, cache, table, used, 64, causal=causal)
    lists = torch.full((6, 48), -1)
    for b in range(2):
        for i in range(3):
            n = int(used[b]) - (2 - i) * causal
            place = torch.arange(n)
            lists[3 * b + i, :n] = table[b, place // 16] * 16 + place % 16
    args = q.flatten(0, 1), [(cache.flatten(0, 2), lists)], 72**-0.5, 64, None
    assert_like(out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1), args)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"is_fp8_kvcache": True, "indices": None}, NotImplementedError, "is_fp8_kvcache"),
        ({"is_fp8_kvcache": True}, ValueError, "k_cache"),
        ({"causal": True}, ValueError, "causal"),
        ({"extra_k_cache": draw(1, 4, 1, 8)}, ValueError, "extra_indices_in_kvcache"),
        ({"extra_topk_length": torch.ones(1).int()}, ValueError, "extra_topk_length"),
        ({"topk_length": torch.ones(3).int()}, ValueError, "topk_length"),
        ({"attn_sink": torch.ones(3)}, ValueError, "attn_sink"),
        ({"head_dim_v": 9}, ValueError, "head_dim_v"),
        ({"indices": torch.zeros(1, 2, 1, dtype=torch.int32)}, ValueError, "indices"),
        ({"indices": None, "attn_sink": torch.ones(2)}, ValueError, "attn_sink"),
        ({"indices": None}, TypeError, "block_table"),
        ({"k_cache": draw(4, 1, 8)}, ValueError, "k_cache"),
    ],
)
def test_refusals_of_with_kvcache(options, error, name):
    args = {"q": draw(1, 1, 2, 8), "k_cache": draw(1, 4, 1, 8), "head_dim_v": 8}
    args |= {"block_table": None, "cache_seqlens": None}
    args["indices"] = torch.zeros(1, 1, 1, dtype=torch.int32)
    with pytest.raises(error, match=rf"flash_mla_with_kvcache.*{name}"):
        flash_mla.flash_mla_with_kvcache(**args | options)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"indexer_topk": 512}, NotImplementedError, "indexer_topk"),
        ({"topk_length": torch.ones(3).int()}, ValueError, "topk_length"),
        ({"attn_sink": torch.ones(3)}, ValueError, "attn_sink"),
        ({"d_v": 9}, ValueError, "d_v"),
    ],
)
def test_refusals_of_sparse_fwd(options, error, name):
    args = {"q": draw(2, 2, 8), "kv": draw(4, 1, 8), "sm_scale": 1.0, "d_v": 8}
    args["indices"] = torch.zeros(2, 1, 1, dtype=torch.int32)
    with pytest.raises(error, match=rf"flash_mla_sparse_fwd.*{name}"):
        flash_mla.flash_mla_sparse_fwd(**args | options)
