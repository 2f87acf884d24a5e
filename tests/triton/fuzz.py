"""Fuzz the GPU kernels on all cores: `python tests/triton/fuzz.py --seconds 300`.

Every plan compiles a kernel, so that one process would see few of them. A worker prints what failed
right away; one whose GPU context is lost, or that hangs, is replaced by another.
"""

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

import hypothesis
import torch
from hypothesis import strategies as st

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.ops.lacking import in_all
from torch_paged_attn.testing import Problem, assert_accurate, build
from torch_paged_attn.testing.strategies import layouts, problems

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
from dispatched import dispatched

OPS = "flash_varlen", "blocksparse"
ANY = problems(st.one_of(st.none(), layouts), optional=in_all(BACKEND.lacks, OPS))
HUNG_AFTER = 90  # seconds for one plan
LOST = 3  # how a worker ends that has told of a lost context


def run(problem: Problem) -> None:
    """One plan on the GPU against the reference on the CPU."""
    from torch_paged_attn.attention_call import AttentionCall
    from torch_paged_attn.backends.triton.flash_varlen import unsupported_on_hopper
    from torch_paged_attn.backends.triton.hopper.forward import plan as flash_varlen_sm90

    call = build(problem)
    args, options = dispatched(call.op, call.to("cuda").args)
    truth = call.truth(cuts_off=torch.cuda.get_device_capability() == (9, 0))
    first, again = (BACKEND.function(call.op)(*args, **options) for _ in range(2))
    assert_accurate(*first, truth)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    whole = getattr(AttentionCall, call.op)(*args, **options)
    if unsupported_on_hopper(whole) is None:
        # the operator leaves what is small to the portable kernel
        assert_accurate(*flash_varlen_sm90.attend(whole), truth)


def plain(problem: Problem) -> Problem:
    """The plan without what Hopper's own kernel leaves to the portable one."""
    if problem.layout is not None:
        problem = dataclasses.replace(problem, window_size_left=-1, window_size_right=-1)
    page_size = problem.page_size and 1 << max(4, problem.page_size.bit_length() - 1)
    head_dim = -(-problem.head_dim // 8) * 8
    head_dim_v = problem.head_dim_v and min(-(-problem.head_dim_v // 8) * 8, head_dim)
    return dataclasses.replace(
        problem, dtype=torch.bfloat16 if problem.seed % 3 else torch.float16, kv_dtype=None,
        out_dtype=None, out_scale=False, page_size=page_size, head_dim=head_dim,
        head_dim_v=head_dim_v, fused_qkv=False, softmax_scale=None, bias="", descale="",
        dropout_p=0.0, v_dtype=None,
    )  # fmt: skip


def work(seed: int, results: Any, current: Any) -> None:
    """Plans from one seed, for ever."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # torch.empty hands out NaN

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=10**6,
        derandomize=False,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(ANY | ANY.map(plain))
    def check(problem: Problem) -> None:
        current.put((seed, time.monotonic(), str(problem)))
        try:
            run(problem)
            results.put((seed, str(problem), ""))
        except Exception as error:  # a lost context fails every later plan: tell, and stop
            lost = "CUDA" in str(error)
            results.put((seed, str(problem), f"{type(error).__name__}: {str(error)[:400]}"))
            if lost:
                raise SystemExit(LOST) from error

    check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    results, current = context.Queue(), context.Queue()
    seed, workers, doing = options.seed, {}, {}
    passed, failed, stop = 0, 0, time.monotonic() + options.seconds
    while time.monotonic() < stop:
        while len(workers) < options.processes:
            workers[seed] = context.Process(target=work, args=(seed, results, current), daemon=True)
            workers[seed].start()
            seed += 1
        time.sleep(0.5)
        while not current.empty():
            number, since, plan = current.get()
            doing[number] = (since, plan)
        while not results.empty():
            number, plan, why = results.get()
            passed, failed = passed + (not why), failed + bool(why)
            if why:
                print(f"seed {number}: {why}\n    {plan}", flush=True)
        for number, worker in list(workers.items()):
            since, plan = doing.get(number, (time.monotonic(), ""))
            has_hung = worker.is_alive() and time.monotonic() - since > HUNG_AFTER
            if has_hung or not worker.is_alive():
                if has_hung or worker.exitcode != LOST:
                    failed += 1
                    why = "hung" if has_hung else f"ended with {worker.exitcode}"
                    print(f"seed {number}: {why}\n    {plan}", flush=True)
                worker.kill()
                del workers[number]
    for worker in workers.values():
        worker.kill()
    print(f"{passed} plans passed, {failed} failed")
    raise SystemExit(failed > 0 or passed == 0)


if __name__ == "__main__":
    main()
