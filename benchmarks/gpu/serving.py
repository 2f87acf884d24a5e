"""Serving steps drawn from a seed, beside every peer that can do them.

    python benchmarks/gpu/serving.py --seed 7 --draws 60 --fa3 _vllm_fa3_C.abi3.so --json OUT

What is compiled is compiled first, by many processes. A step's result is compared with a formula
in float32, of some of its rows, before anything is timed; a peer that is wrong takes no part. The
calls of a contender are captured in a CUDA graph, each with pages of its own out of a large cache,
and before a replay the chip's cache is overwritten: keys and values come from memory. FA3 is given
its scheduler's metadata, as an engine makes them once for all layers. `serving_report.py` draws.
"""

import argparse
import concurrent.futures
import functools
import gc
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention
import run as gpu_run
import serving_report
import torch
from draws import Step, draw_steps
from formula import formula
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_attn.backends.triton.flash_varlen import flash_varlen

DEVICE = "cuda"
# of keys and values together: calls of a graph take other pages of it
POOL_BYTES = 6 << 30
# what calls of a graph read together, and how many calls there are
READ_BYTES, MOST_CALLS, LEAST_CALLS = 256 << 20, 16, 3
# seconds of a contender's replays, and how many there are
EACH_SECONDS, MOST_ROUNDS, LEAST_ROUNDS = 0.05, 9, 3
# sequences and queries that the formula is worked out for
CHECKED, CHECKED_QUERIES = 3, 32
MOST_ERROR = {"ours": 0.01, "FA3": 0.01, "FA2": 0.01, "cuDNN": 0.01, "FA3 fp8": 0.15}

# of 8-bit caches
DESCALE = 0.9

PROCESSES = 15
# of a process that compiles: whatever is read is the same page
SMALL_POOL = 64 << 20


@functools.cache
def pool(dtype: torch.dtype, size: int = POOL_BYTES) -> torch.Tensor:
    """Random numbers, of which caches are parts."""
    count = size // dtype.itemsize
    if dtype != torch.bfloat16:
        return pool(torch.bfloat16, size)[:count].to(dtype)
    return torch.empty(count, device=DEVICE, dtype=dtype).normal_()


