"""The benchmarks measure fairly, refuse what is wrong, and know how much work a call is."""

import argparse
import dataclasses

import pytest

pytest.importorskip("rich")

import report
import run
import vllm_peer
import workloads
from measure import MIN_ROUNDS, Sample, Timing, interleave
from problems import BENCHMARKS, Attention, CacheWrite

from torch_paged_attn.testing import Layout, Problem, assert_same_in_float64

SMALL = Problem("small", ((5, 3), (70, 0), (1, 40)), 4, 2, 32, page_size=16)
DROPOUT = dataclasses.replace(SMALL, name="dropout", seqs=((70, 3),), dropout_p=0.1)
OPTIONS = argparse.Namespace(threads=[1], seconds=0.0, flex=False, isa=[])


def test_contenders_take_turns():
    order = []

    def contender(name, wall):
        def sample(number):
            order.append(name)
            return Sample(wall, wall)

        return sample

    timings = interleave({"a": contender("a", 0.2), "b": contender("b", 0.1)}, 0.0, threads=1)
    assert order == ["a", "a", "b", "b"] + ["a", "b"] * MIN_ROUNDS
    assert timings["a"].seconds == pytest.approx(0.2)


def test_one_thread_quotes_the_smallest_cpu_time():
    samples = [Sample(wall=3.0, cpu=1.0), Sample(wall=9.0, cpu=1.2), Sample(wall=1.1, cpu=1.1)]
    timing = Timing.of(samples, threads=1)
    assert timing.seconds == 1.0
    assert not timing.busy


def test_threads_quote_the_median_of_undisturbed_wall_times():
    disturbed, quiet = [Sample(9.0, 2.0)] * 5, [Sample(w, 2 * w) for w in (1.0, 1.5, 4.0)]
    timing = Timing.of(disturbed + quiet, threads=2)
    assert timing.seconds == 1.5
    assert not timing.busy
    assert Timing.of(disturbed + quiet[:2], threads=2).busy


def test_rates_ratios_and_shares():
    def seconds(value):
        return {"seconds": value, "busy": False}

    row = {
        "work": 100.0,
        "ceiling": {"name": "read", "work": 50.0},
        "timings": {"ours": seconds(2.0), "peer": seconds(5.0), "read": seconds(0.5)},
    }
    assert report.rate(row) == 50.0
    assert report.rate(row, "read") == 100.0
    assert report.of_ceiling(row) == 0.5
    assert report.speedup(row, "peer") == 2.5
    assert report.peers(row) == ["peer"]


def test_the_report_fails_where_another_instruction_set_is_faster():
    def row(problem, **forced):
        forced = {isa + report.FORCED: {"seconds": t, "busy": False} for isa, t in forced.items()}
        timings = {"ours": {"seconds": 9.0, "busy": False}} | forced
        return {"problem": problem, "threads": 1, "isa": "avx512", "timings": timings}

    best, worse = row("best", avx2=0.98, avx512=1.0), row("worse", avx2=0.5, avx512=1.0)
    alone = row("alone")
    assert report.of_best_isa(worse) == 0.5 and report.of_best_isa(alone) is None
    assert report.slower_by_default({"results": [best, alone]}) == []
    (line,) = report.slower_by_default({"results": [best, worse, alone]})
    assert line == "worse, 1 threads: 0.50 of the best instruction set"


def test_threads_are_compared_in_quiet_wall_time():
    def row(threads, wall, undisturbed=MIN_ROUNDS):
        ours = {"seconds": 0.5, "wall": wall, "undisturbed": undisturbed, "busy": False}
        return {"problem": "p", "threads": threads, "timings": {"ours": ours}}

    one, two, disturbed = row(1, 3.0), row(2, 1.5), row(2, 1.0, undisturbed=0)
    assert report.of_one_thread(two, [one, two]) == 2.0
    assert report.of_one_thread(one, [one, two]) is None
    assert report.of_one_thread(two, [two]) is None
    assert report.of_one_thread(disturbed, [one, disturbed]) is None


def test_work_counts_visible_pairs():
    work = workloads.make(Attention(SMALL, "matmul")).work
    pairs = sum(c + i + 1 for q, c in SMALL.seqs for i in range(q))
    assert work == 4 * 32 * 4 * pairs  # two products, two flops, 4 heads

    dense = dataclasses.replace(SMALL, layout=Layout(16, 16, "kv", density=1.0))
    assert workloads.make(Attention(dense, "matmul")).work == work


@pytest.mark.parametrize("name", BENCHMARKS)
def test_names_are_found(name):
    assert BENCHMARKS[name].name == name


@pytest.mark.parametrize(
    "benchmark",
    [
        Attention(SMALL, "read"),
        Attention(dataclasses.replace(SMALL, name="packed", page_size=None), "matmul"),
        Attention(DROPOUT, "matmul"),
        Attention(dataclasses.replace(SMALL, name="sparse", layout=Layout(16, 16, "kv")), "matmul"),
        CacheWrite("write", 40),
    ],
    ids=lambda benchmark: benchmark.name,
)
def test_wrong_results_are_not_timed(benchmark, monkeypatch):
    monkeypatch.setitem(BENCHMARKS, benchmark.name, benchmark)
    monkeypatch.setattr(vllm_peer, "missing", lambda: "not part of this test")
    (row,) = run.measure(benchmark.name, OPTIONS, None)
    assert row["timings"]["ours"]["seconds"] > 0
    kind = type(workloads.make(benchmark))

    def almost(self):
        if kind is workloads.CacheWriteWorkload:
            return None  # writes nothing
        out, lse = self.call.run()
        out[-1, -1, -1] += 0.5
        return out, lse

    monkeypatch.setattr(kind, "run", almost)
    (row,) = run.measure(benchmark.name, OPTIONS, None)
    assert "refused" in row
    assert "timings" not in row


def test_rows_alone_give_the_rows_of_the_whole_call():
    for problem in (SMALL, dataclasses.replace(SMALL, page_size=None)):
        workload = workloads.make(Attention(problem, "matmul"))
        whole = workload.call.truth()
        rows = workloads.rows_alone(workload.call, 1, 20, 36).truth()
        assert_same_in_float64(rows.out, whole.out[25:41])
        assert_same_in_float64(rows.softmax_lse, whole.softmax_lse[:, 25:41])
