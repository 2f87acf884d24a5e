"""Caches of 8 bits, byte by byte, and pages and rows that are none, on every generation."""

import pytest
import torch

from torch_paged_attn.backends.neuron import BACKEND
from torch_paged_attn.backends.neuron.paged_kv import PagedKV

GENERATIONS = [2, 3, 4]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8]
BYTES = torch.arange(256, dtype=torch.uint8)
ONE = torch.ones(())

generations = pytest.mark.parametrize("machine", GENERATIONS, indirect=True)


def attend(q, k, v, **options):
    """Queries of one sequence over its keys, all seen."""
    bounds = [torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k)]
    function = BACKEND.function("flash_varlen")
    scales = {"k_descale": ONE, "v_descale": ONE}
    return function(q, k, v, *bounds, q.shape[0], k.shape[0], softmax_scale=1.0, **scales)


@generations
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_query_of_one_key_is_its_value_whatever_its_byte(q_dtype, dtype, machine):
    """448, the lowest numbers, both zeros, infinity and NaN: each byte is one dim of one value."""
    values = BYTES.view(dtype)[None, None]
    q = torch.zeros(1, 1, 16, dtype=q_dtype)
    out, _ = attend(q, torch.zeros(1, 1, 16).to(dtype), values)
    expected = values.to(q_dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


@generations
@pytest.mark.parametrize("dtype", FORMATS)
def test_a_key_is_read_whatever_its_byte(dtype, machine):
    """A query is 1 in one dim: its softmax_lse over one key is that dim of the key."""
    finite = BYTES[BYTES.view(dtype).float().isfinite()].view(dtype)
    q = torch.eye(len(finite))[:, None]
    _, lse = attend(q, finite[None, None], torch.zeros(1, 1, 8).to(dtype))
    assert torch.equal(lse[0], finite.float())


@generations
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nan_in_a_key_is_nan_where_it_is_seen(dtype, machine):
    keys = torch.full((2, 1, 8), 448.0).to(dtype)
    keys[1, 0, 3] = float("nan")
    q = torch.ones(1, 1, 8)
    for count, is_nan in ((1, False), (2, True)):
        out, lse = attend(q, keys[:count], torch.ones(count, 1, 8).to(dtype))
        assert bool(out.isnan().all()) == bool(lse.isnan().all()) == is_nan
        assert is_nan or lse.item() == keys[0].float().sum()


def attend_pages(pages, *ids):
    """One query over 20 keys in two pages of 16."""
    q = torch.ones(1, 1, 16)
    bounds, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([20], dtype=torch.int32)
    options = {"block_table": torch.tensor([ids], dtype=torch.int32), "seqused_k": length}
    return BACKEND.function("flash_varlen")(q, pages, pages, bounds, None, 1, 20, **options)


@generations
@pytest.mark.parametrize(("page", "nearest"), [(3, 2), (2**30, 2), (-1, 0), (-(2**31), 0)])
def test_a_page_that_is_none_leads_to_the_nearest(page, nearest, machine):
    pages = torch.randn(3, 1, 16, 16)
    for got, expected in zip(
        attend_pages(pages, 1, page), attend_pages(pages, 1, nearest), strict=True
    ):
        assert torch.equal(got, expected)


@generations
@pytest.mark.parametrize("row", [48, -1, 2**30])
def test_a_gather_of_keys_leaves_none_out(row, machine, monkeypatch):
    """Of a plan with a row that is none: left out, what the tile held before would be its key."""
    from nki_emulator import Violation

    monkeypatch.setattr(PagedKV, "row_of", lambda self, page, head, slot: page * 0 + row)
    with pytest.raises(Violation, match=r"out of bounds|is outside"):
        attend_pages(torch.randn(3, 1, 16, 16), 0, 1)
