"""Is the truth true? Cases a person can compute by hand, and PyTorch's own float64 attention."""

import math

import pytest
import torch
import torch.nn.functional as F

from torch_paged_attn.reference import GOLDEN, blocksparse, flash_varlen
from torch_paged_attn.testing import assert_same_in_float64
from torch_paged_attn.testing.inputs import cumulative

INF = float("inf")


def attend(logits, values, **options):
    """One head whose logits are given: q is the identity, k carries the logits' columns."""
    logits, values = torch.tensor(logits).double(), torch.tensor(values).double()
    rows, keys = logits.shape
    q = torch.eye(rows, dtype=torch.float64)[:, None]
    k = logits.mT.contiguous()[:, None]  # q[i] . k[j] = logits[i, j]
    bounds = {"cu_seqlens_q": cumulative([rows]), "cu_seqlens_k": cumulative([keys])}
    options = {"softmax_scale": 1.0, "precision": GOLDEN, **options}
    out, lse = flash_varlen(q, k, values[:, None], **bounds, **options)
    return out[:, 0], lse[0]


def seen(rows, keys, **options):
    """Which keys each row sees, as strings of x and dots."""
    out, _ = attend([[0.0] * keys] * rows, torch.eye(keys).tolist(), **options)
    return ["".join("x" if p > 0 else "." for p in row) for row in out.tolist()]


def test_equal_logits_average():
    out, lse = attend([[0.5, 0.5]], [[1.0], [3.0]])
    assert out.item() == pytest.approx(2.0)
    assert lse.item() == pytest.approx(0.5 + math.log(2))


def test_softmax_by_hand():
    out, lse = attend([[math.log(1), math.log(3)]], [[4.0], [8.0]])
    assert out.item() == pytest.approx((1 * 4 + 3 * 8) / 4)
    assert lse.item() == pytest.approx(math.log(4))


def test_causal_aligns_the_last_query_with_the_last_key():
    assert seen(2, 5, causal=True) == ["xxxx.", "xxxxx"]
    assert seen(5, 2, causal=True) == ["..", "..", "..", "x.", "xx"]
    assert seen(3, 3, causal=True) == ["x..", "xx.", "xxx"]


def test_windows_are_inclusive():
    assert seen(4, 4, window_size_left=1) == ["xxxx", "xxxx", ".xxx", "..xx"]
    assert seen(4, 4, window_size_left=1, window_size_right=0) == ["x...", "xx..", ".xx.", "..xx"]
    assert seen(3, 5, window_size_left=0, window_size_right=1) == ["..xx.", "...xx", "....x"]
    assert seen(2, 4, window_size_right=0) == seen(2, 4, causal=True)
    assert seen(2, 4, causal=True, window_size_right=3) == seen(2, 4, causal=True)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def test_q_position_places_queries():
    assert seen(2, 4, causal=True, q_position=ints(1)) == ["xx..", "xxx."]
    assert seen(2, 3, causal=True, q_position=ints(-1)) == ["...", "x.."]
    assert seen(1, 3, window_size_left=1, q_position=ints(9)) == ["..."]


def test_keys_dealt_out_over_ranks():
    """Of 2 ranks in runs of 2, rank 1 has the keys at positions 2, 3, 6, 7, 10."""
    dealt = {"key_ranks": 2, "key_rank": 1, "key_interleave": 2}
    assert seen(2, 5, causal=True, q_position=ints(6), **dealt) == ["xxx..", "xxxx."]
    assert seen(1, 5, window_size_left=4, q_position=ints(7), **dealt) == [".xxxx"]
    slopes = torch.tensor([1.0])
    _, lse = attend([[0.0] * 2], [[1.0]] * 2, q_position=ints(2), alibi_slopes=slopes, **dealt)
    assert lse.item() == pytest.approx(math.log(1 + math.exp(-1)))


