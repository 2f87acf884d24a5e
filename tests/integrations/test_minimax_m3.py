"""vLLM's functions of MiniMax M3 beside a dense formula, in float64 and in float32."""

import inspect

import pytest
import torch

from torch_paged_attn.integrations import minimax_m3
from torch_paged_attn.testing import assert_as_right_as

BLOCK, HEADS, KV_HEADS, DIM, PAGES = 16, 8, 2, 24, 12
SCALE = 0.3

# as vLLM defines them, in order
PREFILL = (
    *("q", "kv_cache", "topk_idx", "block_table", "cu_seqlens_q", "seq_lens", "prefix_lens"),
    *("max_query_len", "num_kv_heads", "sm_scale", "output", "k_scale", "v_scale"),
)
DECODE = (
    *("q", "kv_cache", "topk_idx", "block_table", "seq_lens", "num_kv_heads", "sm_scale", "output"),
    *("decode_query_len", "k_scale", "v_scale", "query_start_loc", "token_to_req_indices"),
)


def test_signatures():
    assert tuple(inspect.signature(minimax_m3.minimax_m3_sparse_attn).parameters) == PREFILL
    assert tuple(inspect.signature(minimax_m3.minimax_m3_sparse_attn_decode).parameters) == DECODE


def ints(values):
    return torch.tensor(values, dtype=torch.int32)


