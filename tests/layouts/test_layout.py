"""BlockSparseLayout: what it accepts, and that mask -> layout -> mask loses nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_paged_attn.layouts import BlockSparseLayout, from_dense_mask


def random_mask(*shape: int, density: float = 0.3, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator) < density


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    leading=st.sampled_from([(), (1,), (3,), (2, 3)]),
    rows=st.integers(0, 7),
    cols=st.integers(0, 7),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 100),
)
def test_dense_mask_round_trip(leading, rows, cols, density, seed):
    mask = random_mask(*leading, rows, cols, density=density, seed=seed)
    layout = from_dense_mask(mask, 16, 32)
    expected = mask if leading else mask[None]
    assert torch.equal(layout.dense(), expected)
    assert layout.crow_indices.dtype == layout.col_indices.dtype == torch.int32
    assert (layout.q_block_size, layout.k_block_size) == (16, 32)
    assert layout.num_rows == rows
    assert int(layout.crow_indices.diff(dim=-1).sum()) == int(mask.sum())


def test_columns_follow_their_head_and_row():
    mask = torch.tensor([[[1, 0, 1], [0, 0, 0]], [[0, 1, 0], [1, 1, 1]]], dtype=torch.bool)
    layout = from_dense_mask(mask)
    assert layout.crow_indices.tolist() == [[0, 2, 2], [0, 1, 4]]
    assert layout.col_indices[0, :2].tolist() == [0, 2]
    assert layout.col_indices[1].tolist() == [1, 0, 1, 2]


def test_dense_ignores_padding_and_order():
    layout = BlockSparseLayout(
        torch.tensor([[0, 2, 3]], dtype=torch.int32),
        torch.tensor([[1, 0, 1, 9, -1]], dtype=torch.int32),
        64,
        64,
    )
    assert layout.dense().tolist() == [[[True, True], [False, True]]]


def test_dense_of_indices_with_any_stride():
    layout = from_dense_mask(random_mask(2, 5, 5), 16)
    spread = torch.zeros(2, 2 * layout.col_indices.size(-1), dtype=torch.int32)[:, ::2]
    spread.copy_(layout.col_indices)
    strided = BlockSparseLayout(layout.crow_indices, spread, 16, 16, num_cols=5)
    assert torch.equal(strided.dense(), layout.dense())


def test_density_counts_what_a_causal_mask_leaves():
    full = from_dense_mask(torch.ones(4, 4, dtype=torch.bool))
    assert full.density(causal=True) == 1.0
    assert full.density(causal=False) == 1.0
    diagonal = from_dense_mask(torch.eye(4, dtype=torch.bool))
    assert diagonal.density(causal=True) == 4 / 10
    assert diagonal.density(causal=False) == 4 / 16
    # rows of 32 positions reach two columns of 16 each
    assert from_dense_mask(torch.eye(2, 4, dtype=torch.bool), 32, 16).density() == 2 / 6
    assert from_dense_mask(torch.zeros(0, 0, dtype=torch.bool)).density() == 0.0


def test_heads_and_to_and_arguments():
    mask = random_mask(4, 3, 3)
    layout = from_dense_mask(mask)
    assert torch.equal(layout.heads(1, 3).dense(), mask[1:3])
    assert layout.to("meta").device.type == "meta"
    assert sorted(layout.arguments()) == [
        "col_indices",
        "crow_indices",
        "k_block_size",
        "q_block_size",
    ]
    with pytest.raises(ValueError, match=r"heads must satisfy .* <= 4, got start=2, stop=5"):
        layout.heads(2, 5)


@pytest.mark.parametrize("head", [None, 1])
def test_plot_writes_a_picture(tmp_path, head):
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "layout.png"
    from_dense_mask(torch.ones(10, 6, 6, dtype=torch.bool)).plot(path, head=head)
    picture = image.imread(path)
    blue = (picture[..., 2] - picture[..., 0]) > 0.1
    assert blue.mean() > 0.2


def test_plot_into_an_axes():
    figure = pytest.importorskip("matplotlib.figure").Figure()
    ax = figure.subplots()
    from_dense_mask(torch.ones(2, 2, dtype=torch.bool)).plot(ax)
    # the block above the diagonal is listed, but a causal mask hides it
    picture = ax.images[0].get_array()
    assert picture[0, 1] == torch.tensor(0.3).item()
    assert picture[1, 0] == picture[0, 0] == 1


def test_indices_of_64_bits_are_cast():
    crow, col = torch.tensor([[0, 1]]), torch.tensor([[0]])
    layout = BlockSparseLayout(crow, col, 64, 64)
    assert layout.crow_indices.dtype == layout.col_indices.dtype == torch.int32
    assert torch.equal(layout.dense(), torch.ones(1, 1, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=f"col_indices.*{2**32}"):
        BlockSparseLayout(crow, col + 2**32, 64, 64)


CROW = torch.zeros(2, 3, dtype=torch.int32)
COL = torch.zeros(2, 4, dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0], COL, 64, 64), TypeError, "crow_indices must be a tensor, got list"),
        ((CROW.short(), COL, 64, 64), ValueError, "must be int32 or int64, got torch.int16"),
        ((CROW, COL[0], 64, 64), ValueError, r"col_indices .* got shape \(4,\)"),
        ((CROW, COL[:1], 64, 64), ValueError, r"agree .* got shapes \(2, 3\) and \(1, 4\)"),
        ((CROW[:, :0], COL, 64, 64), ValueError, r"crow_indices .* rows \+ 1 .* \(2, 0\)"),
        ((CROW, COL.to("meta"), 64, 64), ValueError, "one device, got cpu and meta"),
        ((CROW, COL, 48, 64), ValueError, "q_block_size must be one of .*, got 48"),
        ((CROW, COL, 64, 512), ValueError, "k_block_size must be one of .*, got 512"),
    ],
)
def test_malformed_layouts_are_refused(arguments, error, text):
    with pytest.raises(error, match=text):
        BlockSparseLayout(*arguments)


def test_malformed_masks_are_refused():
    with pytest.raises(ValueError, match=r"mask must be a bool tensor, got torch\.float32"):
        from_dense_mask(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"mask must be .*, got shape \(2,\)"):
        from_dense_mask(torch.ones(2, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_cols must exceed column 3, got 2"):
        layout = from_dense_mask(torch.ones(4, 4, dtype=torch.bool))
        BlockSparseLayout(**layout.arguments(), num_cols=2).dense()
