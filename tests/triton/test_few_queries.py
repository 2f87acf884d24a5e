"""Which kernel and which tiles sequences of few queries get on Hopper: by estimates of how long
each way takes, whose costs are fitted to measurements that are in the repository."""

import dataclasses
import gzip
import json
import math
from pathlib import Path

import pytest
import torch
from hopper_calls import HOPPER, hopper_call

from torch_paged_attn.backends.triton import few_queries, flash_varlen, ways
from torch_paged_attn.backends.triton.hopper.support import GATHERED
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.testing import Problem

DATA = Path(__file__).parent / "data" / "ways_sweep.json.gz"

bf16, e4m3 = torch.bfloat16, torch.float8_e4m3fn
DECODES = Problem("decodes", ((1, 60),) * 9, 32, 8, dtype=bf16, page_size=16)


def call_of(problem, **options):
    if problem.page_size:
        options["block_table"] = torch.zeros(len(problem.seqs), 1024, dtype=torch.int32)
    return hopper_call(problem, **options)


def way_of(problem, longest=1, keys=1024, **options):
    with assume(HOPPER):
        return flash_varlen.way_of(call_of(problem, max_seqlen_k=keys, **options), longest)


def variant(**options):
    return dataclasses.replace(DECODES, **options)


def measured():
    """For each row of the measurements the way that is chosen, and figures of all that may be."""
    table = ways.ways()
    for row in json.loads(gzip.decompress(DATA.read_bytes())):
        num_heads, num_kv_heads, head_dim = row["heads"]
        size = 2 if row["kv_dtype"] == row["dtype"] else 1
        kind = f"d{head_dim}/b{size}"
        shape = ways.Shape(
            row["batch"], row["total_q"], num_kv_heads, num_heads // num_kv_heads,
            row["longest_q"], flash_varlen.said_of_reach(row["keys"][2], False), row["window"],
            2 * head_dim * size, row["page_size"] in GATHERED, head_dim,
        )  # fmt: skip
        is_low = shape.rows <= few_queries.MOST_PORTABLE
        known = [x for x in table[kind] if x in row["figures"]]
        allowed = frozenset(x for x in known if is_low or not ways.is_portable(x))
        if allowed:
            figures = {x: row["figures"][x] for x in allowed}
            yield kind, ways.choose_way(kind, shape, allowed), figures


def test_choices_are_near_the_best_that_was_measured():
    ratios = [f[way] / min(f.values()) for _, way, f in measured() if len(f) > 2]
    assert len(ratios) > 400
    assert math.exp(sum(map(math.log, ratios)) / len(ratios)) < 1.035
    assert sum(ratio > 1.2 for ratio in ratios) < 0.05 * len(ratios)


def test_each_way_is_chosen():
    chosen = {(kind, way) for kind, way, _ in measured()}
    assert chosen == {(kind, way) for kind, of_kind in ways.ways().items() for way in of_kind}


def test_the_costs_have_the_names_of_the_table():
    assert json.loads(ways.TABLE.read_text())["names"] == list(ways.Costs._fields)


@pytest.mark.parametrize(
    "problem, longest",
    [
        (variant(page_size=None), 1),
        (variant(dtype=torch.float32), 1),
        (variant(head_dim=512), 1),
        (variant(dtype=e4m3), 1),
        (variant(seqs=((30, 60),) * 9), 30),  # more rows than one consumer has
        (variant(seqs=((3, 60),) * 9), 0),  # the longest length is unknown
        (variant(seqs=()), 1),
    ],
)
def test_calls_that_have_no_way(problem, longest):
    assert way_of(problem, longest) is None


def test_calls_that_must_not_depend_on_the_batch_have_no_way():
    assert way_of(DECODES, batch_invariant=True) is None


def test_other_chips_have_no_way():
    with assume(Target.of_arch("sm80", 108)):
        assert flash_varlen.way_of(hopper_call(DECODES, max_seqlen_k=100), 1) is None


def test_decodes_are_recognised_by_their_number():
    """More than 64 of them are no reason to take them for longer ones, if there is no hint."""
    assert way_of(variant(seqs=((1, 60),) * 90), 0) == way_of(variant(seqs=((1, 60),) * 90), 1)


@pytest.mark.parametrize("kv_dtype", [None, e4m3])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("queries", [1, 5, 8])
def test_ways_that_can_run_a_call(queries, head_dim, kv_dtype):
    """The portable kernel where Hopper's cannot, and the other way round."""
    problem = variant(seqs=((queries, 60),) * 12, head_dim=head_dim, kv_dtype=kv_dtype)
    is_low = queries * 4 <= few_queries.MOST_PORTABLE
    of_any = call_of(problem)
    with assume(HOPPER):
        for keys in (64, 900, 9000):
            call = dataclasses.replace(of_any, max_seqlen_k=keys)
            way = flash_varlen.way_of(call, queries)
            assert (way.form is None) is not (way.config is None)
            assert is_low or way.form is not None
            if way.form is not None:
                assert way.form.is_guessed
                assert not way.form.is_divided or (head_dim < 256 and kv_dtype is None)
                assert not way.form.is_tall or kv_dtype is not None
            soft = dataclasses.replace(call, dropout_p=0.5)  # Hopper's kernel has none
            way = flash_varlen.way_of(soft, queries)
            assert way.form is None if is_low else way is None


def test_long_sequences_are_not_left_to_one_program_each():
    """Few sequences of very many keys are divided, by every kernel."""
    for queries in (1, 8):
        way = way_of(variant(seqs=((queries, 60),) * 2), queries, keys=8192)
        assert way.form is None or not way.form.is_numbered


def test_more_keys_take_longer():
    for kind, of_kind in ways.ways().items():
        for way, costs in of_kind.items():
            shape = ways.Shape(7, 7, 8, 4, 1, 0, -1, 512, False, 128)
            times = [
                ways.estimate(way, costs, shape, ways.Lengths(0.9 * keys, keys))
                for keys in (512, 4096, 32768)
            ]
            assert times == sorted(times), (kind, way)
