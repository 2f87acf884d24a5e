"""Try tiles for one problem: `python benchmarks/gpu/sweep.py SUBSTRING...` prints the best of each.

Kernels are compiled by many processes at once first; then one process times them, in turn.
"""

import concurrent.futures
import functools
import itertools
import multiprocessing
import sys

import attention
import torch
from triton.testing import do_bench, do_bench_cudagraph

from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan
from torch_paged_attn.backends.triton.tuning import Config

PREFILL = [
    Config(m, n, w, s)
    for m, n, w, s in itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
    if not (m == 128 and n == 128 and w == 4)
]
DECODE = [
    *(Config(16, 32, w, s) for w, s in itertools.product((1, 2, 4), (3, 5))),
    *(Config(16, 64, w, s) for w, s in itertools.product((1, 2, 4), (3, 5))),
    *(Config(16, 128, w, s) for w, s in itertools.product((4, 8), (2, 3))),
]


def candidates(problem) -> list[dict]:
    if isinstance(problem, attention.Prefill):
        return [{"config": c, "splits": SplitPlan()} for c in PREFILL]
    return [{"config": c} for c in DECODE]


def calls_of(problem) -> dict:
    prefill = isinstance(problem, attention.Prefill)
    return (attention.prefill_calls if prefill else attention.decode_calls)(problem, None)[0]


def attempt(job: tuple[str, int]) -> str | None:
    """Compile one candidate by running it once; why that failed, if it did."""
    name, index = job
    problem = next(p for p in (*attention.PREFILL, *attention.DECODE) if str(p) == name)
    try:
        calls_of(problem)["ours"](**candidates(problem)[index])
        torch.cuda.synchronize()
    except Exception as reason:
        return str(reason)[:80]
    return None


def main() -> None:
    context = multiprocessing.get_context("spawn")
    every = (*attention.PREFILL, *attention.DECODE)
    problems = [p for p in every if any(s in str(p) for s in sys.argv[1:])]
    jobs = [(str(p), i) for p in problems for i in range(len(candidates(p)))]
    with concurrent.futures.ProcessPoolExecutor(14, mp_context=context) as pool:
        failed = {job for job, why in zip(jobs, pool.map(attempt, jobs), strict=True) if why}
    for problem in problems:
        is_prefill = isinstance(problem, attention.Prefill)
        bench = do_bench if is_prefill else do_bench_cudagraph
        call = calls_of(problem)["ours"]
        timed = []
        for i, options in enumerate(candidates(problem)):
            if (str(problem), i) not in failed:
                ms = bench(functools.partial(call, **options), rep=25, return_mode="median")
                timed.append((ms, options["config"]))
        timed.sort(key=lambda entry: entry[0])
        print(problem, f"({len(timed)} of {len(candidates(problem))} ran)")
        for ms, c in timed[:4]:
            rate = (
                f"{problem.flops / ms * 1e-9:.0f} TFLOP/s" if is_prefill else f"{ms * 1e3:.1f} us"
            )
            tiles = f"BM{c.BLOCK_M} BN{c.BLOCK_N} w{c.num_warps} s{c.num_stages}"
            print(f"   {rate}  {tiles}", flush=True)


if __name__ == "__main__":
    main()
