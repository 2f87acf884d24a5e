"""Pages of sizes that kernels are not compiled for, and pages that hold all of a sequence."""

import dataclasses

import pytest
import torch

from torch_paged_attn.testing import Problem, assert_accurate, build

BF16 = torch.bfloat16
DECODES = ((1, 299), (1, 0), (1, 63))
MIXED = ((1, 130), (37, 91), (0, 17), (5, 64))
SIZES = (3, 5, 17, 48, 100, 544, 1000)
# as large as the longest sequence, so that each has one page
ROWS = (128, 301)


def problem(seqs, page_size, **options):
    options = {"dtype": BF16, "cache_layout": "nhd"} | options
    return Problem("pages", seqs, 4, 2, 64, page_size=page_size, **options)


# a kind of call each, so that each size is in some, and each option with a small and a large size
CASES = {
    "decode": [problem(DECODES, size) for size in (*SIZES, *ROWS)],
    "mixed": [problem(MIXED, size, padding_rows=3) for size in (17, 100, 128, 160)],
    "window": [problem(MIXED, size, window_size_left=20) for size in (5, 100, 155)],
    "float32": [problem(MIXED, size, dtype=torch.float32) for size in (48, 100, 155)],
    "int8": [
        problem(DECODES, size, kv_dtype=torch.int8, descale="heads") for size in (17, 544, 301)
    ],
    "e4m3": [problem(MIXED, size, kv_dtype=torch.float8_e4m3fn) for size in (3, 155)],
    "bias": [problem(MIXED, size, bias="float") for size in (17, 155)],
}


def build_pages(given):
    """A call whose table has one column if a page has room for all keys of a sequence."""
    call = build(given)
    if given.page_size >= max(map(sum, given.seqs)):
        call.args["block_table"] = call.args["block_table"][:, :1]
    return call


# kinds that read pages in ways of their own: by splits, from the middle of one, with scales
SAMPLED = ("decode", "window", "int8")


def cases():
    """With `--sample`, of three kinds the middle one, and the largest page that a decode has."""
    for kind, problems in CASES.items():
        sample = (problems[len(problems) // 2], *problems[-1:][: kind == "decode"])
        for case in problems:
            is_sampled = kind in SAMPLED and case in sample
            marks = () if is_sampled else pytest.mark.device_suite
            yield pytest.param(case, id=f"{kind}-{case.page_size}", marks=marks)


@pytest.mark.parametrize("given", cases())
def test_pages_of_any_size(given, run, device):
    """Also if pages are in another order, which changes no bit."""
    call = build_pages(given)
    state = run(call.to(device))
    assert_accurate(*state, call.truth())
    moved = run(build_pages(dataclasses.replace(given, page_seed=1)).to(device))
    assert all(torch.equal(x, y) for x, y in zip(state, moved, strict=True))
