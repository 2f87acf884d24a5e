"""Time decode with many tiles: what the entries of a chip's table are chosen by.

    python benchmarks/gpu/decode_sweep.py --json OUT [--seconds S] [--fa3 _vllm_fa3_C.abi3.so]

A row is a shape; its figures are microseconds, by config: BLOCK_N, warps, stages, programs that a
multiprocessor holds, and the fewest keys of a piece. Caches are cold and tables are wide, as in
serving.py.
"""

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import attention
import run as gpu_run
import serving
import torch
from draws import Step

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.forward.plan import plan_attention
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan, plan_splits
from torch_paged_attn.backends.triton.tuning import Config

# BLOCK_N, warps, stages, and the programs that a multiprocessor may hold
TILES = (
    (32, 1, 5, (4, 6)), (64, 2, 5, (2, 4)), (64, 4, 5, (1, 2)), (64, 4, 1, (1, 2)),
    (128, 4, 3, (1, 2)), (128, 8, 5, (1,)), (256, 8, 1, (1,)),
)  # fmt: skip
PIECES = (64, 128, 256)
MULTIPROCESSORS = 132

HEADS = ((32, 8, 128), (64, 8, 128), (28, 4, 128), (8, 1, 128))
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (512, 1024, 2048, 4096, 16384)
MOST_BYTES = 150 << 20
WIDTH, PAGE = 131072, 16


def shapes() -> list[Step]:
    """Few tiles at first, then the rest in random order."""
    found = []
    for heads, batch, context in itertools.product(HEADS, BATCHES, CONTEXTS):
        step = Step("decode", *heads, (1,) * batch, (context,) * batch, PAGE, WIDTH)
        if step.bytes <= MOST_BYTES:
            found.append(step)
    random.Random(0).shuffle(found)
    return found


def candidates(step: Step) -> dict[str, tuple[Config, SplitPlan]]:
    """By name."""
    found = {}
    group = step.num_heads // step.num_kv_heads
    for (block_n, warps, stages, residents), least in itertools.product(TILES, PIECES):
        if least < block_n:
            continue
        for resident in residents:
            config = Config(16, block_n, warps, stages, resident=resident)
            slots = resident * MULTIPROCESSORS
            splits = plan_splits(step.batch + 1, step.num_kv_heads, step.batch, WIDTH, slots, True)
            splits = SplitPlan(splits.programs, least)
            found[f"n{block_n} w{warps} s{stages} r{resident} k{least}"] = config, splits
    assert group <= 16
    return found


def planned(b: serving.Batch, **chosen: Any):
    """A function of a call's number that launches with tiles of the caller's choice."""
    call = AttentionCall.flash_varlen(
        b.q, b.k.transpose(1, 2), b.v.transpose(1, 2), b.cu, None, *b.longest, b.used,
        b.tables[0], causal=True,
    )  # fmt: skip
    plan = plan_attention(call, **chosen)
    given = call.given_tensors()
    tensors, at = [*given.values()], [*given].index("block_table")

    def launch(i: int) -> torch.Tensor:
        mine = (*tensors[:at], b.tables[i], *tensors[at + 1 :])
        return plan(mine, [x.data_ptr() for x in mine])[0]

    return launch


def compile_one(job: tuple[Step, tuple[int, int, int], int]) -> None:
    """One kernel: Triton compiles in whether a piece has at least one tile of keys, or more."""
    step, (block_n, warps, stages), units = job
    b = serving.Batch(step, 1, serving.SMALL_POOL)
    b.tables = [torch.zeros_like(x) for x in b.tables]
    planned(b, config=Config(16, block_n, warps, stages), splits=SplitPlan(66, units * block_n))(0)
    torch.cuda.synchronize()


def compile_ahead(steps: list[Step]) -> None:
    """Every kernel once: for each group of heads, and each width of the search for work."""
    classes = {(s.num_heads, s.num_kv_heads, sum(s.batch > w for w in (4, 16))): s for s in steps}
    jobs = list(itertools.product(classes.values(), (t[:3] for t in TILES), (1, 2)))
    jobs = [job for job in jobs if job[2] * job[1][0] <= max(PIECES)]
    start = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(serving.PROCESSES, mp_context=context) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{len(jobs)} kernels in {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--fa3", type=Path, metavar="SO")
    parser.add_argument("--seconds", type=float, default=600, help="measure no longer")
    options = parser.parse_args()
    begun = time.perf_counter()
    steps = shapes()
    compile_ahead(steps)
    fa3 = gpu_run.find_peers(options.fa3).get("FA3")
    rows: list[dict[str, Any]] = []
    document = {"machine": gpu_run.describe_machine(gpu_run.git_commit()), "rows": rows}
    for step in steps:
        if time.perf_counter() - begun > options.seconds:
            break
        calls = min(max(serving.READ_BYTES // step.bytes, 2), 8)
        b = serving.Batch(step, calls)
        _, heads, want = serving.some_rows(b)
        contenders: dict[str, Any] = {"ours": functools.partial(serving.ours, b)}
        contenders |= serving.peers(b, fa3)
        for name, (config, splits) in candidates(step).items():
            contenders[name] = planned(b, config=config, splits=splits)
        picked = serving.some_rows(b)[0]
        for name, call in [*contenders.items()]:
            try:
                got = torch.cat([call(0)[r, heads] for r in picked])
                attention.check({name: attention.relative_error(got, want)})
            except Exception as error:
                print(step, name, type(error).__name__, str(error)[:80], flush=True)
                del contenders[name]
        figures = serving.take_turns(contenders, calls)
        figures = {name: round(value, 2) for name, value in figures.items()}
        rows.append(
            {"heads": [step.num_heads, step.num_kv_heads, step.head_dim], "batch": step.batch,
             "keys": step.keys[0], "figures": figures}
        )  # fmt: skip
        best = min((n for n in figures if n != "FA3"), key=figures.__getitem__)
        print(
            f"{step!s:44} ours {figures['ours']:.1f} FA3 {figures.get('FA3', 0):.1f}"
            f" best {figures[best]:.1f} {best}",
            flush=True,
        )
        options.json.write_text(json.dumps(document) + "\n")
    print(f"{len(rows)} of {len(steps)} shapes in {time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
