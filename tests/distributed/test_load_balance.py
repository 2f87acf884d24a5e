"""Cuts of packed batches: everything once, in order, and ranks with equal work."""

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from torch_paged_attn.distributed.load_balance import SCHEMES, documents, owners

lengths = st.lists(st.one_of(st.integers(0, 5), st.integers(0, 300)), max_size=12)


def work(bounds, size):
    """Pairs of queries and keys of each rank, causal."""
    starts, counts = bounds[:, :-1], bounds.diff(dim=1)
    pairs = counts * starts + counts * (counts + 1) // 2
    found = torch.zeros(size, dtype=torch.int64)
    return found.index_add(0, torch.tensor(owners(bounds.shape[1] - 1, size)), pairs.sum(0))


def tokens(bounds, size):
    found = torch.zeros(size, dtype=torch.int64)
    at = torch.tensor(owners(bounds.shape[1] - 1, size))
    return found.index_add(0, at, bounds.diff(dim=1).sum(0))


@given(lengths, st.integers(1, 8), st.sampled_from(tuple(SCHEMES)))
@example([0, 0], 3, "documents")
@example([7], 8, "documents")
def test_chunks_are_the_documents(sizes, size, scheme):
    sizes = torch.tensor(sizes, dtype=torch.int64)
    rows = -(-int(sizes.sum()) // size)
    bounds = SCHEMES[scheme](sizes, size, rows)
    assert bounds.shape[1] - 1 in (size, 2 * size)
    assert (bounds[:, 0] == 0).all() and (bounds[:, -1] == sizes).all()
    assert (bounds.diff(dim=1) >= 0).all()
    assert (tokens(bounds, size) <= rows).all()


@pytest.mark.parametrize("size", (2, 4, 8))
def test_one_long_document_is_balanced(size):
    for scheme in ("head_tail", "documents"):
        bounds = SCHEMES[scheme](torch.tensor([4096 * size]), size, 4096)
        found = work(bounds, size)
        assert found.max() == found.min()
        assert (tokens(bounds, size) == 4096).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", (2, 4))
def test_packs_are_balanced(size, seed):
    """Documents up to a quarter of the pack: the dearest rank has a fiftieth more than its share at
    most, and there are few cuts.
    """
    g, total, sizes = torch.Generator().manual_seed(seed), 8192 * size, []
    while sum(sizes) < total:
        longest = min(total // 4, total - sum(sizes))
        sizes.append(int(torch.randint(min(256, longest), longest + 1, (), generator=g)))
    bounds = documents(torch.tensor(sizes), size, 8192)
    found = work(bounds, size)
    assert found.max() <= 1.02 * found.double().mean(), found
    assert ((bounds.diff(dim=1) > 0).sum(1) > 1).sum() < size


def test_documents_that_fill_ranks_stay_whole():
    bounds = documents(torch.tensor([4096, 4096, 4096, 4096]), 2, 8192)
    assert ((bounds.diff(dim=1) > 0).sum(1) == 1).all()