def test_tail_mask_is_of_the_newest_keys():
    tree = torch.tensor([[True, False], [False, True]])
    assert seen(2, 4, tail_mask=tree) == ["xxx.", "xx.x"]
    assert seen(2, 1, tail_mask=tree) == [".", "x"]  # column 1 is key 0
    assert seen(2, 4, tail_mask=tree, causal=True) == ["xxx.", "xx.x"]


def test_key_ranges_overlap():
    q = torch.ones(2, 1, 1, dtype=torch.float64)
    v = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64).view(3, 1, 1)
    out, _ = flash_varlen(
        q, v * 0.0, v, cumulative([1, 1]), k_start=ints(1, 0), seqused_k=ints(2, 2)
    )
    assert out.flatten().tolist() == [3.0, 1.5]


def test_latents_are_keys_too():
    v = torch.tensor([[math.log(1)], [math.log(3)]], dtype=torch.float64)[:, None]
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    bounds = {"cu_seqlens_q": cumulative([1]), "cu_seqlens_k": cumulative([2])}
    _, lse = flash_varlen(one, v * 0.0 + 2.0, v, **bounds, q_latent=one, softmax_scale=1.0)
    assert lse.item() == pytest.approx(2.0 + math.log(4))


def test_row_without_key():
    out, lse = attend([[1.0, 1.0]] * 3, [[1.0], [2.0]], causal=True)
    assert out[0].item() == 0.0 and lse[0].item() == -INF
    out, lse = attend([[1.0, 1.0]] * 3, [[1.0], [2.0]], causal=True, sinks=torch.tensor([0.25]))
    assert out[0].item() == 0.0 and lse[0].item() == 0.25


def test_sink_is_in_the_denominator_only():
    out, lse = attend([[math.log(2)]], [[10.0]], sinks=torch.tensor([math.log(3)]))
    assert out.item() == pytest.approx(10 * 2 / 5)
    assert lse.item() == pytest.approx(math.log(5))


def test_softcap_comes_before_alibi_and_bias():
    capped = 2.0 * math.tanh(5.0 / 2.0)
    bias = torch.tensor([[[0.75]]])
    _, lse = attend([[5.0]], [[1.0]], softcap=2.0, attn_bias=bias)
    assert lse.item() == pytest.approx(capped + 0.75)
    _, lse = attend([[5.0], [5.0]], [[1.0]], softcap=2.0, alibi_slopes=torch.tensor([0.5]))
    assert lse.tolist() == pytest.approx([capped - 0.5, capped])  # row 0 stands at position -1


def test_alibi_counts_distance_both_ways():
    slope, far = torch.tensor([0.5]), -1e9
    _, lse = attend([[0.0, far], [far, 0.0]], [[1.0], [2.0]], alibi_slopes=slope)
    assert lse.tolist() == pytest.approx([0.0, 0.0])
    _, lse = attend([[far, 0.0], [0.0, far]], [[1.0], [2.0]], alibi_slopes=slope)
    assert lse.tolist() == pytest.approx([-0.5, -0.5])


def test_bool_bias_masks_and_minus_infinity_does_too():
    mask = torch.tensor([[[True, False]]])
    out, _ = attend([[1.0, 9.0]], [[4.0], [8.0]], attn_bias=mask)
    assert out.item() == 4.0
    out, _ = attend([[1.0, 9.0]], [[4.0], [8.0]], attn_bias=torch.tensor([[[0.0, -INF]]]))
    assert out.item() == 4.0


def test_memory_no_query_sees_may_hold_nan():
    nan = math.nan
    out, lse = attend([[1.0, nan]], [[4.0], [nan]], attn_bias=torch.tensor([[[True, False]]]))
    assert out.item() == 4.0 and lse.item() == 1.0
    out, _ = attend([[nan, 1.0]], [[nan], [4.0]], window_size_left=0)
    assert out.item() == 4.0


