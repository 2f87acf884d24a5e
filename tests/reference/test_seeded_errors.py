"""Errors that a kernel may make, seeded one at a time where the accuracy rule grants the most: few
rows, rows that are alike, dropout that magnifies, logits of long sums, sums of float8 that are cut
off, a long context. Each has to be found; what is right passes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_paged_attn.reference import BASELINE, flash_varlen
from torch_paged_attn.reference.philox import dropout_keep
from torch_paged_attn.testing import Truth, assert_accurate
from torch_paged_attn.testing.inputs import cumulative

HEADS, DIM = 2, 64
SEED = torch.tensor([3, 0])


@dataclasses.dataclass
class Case:
    """A call of the reference, the truth about it, and the key that counts most in its last row."""

    run: Callable[..., tuple[Tensor, Tensor]]
    truth: Truth
    rows: int
    keys: int
    heaviest: int

    def without(self, keys: slice) -> tuple[Tensor, Tensor]:
        """What comes out where the last row of head 1 has lost some keys."""
        mask = torch.ones(HEADS, self.rows, self.keys, dtype=torch.bool)
        mask[1, -1, keys] = False
        return self.run(attn_bias=mask)


@functools.cache
def case(setting: str, rows: int, keys: int, dtype: torch.dtype = torch.bfloat16) -> Case:
    g = torch.Generator().manual_seed(keys)
    q, k, v = (torch.randn(n, HEADS, DIM, generator=g) for n in (rows, keys, keys))
    options: dict[str, Any] = {"softmax_scale": DIM**-0.5}
    if setting == "rows alike":
        options["softmax_scale"] = 0.0
    elif setting == "dropout":
        options.update(dropout_p=0.9, rng_state=SEED)
    elif setting == "long sums":  # hundreds to an element, logits of some twenty
        q, k = q + 0.5, (64.0 * (k + 0.5)).round()
        options["softmax_scale"] /= 24.0
    elif setting == "finer result":
        options["out_dtype"] = torch.float32
    elif setting == "float8":
        dtype = torch.float8_e4m3fn
        options["out_dtype"] = torch.bfloat16
    q, k, v = (x.to(dtype) for x in (q, k, v))
    bounds = cumulative([rows]), cumulative([keys])
    run = functools.partial(flash_varlen, q, k, v, *bounds, **options, precision=BASELINE)
    truth = Truth.of(flash_varlen, q, k, v, *bounds, **options, cuts_off=setting == "float8")
    logits = q[-1, 1].float() @ k[:, 1].float().T * options["softmax_scale"]
    if setting == "dropout":
        kept = dropout_keep(SEED, 0.9, 0, HEADS, rows, keys)
        logits = logits.masked_fill(~kept[1, -1], -torch.inf)
    return Case(run, truth, rows, keys, int(logits.argmax()))


SETTINGS = ["plain", "rows alike", "dropout", "long sums", "finer result"]
SIZES = [(1, 60), (2, 513), (17, 513)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
over_cases = pytest.mark.parametrize(
    "setting, size, dtype",
    [(s, n, d) for s in SETTINGS for n in SIZES for d in DTYPES],
    ids=lambda x: str(x).removeprefix("torch."),
)


def refuse(out: Tensor, lse: Tensor, truth: Truth) -> None:
    with pytest.raises(AssertionError, match=r"error|softmax_lse"):
        assert_accurate(out, lse, truth)


@over_cases
def test_what_is_right_passes(setting, size, dtype):
    c = case(setting, *size, dtype)
    assert_accurate(*c.run(), c.truth)


@over_cases
def test_a_row_that_is_scaled(setting, size, dtype):
    c = case(setting, *size, dtype)
    out, lse = c.run()
    out[0, 1] *= 1.01
    refuse(out, lse, c.truth)


@over_cases
def test_a_row_without_the_key_that_counts_most(setting, size, dtype):
    """By `out` alone: softmax_lse is that of all keys."""
    c = case(setting, *size, dtype)
    refuse(c.without(slice(c.heaviest, c.heaviest + 1))[0], c.run()[1], c.truth)


@over_cases
@pytest.mark.parametrize("error", [9e-4, -1e-4])
def test_softmax_lse_of_one_row(setting, size, dtype, error):
    c = case(setting, *size, dtype)
    out, lse = c.run()
    lse[1, 0] += error
    refuse(out, lse, c.truth)


@pytest.mark.parametrize("rows, keys", [(2, 513), (17, 513), (17, 2048)])
def test_float8_whose_sums_are_cut_off(rows, keys):
    """Probabilities are float8 here: a row may be 8 % off by their roundings, and not by 10."""
    c = case("float8", rows, keys)
    out, lse = c.run()
    assert_accurate(out, lse, c.truth)
    scaled, moved = out.clone(), lse.clone()
    scaled[0, 1] *= 1.1
    moved[1, 0] += 2e-3
    refuse(scaled, lse, c.truth)
    refuse(out, moved, c.truth)
    refuse(out, lse + 6e-4, c.truth)
    refuse(c.without(slice(c.heaviest, c.heaviest + 1))[0], lse, c.truth)


def test_a_long_context_without_one_block():
    """64 keys of 131,072, by either result."""
    c = case("plain", 1, 2**17)
    right, wrong = c.run(), c.without(slice(70_016, 70_080))
    assert_accurate(*right, c.truth)
    refuse(wrong[0], right[1], c.truth)
    refuse(right[0], wrong[1], c.truth)
