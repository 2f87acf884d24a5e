"""Native Sparse Attention beside a plain formula, in float64 and in float32."""

import pytest
import torch

from torch_paged_attn.integrations.fla import native_sparse_attention
from torch_paged_attn.testing import assert_as_right_as

INF = float("inf")
SIZE = 4


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def softmax(scores):
    return scores.softmax(-1).nan_to_num()


def formula(q, k, v, gates, counts, window, lists=None):
    """One sequence: q (T, HQ, K), k and v (T, H, ...), gates of (T, HQ), lists (T, H, S)."""
    tokens, num_heads, dim = q.shape
    group = num_heads // k.shape[1]
    whole = [x.repeat_interleave(group, 1) for x in (k, v)]
    position = torch.arange(tokens)
    causal = position <= position[:, None]
    scores = torch.einsum("thd,jhd->thj", q, whole[0]) * dim**-0.5
    blocks = tokens // SIZE
    out = 0
    if lists is None:
        short = [x[: blocks * SIZE].unflatten(0, (blocks, SIZE)).mean(1) for x in whole]
        of_blocks = torch.einsum("thd,jhd->thj", q, short[0]) * dim**-0.5
        finished = torch.arange(blocks) < (position[:, None] + 1) // SIZE
        p = softmax(of_blocks.masked_fill(~finished[:, None], -INF))
        out = torch.einsum("thj,jhd->thd", p, short[1]) * gates[0][..., None]
        p = p.unflatten(1, (k.shape[1], group)).sum(2)
        lists = torch.full((tokens, k.shape[1], int(counts.max())), -1)
        for t in range(tokens):
            for h in range(k.shape[1]):
                before = p[t, h, : t // SIZE].argsort(descending=True)
                listed = [t // SIZE, *before.tolist()][: int(counts[t, h])]
                lists[t, h, : len(listed)] = torch.tensor(listed)
    place = torch.arange(lists.shape[-1])
    lists = lists.masked_fill(place >= counts[..., None], -1)
    named = (lists[..., None] == (position // SIZE)).any(-2)  # (T, H, T)
    seen = named.repeat_interleave(group, 1) & causal[:, None]
    p = softmax(scores.masked_fill(~seen, -INF))
    out = out + torch.einsum("thj,jhd->thd", p, whole[1]) * gates[1][..., None]
    if window:
        near = causal & (position > position[:, None] - window)
        p = softmax(scores.masked_fill(~near[:, None], -INF))
        out = out + torch.einsum("thj,jhd->thd", p, whole[1]) * gates[2][..., None]
    return out


def assert_nsa(seqs, packed, counts, window, lists=False):
    """seqs: lengths"""
    total = sum(seqs)
    q, k, v = draw(total, 4, 16), draw(total, 2, 16, seed=1), draw(total, 2, 24, seed=2)
    gates = draw(3, total, 4, seed=3).sigmoid()
    g = torch.Generator().manual_seed(4)
    every = torch.randint(1, 4, (total, 2), generator=g) if counts == "each" else counts
    listed = torch.rand(total, 2, 9, generator=g).argsort(-1)[..., :3] - 1 if lists else None

    def by_formula(dtype):
        found, start = [], 0
        of_all = torch.full((total, 2), every) if isinstance(every, int) else every
        for length in filter(None, seqs):
            rows = slice(start, start + length)
            found.append(
                formula(
                    *(x[rows].to(dtype) for x in (q, k, v)),
                    gates[:, rows].to(dtype),
                    of_all[rows],
                    window,
                    None if listed is None else listed[rows],
                )
            )
            start += length
        return torch.cat(found)

    batch = 1 if packed else len(seqs)
    fold = lambda x: x.unflatten(0, (batch, -1))  # noqa: E731
    options = {"g_cmp": fold(gates[0].float())} if listed is None else {}
    if window:
        options["g_swa"] = fold(gates[2].float())
    if packed:
        options["cu_seqlens"] = torch.tensor([0, *torch.tensor(seqs).cumsum(0).tolist()])
    ours = native_sparse_attention(
        *(fold(x.float()) for x in (q, k, v)),
        g_slc=fold(gates[1].float()),
        block_indices=None if listed is None else fold(listed),
        block_counts=every if isinstance(every, int) else fold(every),
        block_size=SIZE,
        window_size=window,
        **options,
    )
    assert ours.shape == (batch, total // batch, 4, 24)
    assert_as_right_as(ours.flatten(0, 1), by_formula(torch.float64), by_formula(torch.float32))


@pytest.mark.parametrize("lists", [False, True])
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("counts", [1, 3, "each"])
def test_of_a_batch(counts, window, lists):
    assert_nsa((22, 22), False, counts, window, lists)


@pytest.mark.parametrize("seqs", [(9, 0, 17, 3, 4), (3,), (1, 2)])
@pytest.mark.parametrize("counts", [2, "each"])
def test_of_packed_sequences(counts, seqs):
    assert_nsa(seqs, True, counts, 5)


def test_gradients():
    given = [*(draw(1, 14, n, 8, seed=n) for n in (4, 2, 1)), draw(3, 1, 14, 4, seed=9).sigmoid()]

    def gradients(dtype, attend):
        q, k, v, gates = leaves = [x.clone().to(dtype).requires_grad_() for x in given]
        attend(q, k, v.expand(-1, -1, 2, -1), gates).square().sum().backward()
        return [x.grad for x in leaves]

    def ours(q, k, v, gates):
        options = {"block_counts": 2, "block_size": SIZE, "window_size": 5}
        return native_sparse_attention(q, k, v, *gates, **options)

    def theirs(q, k, v, gates):
        return formula(q[0], k[0], v[0], gates[:, 0], torch.full((14, 2), 2), 5)

    golden = gradients(torch.float64, theirs)
    found = gradients(torch.float32, ours), golden, gradients(torch.float32, theirs)
    for x, precise, peer in zip(*found, strict=True):
        assert_as_right_as(x, precise, peer)


@pytest.mark.parametrize(
    ("options", "error", "name"),
    [
        ({"head_first": True}, NotImplementedError, "head_first"),
        ({"block_size": 48}, ValueError, "block_size"),
        ({"block_counts": 0}, ValueError, "block_counts"),
        ({"block_counts": torch.ones(1, 8, 3)}, ValueError, "block_counts"),
        ({"window_size": 4}, ValueError, "g_swa"),
        ({"g_swa": torch.ones(1, 8, 4)}, ValueError, "g_swa"),
        ({"g_cmp": torch.ones(1, 8, 2)}, ValueError, "g_cmp"),
        ({"g_cmp": torch.ones(1, 8, 4)}, ValueError, "block_indices"),
        ({"block_indices": None}, ValueError, "block_indices"),
        ({"block_indices": torch.ones(1, 8, 3, 1)}, ValueError, "block_indices"),
        ({"q": torch.ones(8, 4, 8)}, ValueError, "q"),
    ],
)
def test_refusals(options, error, name):
    q, k = torch.ones(1, 8, 4, 8), torch.ones(1, 8, 2, 8)
    lists = torch.zeros(1, 8, 2, 1, dtype=torch.int32)
    args = {"q": q, "k": k, "v": k, "block_indices": lists, "block_size": SIZE} | options
    with pytest.raises(error, match=rf"native_sparse_attention.*{name}"):
        native_sparse_attention(**args)


def test_packed_sequences_are_one_batch():
    x = torch.ones(2, 8, 2, 8)
    lists = torch.zeros(2, 8, 2, 1, dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens"):
        native_sparse_attention(x, x, x, block_indices=lists, cu_seqlens=torch.tensor([0, 8]))