def test_descales_multiply_stored_values():
    q = torch.tensor([[[2.0]]]).to(torch.float8_e4m3fn)
    k = torch.tensor([[[4.0]]]).to(torch.float8_e4m3fn)
    v = torch.tensor([[[3]]], dtype=torch.int8)
    scales = {"q_descale": torch.tensor(0.5), "k_descale": torch.tensor([0.25])}
    bounds = cumulative([1])
    for v_descale in (torch.tensor(0.1), torch.tensor([0.1]), torch.tensor([[0.1]])):
        out, lse = flash_varlen(
            q,
            k,
            v,
            bounds,
            bounds,
            softmax_scale=10.0,
            v_descale=v_descale,
            precision=GOLDEN,
            **scales,
        )
        assert out.item() == pytest.approx(0.3)
        assert lse.item() == pytest.approx(10.0 * (2 * 0.5) * (4 * 0.25))


def test_a_scale_by_token_multiplies_its_token():
    q, k = torch.tensor([[[1.0]]]), torch.tensor([[[3]], [[3]], [[127]]], dtype=torch.int8)
    k_descale, v_descale = torch.tensor([[0.5], [2.0], [math.nan]]), torch.ones(3, 1)
    v = torch.tensor([[[10]], [[20]], [[127]]], dtype=torch.int8)
    v_descale[1:, 0] = torch.tensor([0.1, math.nan])
    bounds, used = cumulative([1]), torch.tensor([2], dtype=torch.int32)
    options = {"softmax_scale": 1.0, "precision": GOLDEN}
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    expected = (10.0 * math.exp(1.5) + 2.0 * math.exp(6.0)) / (math.exp(1.5) + math.exp(6.0))
    out, lse = flash_varlen(q, k, v, bounds, cumulative([3]), seqused_k=used, **scales, **options)
    assert out.item() == pytest.approx(expected)
    assert lse.item() == pytest.approx(math.log(math.exp(1.5) + math.exp(6.0)))
    # pages of two, the second page first: (num_pages, num_kv_heads, page_size)
    pages = [x.new_zeros(2, 1, 2, *x.shape[2:]) for x in (k, v, k_descale, v_descale)]
    for page, x in zip(pages, (k, v, k_descale, v_descale), strict=True):
        page[1, 0], page[0, 0, 0] = x[:2, 0], x[2, 0]
    k, v, k_descale, v_descale = pages
    scales = {"k_descale": k_descale, "v_descale": v_descale}
    table = torch.tensor([[1, 0]], dtype=torch.int32)
    out, _ = flash_varlen(q, k, v, bounds, seqused_k=used, block_table=table, **scales, **options)
    assert out.item() == pytest.approx(expected)


def test_as_many_packed_tokens_as_sequences_have_scales_by_sequence():
    """The sequences have two keys and none: a scale by token would be 3 for the second key."""
    q, k = torch.ones(2, 1, 1), torch.ones(2, 1, 1, dtype=torch.int8)
    bounds = cumulative([2, 0])
    _, lse = flash_varlen(
        q, k, k, bounds, bounds, k_descale=torch.tensor([[1.0], [3.0]]), softmax_scale=1.0
    )
    assert lse[0].tolist() == pytest.approx([1.0 + math.log(2)] * 2)


def test_int4_has_the_even_number_in_the_low_bits():
    """Bytes 0x92, 0x7F are the numbers 2, -7, -1, 7."""
    stored = torch.tensor([0x92, 0x7F], dtype=torch.uint8).view(1, 1, 2)
    bounds = cumulative([1])
    for i, number in enumerate((2.0, -7.0, -1.0, 7.0)):
        q = torch.zeros(1, 1, 4)
        q[..., i] = 1.0
        out, lse = flash_varlen(q, stored, stored, bounds, bounds, softmax_scale=1.0)
        assert lse.item() == number
        assert out.flatten().tolist() == [2.0, -7.0, -1.0, 7.0]


