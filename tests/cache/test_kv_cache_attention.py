"""PagedKVCache with the ops: a step-by-step decode equals attention over all tokens at once."""

import pytest
import torch

from torch_paged_attn import flash_varlen, reference, reshape_and_cache
from torch_paged_attn.kv_cache import PagedKVCache
from torch_paged_attn.testing.accuracy import Truth, assert_accurate

NUM_LAYERS, HEADS, KV_HEADS, DIM, PAGE_SIZE = 2, 4, 2, 16, 4


def projections(tokens, layer):
    """q, k, v of each token, decided by its id and layer: as good as a model for this."""
    rows = [
        torch.randn(
            HEADS + 2 * KV_HEADS, DIM, generator=torch.Generator().manual_seed(99 * token + layer)
        )
        for token in tokens
    ]
    stacked = torch.stack(rows) if rows else torch.empty(0, HEADS + 2 * KV_HEADS, DIM)
    return stacked.split((HEADS, KV_HEADS, KV_HEADS), dim=1)


def step(cache, tokens, query_lens):
    """Write and attend to the last query_lens[seq] tokens of each sequence, and check each row."""
    batch = cache.batch(list(query_lens), list(query_lens.values()))
    queries = [tokens[s][len(tokens[s]) - n :] for s, n in query_lens.items()]
    cu_seqlens_k = torch.tensor([0, *(len(tokens[s]) for s in query_lens)]).cumsum(0).int()
    for layer in range(NUM_LAYERS):
        q, key, value = projections([token for some in queries for token in some], layer)
        reshape_and_cache(key, value, cache.kv_cache[layer], batch.slot_mapping)
        k, v = cache.kv_cache[layer]
        out, lse = flash_varlen(q, k, v, **batch.arguments(), causal=True)
        _, all_k, all_v = projections([t for s in query_lens for t in tokens[s]], layer)
        truth = Truth.of(
            reference.flash_varlen, q, all_k, all_v, batch.cu_seqlens_q, cu_seqlens_k, causal=True
        )
        assert_accurate(out, lse, truth)


@pytest.mark.parametrize("separate", [False, True], ids=["one", "separate"])
def test_prefill_fork_and_decode(separate):
    cache = PagedKVCache(NUM_LAYERS, 16, KV_HEADS, PAGE_SIZE, DIM, separate=separate)
    for part in (x for layer in cache.kv_cache for x in layer):
        assert part.is_contiguous()
        part.fill_(float("nan"))
    tokens = {"a": list(range(10)), "b": [*range(8), 50, 51, 52]}
    query_lens = {s: len(tokens[s]) - cache.append(s, tokens[s]) for s in tokens}
    # b's first two pages are a's: they are written once, by a, in the same step
    assert query_lens == {"a": 10, "b": 3}
    step(cache, tokens, query_lens)

    cache.fork("a", "c")
    tokens["c"] = list(tokens["a"])
    for i in range(6):
        for s in tokens:
            token = 100 * i + ord(s)
            assert cache.append(s, [token]) == 0
            tokens[s].append(token)
        step(cache, tokens, dict.fromkeys(tokens, 1))

    # two drafts are rejected, one sequence leaves, its prefix is found again
    cache.truncate("b", len(tokens["b"]) - 2)
    del tokens["b"][-2:]
    cache.free("a")
    again = [*tokens.pop("a"), 7]
    assert cache.append("d", again) == 16
    tokens["d"] = again
    cache.append("b", [5])
    tokens["b"].append(5)
    step(cache, tokens, {"d": 1, "b": 1})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.uint8, "int4"], ids=str)
def test_scales_by_token_go_with_their_pages(dtype):
    """A page that a fork copies has its scales, and attention reads what was quantised."""
    cache = PagedKVCache(1, 8, KV_HEADS, PAGE_SIZE, DIM, dtype=dtype, token_scales=True)
    cache.scales.fill_(float("nan"))
    tokens = {"a": [3, 1, 4, 1, 5, 9]}

    def write(seq, count):
        batch = cache.batch([seq], [count])
        q, key, value = projections(tokens[seq][-count:], 0)
        scales = cache.scales[0]
        reshape_and_cache(key, value, cache.kv_cache[0], batch.slot_mapping, *scales, quantize=True)
        given = dict(zip(("k_descale", "v_descale"), scales, strict=True))
        call = (q, *cache.kv_cache[0]), batch.arguments() | given | {"causal": True}
        results = flash_varlen(*call[0], **call[1])
        assert_accurate(*results, Truth.of(reference.flash_varlen, *call[0], **call[1]))
        return results

    cache.append("a", tokens["a"])
    write("a", 6)
    cache.fork("a", "b")
    for seq, token in (("b", 26), ("a", 26)):
        tokens[seq] = [*tokens["a"][:6], token]
        cache.append(seq, [token])
    assert cache.pages("a")[0] == cache.pages("b")[0] and cache.pages("a")[1] != cache.pages("b")[1]
    for one, other in zip(write("a", 1), write("b", 1), strict=True):
        assert torch.equal(one, other)
    row = PagedKVCache.bytes_per_token(1, KV_HEADS, DIM, dtype=dtype, token_scales=True)
    slots = 8 * PAGE_SIZE
    assert row * slots == cache.kv_cache.nbytes + cache.scales.nbytes
