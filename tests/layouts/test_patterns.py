"""The builders against their definitions, spelled out block by block."""

import pytest
import torch

from torch_paged_attn.layouts import bigbird, local_strided, sliding_window


def local_strided_mask(num_heads, num_blocks, local_blocks, vert_stride, homo_head=False):
    """Phi-3-small's rule as its inference engine documents it, one block at a time."""
    step = 0 if homo_head else max(1, int(vert_stride / num_heads))
    return torch.tensor(
        [
            [
                [
                    c <= r and (r - c < local_blocks or (c + h * step + 1) % vert_stride == 0)
                    for c in range(num_blocks)
                ]
                for r in range(num_blocks)
            ]
            for h in range(num_heads)
        ]
    )


@pytest.mark.parametrize(
    ("num_heads", "local_blocks", "vert_stride"),
    [(32, 16, 8), (4, 1, 8), (3, 2, 7), (1, 0, 3), (8, 4, 1), (2, 3, 16)],
)
def test_local_strided(num_heads, local_blocks, vert_stride):
    layout = local_strided(num_heads, 21 * 64 - 5, 64, local_blocks, vert_stride)
    expected = local_strided_mask(num_heads, 21, local_blocks, vert_stride)
    assert torch.equal(layout.dense(), expected)


def test_local_strided_homo_head_has_one_row_for_all():
    layout = local_strided(4, 10 * 16, 16, 2, 3, homo_head=True)
    assert layout.num_heads == 1
    assert torch.equal(layout.dense(), local_strided_mask(4, 10, 2, 3, homo_head=True)[:1])


def test_local_strided_rank_share_keeps_the_shift_of_the_whole_model():
    layout = local_strided(8, 12 * 64, 64, 2, 4)
    assert torch.equal(layout.heads(4, 8).dense(), local_strided_mask(8, 12, 2, 4)[4:])


def test_local_strided_finer_rows_keep_the_mask():
    layout = local_strided(2, 6 * 64, 64, 2, 3, q_block_size=16)
    expected = local_strided_mask(2, 6, 2, 3).repeat_interleave(4, dim=1)
    assert torch.equal(layout.dense(), expected)
    assert (layout.q_block_size, layout.k_block_size) == (16, 64)


def test_local_strided_coarser_rows_see_the_union():
    layout = local_strided(2, 5 * 32, 32, 1, 3, q_block_size=64)
    fine = local_strided_mask(2, 5, 1, 3)
    expected = torch.stack([fine[:, 0:2].any(1), fine[:, 2:4].any(1), fine[:, 4]], dim=1)
    assert torch.equal(layout.dense(), expected)


@pytest.mark.parametrize(("left", "right"), [(-1, 0), (0, 0), (15, 0), (16, 0), (40, 7), (3, -1)])
@pytest.mark.parametrize(("q_block_size", "k_block_size"), [(16, 16), (32, 16), (16, 64)])
def test_sliding_window_lists_the_blocks_that_hold_a_visible_pair(
    left, right, q_block_size, k_block_size
):
    max_seqlen = 128
    layout = sliding_window(max_seqlen, left, right, q_block_size, k_block_size)
    p, j = torch.arange(max_seqlen)[:, None], torch.arange(max_seqlen)
    tokens = (j >= p - left if left >= 0 else True) & (j <= p + right if right >= 0 else j >= 0)
    blocks = tokens.unflatten(0, (-1, q_block_size)).unflatten(-1, (-1, k_block_size))
    assert torch.equal(layout.dense()[0], blocks.any(3).any(1))


@pytest.mark.parametrize("causal", [False, True])
def test_bigbird_has_its_three_parts(causal):
    layout = bigbird(4, 20 * 16, 16, 2, 3, 4, causal=causal, seed=7)
    mask = layout.dense()
    r, c = torch.arange(20)[:, None], torch.arange(20)
    fixed = (r < 2) | (c < 2) | ((r - c).abs() <= 1)
    allowed = c <= r if causal else torch.ones_like(fixed)
    assert bool(mask[:, fixed & allowed].all())
    assert not mask[:, ~allowed].any()
    free = (allowed & ~fixed).sum(-1)
    drawn = (mask & ~fixed).sum(-1)
    assert torch.equal(drawn, free.clamp(max=4).expand_as(drawn))
    assert not torch.equal(mask[0], mask[1])


def test_bigbird_seed_decides_the_draw():
    one, same, other = (bigbird(2, 1024, 16, seed=seed).dense() for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("device", ["cpu", None])
def test_bigbird_under_a_default_device(device):
    expected = bigbird(2, 1024, 16)
    with torch.device("meta"):
        layout = bigbird(2, 1024, 16, device=device)
    assert layout.device.type == (device or "meta")
    assert layout.crow_indices.shape == expected.crow_indices.shape
    if device:
        assert torch.equal(layout.dense(), expected.dense())


def test_parts_can_be_left_out():
    assert not bigbird(1, 256, 16, 0, 0, 0).dense().any()
    assert local_strided(4, 0).num_rows == 0
    assert bigbird(2, 0).num_rows == 0


def test_a_long_context_layout_stays_cheap():
    # 32 heads, 64k tokens: eight distinct patterns are built, not 32
    layout = local_strided(32, 65536)
    assert layout.crow_indices.shape == (32, 1025)
    assert torch.equal(layout.crow_indices[0], layout.crow_indices[8])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: local_strided(0, 64), "num_heads must be at least 1, got 0"),
        (lambda: local_strided(1, 64, 60), "block_size must be one of .*, got 60"),
        (lambda: local_strided(1, 64, q_block_size=8), "q_block_size must be one of .*, got 8"),
        (lambda: local_strided(1, 64, vert_stride=0), "vert_stride must be at least 1, got 0"),
        (lambda: local_strided(1, 64, local_blocks=-1), "local_blocks must be at least 0, got -1"),
        (lambda: local_strided(1, -1), "max_seqlen must be at least 0, got -1"),
        (lambda: sliding_window(64, -2), "window_size_left must be at least -1, got -2"),
        (lambda: sliding_window(64, 0, -2), "window_size_right must be at least -1, got -2"),
        (lambda: bigbird(1, 64, window_blocks=2), "window_blocks must be 0 or an odd .* got 2"),
        (lambda: bigbird(1, 64, random_blocks=-1), "random_blocks must be at least 0, got -1"),
        (lambda: bigbird(1, 64, global_blocks=-1), "global_blocks must be at least 0, got -1"),
    ],
)
def test_bad_arguments_are_named(build, text):
    with pytest.raises(ValueError, match=text):
        build()