def test_float8_output_divides_rounds_and_saturates():
    one = torch.tensor([[[1.0]]])
    values = torch.tensor([[[3.0]], [[1000.0]], [[-1e9]]])
    bounds = cumulative([1, 1, 1])
    args = (one.expand(3, 1, 1), one.expand(3, 1, 1), values, bounds, bounds)
    scale = {"out_dtype": torch.float8_e4m3fn, "out_scale": torch.tensor(0.1)}
    out, _ = flash_varlen(*args, **scale)
    assert out.float().flatten().tolist() == [30.0, 448.0, -448.0]


def test_dropout_leaves_the_denominator_alone():
    n = 4096
    state = torch.tensor([7, 9])
    out, lse = attend([[0.0] * n], [[1.0]] * n, dropout_p=0.25, rng_state=state)
    kept = out.item() * n * 0.75
    assert kept == pytest.approx(round(kept), abs=1e-6)
    assert abs(kept / n - 0.75) < 0.03
    assert lse.item() == pytest.approx(math.log(n))


def test_pages_hold_the_same_sequence():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(10, 2, 4, generator=g) for _ in range(3))
    bounds, table = cumulative([10]), torch.tensor([[3, 0, 2, -5]], dtype=torch.int32)
    caches = []
    for packed in (k, v):
        cache = torch.full((4, 2, 4, 4), math.nan)
        for j in range(10):
            cache[table[0, j // 4], :, j % 4] = packed[j]
        caches.append(cache)
    want = flash_varlen(q, k, v, bounds, bounds, causal=True)
    used = torch.tensor([10], dtype=torch.int32)
    got = flash_varlen(q, *caches, bounds, seqused_k=used, block_table=table, causal=True)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_torch_in_float64(causal):
    g = torch.Generator().manual_seed(0)
    lens = [5, 0, 12]
    q = torch.randn(17, 6, 16, generator=g, dtype=torch.float64)
    k, v = (torch.randn(17, 3, 16, generator=g, dtype=torch.float64) for _ in range(2))
    out, lse = flash_varlen(q, k, v, cumulative(lens), causal=causal, precision=GOLDEN)
    assert out.dtype == lse.dtype == torch.float64
    start = 0
    for n in lens:
        rows = slice(start, start + n)
        start += n
        want = F.scaled_dot_product_attention(
            *(t[rows].transpose(0, 1)[None] for t in (q, k, v)), is_causal=causal, enable_gqa=True
        )[0].transpose(0, 1)
        assert_same_in_float64(out[rows], want)


def test_layout_blocks_are_blocks_of_positions():
    # 32 keys already cached and one new query at position 32: row 2 of 16-position blocks
    q, k = torch.zeros(1, 1, 1), torch.zeros(33, 1, 1)
    v = torch.eye(33)[:, None]
    crow = torch.tensor([[0, 0, 1, 3]], dtype=torch.int32)
    col = torch.tensor([[9, 2, 0]], dtype=torch.int32)
    bounds = (cumulative([1]), cumulative([33]))
    out, lse = blocksparse(q, k, v, crow, col, *bounds, q_block_size=16, k_block_size=16)
    assert out[0, 0].nonzero().flatten().tolist() == [*range(16), 32]
    assert lse.item() == pytest.approx(math.log(17))


def test_every_block_listed_is_dense_attention():
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(40, 2, 8, generator=g, dtype=torch.float64) for _ in range(3))
    crow = torch.tensor([[0, 3, 6, 9]], dtype=torch.int32)
    col = torch.tensor([[2, 1, 0] * 3], dtype=torch.int32)
    bounds = cumulative([40])
    sizes = {"q_block_size": 16, "k_block_size": 16, "precision": GOLDEN}
    out, lse = blocksparse(q, k, v, crow, col, bounds, **sizes)
    want, want_lse = flash_varlen(q, k, v, bounds, causal=True, precision=GOLDEN)
    assert torch.equal(out, want) and torch.equal(lse, want_lse)