class Batch:
    """Sequences of (queries, keys), each query with lists of its own; some hold nothing."""

    def __init__(self, seqs, dtype=torch.bfloat16, topk=3):
        generator = torch.Generator().manual_seed(0)
        queries, keys = zip(*seqs, strict=True)
        self.bounds = ints([0, *queries]).cumsum(0).int()
        self.seq_lens = ints(keys)
        self.total = sum(queries)
        self.q = torch.randn(self.total, HEADS, DIM, generator=generator).to(dtype)
        shape = PAGES, KV_HEADS, BLOCK, 2 * DIM
        self.cache = torch.randn(shape, generator=generator).to(dtype)
        most = max(-(-n // BLOCK) for n in keys)
        order = torch.randperm(PAGES, generator=generator).int()
        self.table = order[: len(seqs) * most].view(len(seqs), most)
        # every query has its own block, unless it is the second: that has none
        lists = torch.rand(KV_HEADS, self.total, most + 2, generator=generator).argsort(-1)[
            ..., :topk
        ]
        self.lists = lists.int()
        self.lists[:, 1] = -1
        self.lists[0, -1, 0] = -1
        self.where = [(b, keys[b] - n + i) for b, n in enumerate(queries) for i in range(n)]

    def formula(self, dtype, cache=None):
        """All queries, dense, with a mask."""
        cache = (self.cache if cache is None else cache).to(dtype)
        out = torch.zeros(self.total, HEADS, DIM, dtype=dtype)
        group = HEADS // KV_HEADS
        for row, (b, position) in enumerate(self.where):
            pages = cache[self.table[b].long()]  # (blocks, KV heads, block, 2 d)
            place = torch.arange(pages.shape[0] * BLOCK)
            for h in range(HEADS):
                named = torch.isin(place // BLOCK, self.lists[h // group, row])
                named &= (place <= position) & (place < self.seq_lens[b])
                if not named.any():
                    continue
                k, v = pages[:, h // group].flatten(0, 1)[named].chunk(2, -1)
                out[row, h] = torch.softmax(k @ self.q[row, h].to(dtype) * SCALE, 0) @ v
        return out

    def prefill(self, cache=None, **scales):
        output = torch.full_like(self.q, float("nan"))
        prefix = self.seq_lens - self.bounds.diff()
        cache = self.cache if cache is None else cache
        tables = self.lists, self.table, self.bounds, self.seq_lens, prefix
        minimax_m3.minimax_m3_sparse_attn(
            self.q, cache, *tables, 64, KV_HEADS, SCALE, output, **scales
        )
        return output

    def assert_right(self, out, cache=None):
        assert_as_right_as(
            out,
            self.formula(torch.float64, cache),
            self.formula(torch.float32, cache).to(out.dtype),
        )


def test_prefill():
    batch = Batch(((9, 40), (0, 5), (17, 17), (1, 33)))
    batch.cache[batch.table[1, 1:].long()] = float("nan")  # no key of a sequence
    out = batch.prefill()
    batch.assert_right(out)
    assert (out[1] == 0).all()


@pytest.mark.parametrize("is_ragged", [False, True])
def test_decode(is_ragged):
    batch = Batch(((1, 40), (4, 9), (2, 33)) if is_ragged else ((3, 40), (3, 9), (3, 33)))
    output = torch.full_like(batch.q, float("nan"))
    ragged = {}
    if is_ragged:
        rows = torch.repeat_interleave(torch.arange(3), batch.bounds.diff())
        ragged = {"query_start_loc": batch.bounds, "token_to_req_indices": rows}
    minimax_m3.minimax_m3_sparse_attn_decode(
        *(batch.q, batch.cache, batch.lists, batch.table, batch.seq_lens),
        *(KV_HEADS, SCALE, output, 4 if is_ragged else 3),
        **ragged,
    )
    batch.assert_right(output)


@pytest.mark.parametrize("by_slot", [False, True])
def test_eight_bits(by_slot):
    batch = Batch(((9, 40), (17, 17)))
    stored = batch.cache.to(torch.float8_e4m3fn)
    shape = (KV_HEADS, PAGES * BLOCK + 5) if by_slot else (1,)
    generator = torch.Generator().manual_seed(1)
    k_scale, v_scale = torch.rand(2, *shape, generator=generator) + 0.5
    real = stored.double().unflatten(-1, (2, DIM))
    for i, scale in enumerate((k_scale, v_scale)):
        if by_slot:
            scale = (
                scale[:, : PAGES * BLOCK].view(KV_HEADS, PAGES, BLOCK).transpose(0, 1)[..., None]
            )
        real[..., i, :] *= scale.double()
    batch.assert_right(batch.prefill(stored, k_scale=k_scale, v_scale=v_scale), real.flatten(-2))


@pytest.mark.parametrize(
    ("changes", "error", "name"),
    [
        ({"num_kv_heads": 4}, ValueError, "kv_cache"),
        ({"kv_cache": torch.zeros(3, 2, 16, 24)}, ValueError, "kv_cache"),
        ({"topk_idx": torch.zeros(1, 3, 2).int()}, ValueError, "topk_idx"),
        ({"output": torch.zeros(3, 8, 9)}, ValueError, "output"),
        ({"k_scale": torch.ones(1)}, ValueError, "v_scale"),
        ({"k_scale": torch.ones(1), "v_scale": torch.ones(1)}, ValueError, "k_scale"),
        ({"decode_query_len": 2}, ValueError, "decode_query_len"),
        ({"query_start_loc": ints([0, 3])}, TypeError, "token_to_req_indices"),
        (
            {"query_start_loc": ints([0, 3]), "token_to_req_indices": torch.zeros(2)},
            *(ValueError, "token_to_req_indices"),
        ),
        ({"query_start_loc": ints([0, 1, 3])}, ValueError, "query_start_loc"),
        ({"block_table": None}, TypeError, "block_table"),
    ],
)
def test_refusals(changes, error, name):
    batch = Batch(((3, 40),))
    args = dict(zip(DECODE, (batch.q, batch.cache, batch.lists, batch.table), strict=False))
    args |= {"seq_lens": batch.seq_lens, "num_kv_heads": KV_HEADS, "sm_scale": SCALE}
    args |= {"output": torch.empty_like(batch.q), "decode_query_len": 3}
    with pytest.raises(error, match=rf"minimax_m3_sparse_attn_decode\(\).*{name}"):
        minimax_m3.minimax_m3_sparse_attn_decode(**args | changes)


def test_scales_of_another_shape():
    batch = Batch(((3, 40),))
    scales = {"k_scale": torch.ones(2, 4), "v_scale": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=r"minimax_m3_sparse_attn\(\).*k_scale"):
        batch.prefill(batch.cache.to(torch.float8_e4m3fn), **scales)