class Batch:
    """A step's tensors: one set of queries and lengths, and for each call keys of its own."""

    def __init__(self, step: Step, calls: int, size: int = POOL_BYTES) -> None:
        self.step = step
        dtype, self.kv_dtype = getattr(torch, step.dtype), getattr(torch, step.kv_dtype)
        self.q = torch.randn(step.total_q, step.num_heads, step.head_dim, device=DEVICE).to(dtype)
        self.cu = attention.cumulative(step.queries)
        self.used = torch.tensor(step.keys, device=DEVICE, dtype=torch.int32)
        self.longest = max(step.queries), max(step.keys)
        self.sinks = torch.randn(step.num_heads, device=DEVICE) if step.sinks else None
        self.descale = None
        if self.kv_dtype.itemsize == 1:
            shape = step.batch, step.num_kv_heads
            self.descale = torch.full(shape, DESCALE, device=DEVICE)
        halves = pool(self.kv_dtype, size).chunk(2)
        row = step.num_kv_heads, step.head_dim
        if step.page_size:
            each = math.prod((step.page_size, *row))
            pages = max(min(x.numel() // each for x in halves), 1)
            shape = pages, step.page_size, *row
            self.k, self.v = (x[: pages * each].view(shape) for x in halves)
            self.tables = self._tables(pages, calls)
        else:
            each = math.prod((step.total_q, *row))
            self.packed = [
                [x[i * each : (i + 1) * each].view(step.total_q, *row) for x in halves]
                for i in range(calls)
            ]

    def _tables(self, pages: int, calls: int) -> list[torch.Tensor]:
        """For each call, pages in random order that no call before it has, while there are any."""
        page_size = self.step.page_size
        counts = (self.used + page_size - 1) // page_size
        first = counts.cumsum(0) - counts
        column = torch.arange(-(-self.step.table_width // page_size), device=DEVICE)
        is_used = column < counts[:, None]
        order = torch.randperm(pages, device=DEVICE, dtype=torch.int32)
        number = (first[:, None] + column).long()
        total = int(counts.sum())
        return [
            torch.where(is_used, order[(number + i * total) % pages], 0).int() for i in range(calls)
        ]

    def keys_of(self, call: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (keys, heads, dim) of a sequence of a call."""
        n = self.step.keys[b]
        if not self.step.page_size:
            start = int(self.cu[b])
            k, v = self.packed[call]
            return k[start : start + n], v[start : start + n]
        row = self.tables[call][b, : -(-n // self.step.page_size)].long()
        k, v = (x[row].flatten(0, 1)[:n].float() for x in (self.k, self.v))
        return (k, v) if self.descale is None else (k * DESCALE, v * DESCALE)


def ours(b: Batch, call: int) -> torch.Tensor:
    step = b.step
    if not step.page_size:
        return flash_varlen(b.q, *b.packed[call], b.cu, None, *b.longest, causal=step.causal)[0]
    return flash_varlen(
        b.q, b.k.transpose(1, 2), b.v.transpose(1, 2), b.cu, None, *b.longest, b.used,
        b.tables[call], None, None, b.sinks, None, b.descale, b.descale, causal=step.causal,
        window_size_left=step.window,
    )[0]  # fmt: skip


def peers(b: Batch, fa3: Any) -> dict[str, Callable[[int], torch.Tensor]]:
    """The peers that can run the step; each call gets its number."""
    step, dtype = b.step, b.q.dtype
    found: dict[str, Callable[[int], torch.Tensor]] = {}
    window = (step.window, 0) if step.window >= 0 else (-1, -1)
    sizes = step.batch, *b.longest, step.num_heads, step.num_kv_heads, step.head_dim, step.head_dim
    if fa3:
        q, descales = b.q, {}
        if b.descale is not None:
            q = b.q.to(b.kv_dtype)
            descales = dict.fromkeys(("k_descale", "v_descale"), b.descale)
            descales["q_descale"] = torch.ones_like(b.descale)
        meta = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            *sizes, q.dtype, b.used, b.cu, None, None, None, None, step.page_size or None, 0,
            step.causal, *window, False, 0, None, 0,
        )  # fmt: skip
        options = dict(
            cu_q=b.cu, max_q=b.longest[0], max_k=b.longest[1], causal=step.causal, window=window,
            meta=meta, sink=None if b.sinks is None else b.sinks.to(dtype), **descales,
        )  # fmt: skip
        if step.page_size:

            def call(i: int) -> torch.Tensor:
                return fa3.fwd(q, b.k, b.v, seqused_k=b.used, page_table=b.tables[i], **options)[0]
        else:

            def call(i: int) -> torch.Tensor:
                return fa3.fwd(q, *b.packed[i], cu_k=b.cu, **options)[0]

        found["FA3" if q.dtype == dtype else "FA3 fp8"] = call
    if not step.page_size:
        longest = b.longest[0]
        found["FA2"] = lambda i: torch.ops.aten._flash_attention_forward(
            b.q, *b.packed[i], b.cu, b.cu, longest, longest, 0.0, step.causal, False
        )[0]
        if len(set(step.queries)) == 1:
            shape = step.batch, longest, -1, step.head_dim
            dense = [[x.view(shape).transpose(1, 2) for x in (b.q, *kv)] for kv in b.packed]

            def cudnn(i: int) -> torch.Tensor:
                with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                    gqa = step.num_heads != step.num_kv_heads
                    out = scaled_dot_product_attention(
                        *dense[i], is_causal=step.causal, enable_gqa=gqa
                    )
                return out.transpose(1, 2).flatten(0, 1)

            found["cuDNN"] = cudnn
    return found


def some_rows(b: Batch) -> tuple[list[slice], slice, torch.Tensor]:
    """Some rows of the first call's result, the heads of a KV head, and the formula's result."""
    step = b.step
    group = step.num_heads // step.num_kv_heads
    order = sorted(range(step.batch), key=lambda i: step.queries[i])
    chosen = sorted({order[0], order[-1], order[len(order) // 2], step.batch - 1})[:CHECKED]
    heads = slice((step.num_kv_heads - 1) * group, step.num_heads)
    sinks = None if b.sinks is None else b.sinks[heads]
    rows, wanted = [], []
    for i in chosen:
        # packed keys see all keys, so that any rows are as good as the last ones
        stop = int(b.cu[i + 1])
        rows.append(slice(stop - min(step.queries[i], CHECKED_QUERIES), stop))
        k, v = (x[:, -1:] for x in b.keys_of(0, i))
        wanted.append(formula(b.q[rows[-1], heads], k, v, sinks, step.causal, step.window))
    return rows, heads, torch.cat(wanted)


def graph_of(call: Callable[[int], Any], calls: int) -> torch.cuda.CUDAGraph:
    """All calls, one after the other; without the pauses that `torch.cuda.graph` makes."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        for i in range(calls):
            call(i)
        graph.capture_end()
    torch.cuda.synchronize()
    return graph


def elapsed(run: Callable[[], Any]) -> float:
    """Seconds on the chip, whose cache holds other things at first."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    scratch().zero_()
    start.record()
    run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


@functools.cache
def scratch() -> torch.Tensor:
    """Twice what the chip's cache holds."""
    return torch.empty(128 << 20, device=DEVICE, dtype=torch.int8)


def take_turns(contenders: dict[str, Callable[[int], Any]], calls: int) -> dict[str, float]:
    """Median microseconds of a call."""
    graphs = {name: graph_of(call, calls) for name, call in contenders.items()}
    spent = max(elapsed(graph.replay) for graph in graphs.values())
    rounds = min(max(int(EACH_SECONDS / spent), LEAST_ROUNDS), MOST_ROUNDS)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(rounds):
        for name, graph in graphs.items():
            times[name].append(elapsed(graph.replay) / calls * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def measure(step: Step, fa3: Any) -> dict[str, Any]:
    """A row of results, or an error where our result is wrong."""
    calls = min(max(READ_BYTES // max(step.bytes, 1), LEAST_CALLS), MOST_CALLS)
    b = Batch(step, calls)
    rows, heads, want = some_rows(b)
    errors, contenders = {}, {"ours": functools.partial(ours, b)}
    found: dict[str, Callable[[int], torch.Tensor]] = {}
    refused: dict[str, str] = {}
    try:
        found = peers(b, fa3)
    except Exception as error:
        refused["FA3"] = _first_line(error)
    for name, call in (contenders | found).items():
        try:
            out, kernel = attention.first_answer(functools.partial(call, 0))
            got = torch.cat([out[r, heads] for r in rows])
        except Exception as error:
            if name == "ours":
                raise
            refused[name] = _first_line(error)
            continue
        errors[name] = attention.relative_error(got, want)
        if name == "ours":
            answered = kernel
            attention.check({name: errors[name]})
        if errors[name] < MOST_ERROR[name]:
            contenders[name] = call
        else:
            refused[name] = f"relative error {errors[name]:.3g}"
    figures = take_turns(contenders, calls)
    return {
        "figures": {name: round(value, 2) for name, value in figures.items()},
        "error": float(f"{errors['ours']:.2g}"),
        "kernel": answered.partition(",")[0].removesuffix(" kernel"),
        "GB/s": round(step.bytes / figures["ours"] * 1e-3),
        "TFLOP/s": round(step.flops / figures["ours"] * 1e-6),
        "refused peers": refused,
    }


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:160]


def compile_step(step: Step) -> float:
    """Launch a step's kernels once, over a small cache; the seconds that it took."""
    start = time.perf_counter()
    try:
        b = Batch(step, 1, SMALL_POOL if step.page_size else POOL_BYTES // 4)
        if step.page_size:
            b.tables = [torch.zeros_like(x) for x in b.tables]
            b.used = b.used.clamp(max=1)
        ours(b, 0)
        torch.cuda.synchronize()
    except Exception:  # it is reported where the step is measured
        return -1.0
    finally:
        gc.collect()
        torch.cuda.empty_cache()
    return time.perf_counter() - start


def compile_ahead(steps: list[Step], processes: int) -> None:
    """Compile what the steps take, in processes of their own, and leave it in Triton's cache."""
    context = multiprocessing.get_context("spawn")
    start = time.perf_counter()
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        # those of many queries first, whose kernels take longest
        ordered = sorted(steps, key=lambda step: -step.total_q / step.batch)
        spent = list(pool.map(compile_step, ordered))
    print(
        f"compiled in {time.perf_counter() - start:.0f} s, {sum(spent):.0f} s of work,"
        f" {sum(s < 0 for s in spent)} failed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--draws", type=int, default=60)
    parser.add_argument("--first", type=int, default=0, help="leave out the draws before this one")
    parser.add_argument("--only", type=int, nargs="*", help="the draws of these numbers, from 0 on")
    parser.add_argument("--kinds", nargs="*", help="of these kinds only")
    parser.add_argument("--processes", type=int, default=PROCESSES, help="that compile")
    parser.add_argument("--seconds", type=float, default=math.inf, help="measure no longer")
    parser.add_argument("--fa3", type=Path, metavar="SO", help="its library, fa3_peer.py beside it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results")
    parser.add_argument("--commit", default=gpu_run.git_commit(), help="where git does not say it")
    options = parser.parse_args()
    begun = time.perf_counter()
    steps = draw_steps(options.seed, options.draws)[options.first :]
    if options.only:
        steps = [draw_steps(options.seed, options.draws)[i] for i in options.only]
    if options.kinds:
        steps = [step for step in steps if step.kind in options.kinds]
    compile_ahead(steps, options.processes)
    fa3 = gpu_run.find_peers(options.fa3).get("FA3")
    torch.manual_seed(options.seed)
    rows: list[dict[str, Any]] = []
    document = {
        "machine": gpu_run.describe_machine(options.commit),
        "seed": options.seed,
        "rows": rows,
    }
    for step in steps:
        start = time.perf_counter()
        if start - begun > options.seconds:
            print(f"out of time: {len(steps) - len(rows)} steps were not measured")
            break
        try:
            row = measure(step, fa3)
        except Exception as error:  # the other rows have their figures all the same
            traceback.print_exc(limit=-3)
            row = {"refused": _first_line(error)}
        row |= {"seconds": round(time.perf_counter() - start, 2)}
        rows.append({"problem": str(step), "kind": step.kind, **row})
        print(serving_report.line(rows[-1]), flush=True)
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(serving_report.compact(document))
    print(serving_report.summary(document), flush=True)
    sys.exit(any("refused" in row for row in rows))


if __name__ == "__main__":
    main()
