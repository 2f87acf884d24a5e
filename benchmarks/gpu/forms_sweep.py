"""Time the ways that a launch may take, side by side: what the costs in `dispatch/cost_model.py`
are fitted to, and what the rules for packed sequences in Hopper's `support.py` are chosen by.

    python benchmarks/gpu/forms_sweep.py --seeds 401 402 --draws 40 --fa3 SO --json OUT

Steps are drawn as in serving.py, `--draws` of each class. A row's figures are microseconds: `ours`
is the plan that a caller gets, the other names are plans that were forced. A plan that is wrong
takes no part, and is named.
"""

import argparse
import concurrent.futures
import functools
import gc
import itertools
import math
import multiprocessing
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attention
import run as gpu_run
import serving
import serving_report
import torch
from draws import KINDS, Step, draw_steps

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dispatch import kernels, unpacked
from torch_paged_attn.backends.triton.dispatch.cost_model import UNPACKED
from torch_paged_attn.backends.triton.flash_varlen import said_of_longest, said_of_reach
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.hopper.forward.choices import Form
from torch_paged_attn.backends.triton.portable.forward import plan as portable
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan, plan_splits
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.tuning import FORWARD, Config, HopperConfig

MULTIPROCESSORS = 132
EACH_SECONDS, MOST_ROUNDS, MOST_CALLS = 0.02, 5, 12

# portable tiles: BLOCK_N, warps, stages, programs of a multiprocessor, fewest keys of a piece
PORTABLE = {
    64: (
        (128, 4, 5, 1, 128), (128, 4, 5, 2, 128), (64, 1, 5, 4, 64), (64, 4, 5, 2, 64),
        (128, 8, 5, 1, 128), (256, 8, 1, 1, 256),
    ),
    128: (
        (32, 1, 5, 4, 64), (64, 4, 5, 1, 64), (64, 4, 5, 2, 64), (128, 4, 3, 1, 128),
        (128, 4, 3, 2, 128), (128, 8, 5, 1, 128), (256, 8, 1, 1, 256),
    ),
    256: ((64, 4, 3, 2, 64), (64, 4, 3, 1, 64), (64, 8, 5, 1, 64), (32, 4, 5, 2, 64)),
}  # fmt: skip
# of 8-bit caches
PORTABLE_8_BIT = (
    (64, 1, 5, 4, 64), (64, 2, 5, 4, 64), (64, 4, 5, 2, 64), (128, 4, 3, 2, 128),
    (128, 8, 5, 1, 128), (256, 8, 1, 1, 256),
)  # fmt: skip

Plans = dict[str, Callable[[AttentionCall], Plan]]


# tiles of Hopper's kernel, of few queries the second; a call refuses those that do not fit it
TILES = ("low", "low small", "low large", "divided", "small", "tall", "three")
TILES_OF_FEW = ("low", "low large", "divided")

# pages of the draws that are taken: each size of a page is another kernel
PAGES = (0, 1, 16, 64)
FEW_QUERIES = ("decode", "speculation")


def is_in_question(step: Step) -> bool:
    """Whether a draw is taken: one whose kernels other draws take too."""
    return step.dtype == "bfloat16" and step.page_size in PAGES and not step.sinks


def on_hopper(form: Form | None, config: HopperConfig | None = None) -> Any:
    """A plan of Hopper's kernel, with tiles of its own if `config` is given."""
    assert form is not None
    return lambda call: hopper.plan_attention(call, config, form)


def by_whole_tiles(call: AttentionCall) -> Plan:
    """A plan of the portable kernel with a tile of queries for each program."""
    return portable.plan_attention(call, splits=SplitPlan())


def by_portable(block_m: int, config: tuple[int, ...], is_merged_by_all: bool) -> Any:
    """A plan of the portable kernel."""
    *numbers, resident, least = config

    def plan(call: AttentionCall) -> Plan:
        busy = min(call.batch, call.total_q)
        slots, keys = resident * MULTIPROCESSORS, portable.key_bound(call)
        splits = plan_splits(call.batch + 1, call.num_kv_heads, busy, keys, slots, True)
        tile = Config(block_m, *numbers, resident=resident, is_merged_by_all=is_merged_by_all)
        return portable.plan_attention(call, config=tile, splits=SplitPlan(splits.programs, least))

    return plan


def plans_of(step: Step) -> Plans:
    """What may be planned for a step, by name."""
    width = support.width_of(step.head_dim)
    group = step.num_heads // step.num_kv_heads
    if step.kind == "encoder":
        longest = said_of_longest(max(step.queries), max(step.keys), True) or support.MOST_SHORT
        return _of_encoders(width, Form(longest=longest))
    if step.kind in ("decode", "speculation"):
        return _of_few_queries(step, width, group)
    names = [f"{x} {tiles}" for x in kernels.SCHEDULES for tiles in TILES]
    found: Plans = {x: on_hopper(kernels.named(x).form) for x in names}
    return found | {"portable whole": by_whole_tiles, UNPACKED: unpacked.plan_attention}


def _of_encoders(width: int, turns: Form) -> Plans:
    return {
        "turns": on_hopper(turns),
        "turns low": on_hopper(turns, FORWARD["low"][width]),
        "turns tall": on_hopper(turns, FORWARD["three" if width == 64 else "tall"][width]),
        "turns 128": on_hopper(turns, FORWARD["tall"][width]),
        "listed": on_hopper(Form()),
        "listed low": on_hopper(Form(tiles="low")),
        "portable": lambda call: portable.plan_attention(call, longest=turns.longest),
    }


def _of_few_queries(step: Step, width: int, group: int) -> Plans:
    rows = -(-step.total_q // step.batch) * group
    is_8_bit = step.kv_dtype != step.dtype
    found: Plans = {}
    if rows <= support.BLOCK_M:
        block_m = max(16, 1 << (rows - 1).bit_length())
        for config in PORTABLE_8_BIT if is_8_bit else PORTABLE[width]:
            if rows <= 16 or config[1] >= 4:
                name = "portable " + "/".join(map(str, config))
                found[name] = by_portable(block_m, config, False)
                if config[1] > 1:
                    found[f"{name} all"] = by_portable(block_m, config, True)
    if max(step.queries) * group <= support.BLOCK_M:
        names = [f"{x} {y}" for x in ("numbered", "cut", "dealt") for y in TILES_OF_FEW]
        found |= {x: on_hopper(kernels.named(x).form) for x in names}
    return found


def call_of(b: serving.Batch) -> AttentionCall:
    """The call, described as the operator describes it."""
    if not b.step.page_size:
        return AttentionCall.flash_varlen(b.q, *b.packed[0], b.cu, None, 0, 0, causal=b.step.causal)
    return AttentionCall.flash_varlen(
        b.q, b.k.transpose(1, 2), b.v.transpose(1, 2), b.cu, None, 0,
        said_of_reach(b.longest[1], False), b.used, b.tables[0], None, None, b.sinks, None,
        b.descale, b.descale, causal=b.step.causal, window_size_left=b.step.window,
    )  # fmt: skip


def launcher(b: serving.Batch, call: AttentionCall, plan: Plan) -> Callable[[int], torch.Tensor]:
    """A function of a call's number that launches a plan."""
    given = call.given_tensors()
    names, tensors = [*given], [*given.values()]

    def launch(i: int) -> torch.Tensor:
        mine = list(tensors)
        if b.step.page_size:
            mine[names.index("block_table")] = b.tables[i]
        else:
            mine[1], mine[2] = b.packed[i]
        return plan(tuple(mine), [x.data_ptr() for x in mine])[0]

    return launch


def named(plans: Plans, only: str) -> Plans:
    """The plans whose name the pattern matches whole; all, if it is empty."""
    return {x: plan for x, plan in plans.items() if not only or re.fullmatch(only, x)}


def compile_step(step: Step, only: str = "") -> list[str]:
    """Launch the plans of a step once, over a small cache; what failed."""
    failed = []
    b = serving.Batch(step, 1, serving.SMALL_POOL if step.page_size else serving.POOL_BYTES // 4)
    if step.page_size:
        b.tables = [torch.zeros_like(x) for x in b.tables]
        b.used = b.used.clamp(max=1)
    call = call_of(b)
    contenders: dict[str, Any] = {"ours": lambda: serving.ours(b, 0)}
    for name, plan in named(plans_of(step), only).items():
        contenders[name] = lambda plan=plan: launcher(b, call, plan(call))(0)
    for name, launch in contenders.items():
        try:
            launch()
            torch.cuda.synchronize()
        except Exception as error:  # said at the end; where it is measured, it is left out
            failed.append(f"{name}: {type(error).__name__} {str(error)[:120]}")
    gc.collect()
    torch.cuda.empty_cache()
    return failed


def measure(step: Step, fa3: Any, only: str = "") -> dict[str, Any]:
    """A row of results."""
    calls = min(max(serving.READ_BYTES // max(step.bytes, 1), serving.LEAST_CALLS), MOST_CALLS)
    b = serving.Batch(step, calls)
    rows, heads, want = serving.some_rows(b)
    contenders: dict[str, Any] = {"ours": functools.partial(serving.ours, b)}
    refused = {}
    try:
        contenders |= serving.peers(b, fa3)
    except Exception as error:
        refused["FA3"] = str(error)[:120]
    call = call_of(b)
    for name, plan in named(plans_of(step), only).items():
        try:
            contenders[name] = launcher(b, call, plan(call))
        except Exception as error:
            refused[name] = str(error)[:120]
    right = {}
    for name, launch in contenders.items():
        try:
            out = launch(0)
            error = attention.relative_error(torch.cat([out[r, heads] for r in rows]), want)
        except Exception as raised:
            refused[name] = str(raised)[:120]
            continue
        if error < serving.MOST_ERROR.get(name, 0.01):
            right[name] = launch
        else:
            refused[name] = f"relative error {error:.3g}"
            print(f"  {step}: {name} has a relative error of {error:.3g}", flush=True)
    figures = serving.take_turns(right, calls)
    return {"figures": {k: round(v, 2) for k, v in figures.items()}, "refused": refused}


def describe(step: Step) -> dict[str, Any]:
    """What rules may go by."""
    lengths = {}
    if step.kind not in FEW_QUERIES:
        lengths["lengths"] = [*zip(step.queries, step.keys, strict=True)]
    return {
        "problem": str(step), "kind": step.kind,
        "heads": [step.num_heads, step.num_kv_heads, step.head_dim], "batch": step.batch,
        "total_q": step.total_q, "longest_q": max(step.queries),
        "keys": [min(step.keys), sum(step.keys), max(step.keys)],
        "width": step.table_width, "page_size": step.page_size, "dtype": step.dtype,
        "kv_dtype": step.kv_dtype, "window": step.window,
        **lengths,
    }  # fmt: skip


def class_of(step: Step) -> tuple[str, int, bool]:
    """Steps of a class take the same kernels: kind, width of a head, whether the cache is 8-bit."""
    return step.kind, support.width_of(step.head_dim), step.kv_dtype != step.dtype


def steps_of(
    seeds: list[int],
    draws: int,
    kinds: list[str],
    tiles: float = math.inf,
    keys: int = 0,
    heads: tuple[str, ...] = (),
) -> list[Step]:
    """As many draws of each class of these kinds, classes in turns: those of at most so many tiles
    whose longest sequence has at least so many keys, of these numbers of heads or of all."""
    drawn = [
        s
        for seed in seeds
        for s in draw_steps(seed, 600)
        if is_in_question(s) and s.batch * s.num_kv_heads <= tiles and max(s.keys) >= keys
        if not heads or f"{s.num_heads}/{s.num_kv_heads}" in heads
    ]
    classes = sorted({class_of(s) for s in drawn if s.kind in kinds})
    of_classes = [[s for s in drawn if class_of(s) == x][:draws] for x in classes]
    return [s for row in itertools.zip_longest(*of_classes) for s in row if s is not None]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--draws", type=int, default=40, help="of each class")
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    parser.add_argument("--tiles", type=float, default=math.inf, help="draws of no more tiles")
    parser.add_argument("--keys", type=int, default=0, help="draws of no fewer keys")
    parser.add_argument("--heads", nargs="*", default=[], help="draws of these, such as 32/32")
    parser.add_argument("--only", default="", help="a pattern of names: force these plans alone")
    parser.add_argument("--processes", type=int, default=serving.PROCESSES, help="that compile")
    parser.add_argument("--seconds", type=float, default=600, help="measure no longer")
    parser.add_argument("--fa3", type=Path, metavar="SO")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    parser.add_argument("--commit", default=gpu_run.git_commit(), help="where git does not say it")
    options = parser.parse_args()
    begun = time.perf_counter()
    steps = steps_of(
        options.seeds, options.draws, options.kinds, options.tiles, options.keys,
        (*options.heads,),
    )  # fmt: skip
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        each = functools.partial(compile_step, only=options.only)
        for step, failed in zip(steps, pool.map(each, steps), strict=True):
            for reason in failed:
                print(f"  {step}: {reason}")
    print(f"{len(steps)} steps compiled after {time.perf_counter() - begun:.0f} s", flush=True)
    fa3 = gpu_run.find_peers(options.fa3).get("FA3")
    serving.EACH_SECONDS, serving.MOST_ROUNDS = EACH_SECONDS, MOST_ROUNDS  # many contenders
    rows: list[dict[str, Any]] = []
    document = {"machine": gpu_run.describe_machine(options.commit), "rows": rows}
    for step in steps:
        if time.perf_counter() - begun > options.seconds:
            print(f"out of time: {len(steps) - len(rows)} steps were not measured")
            break
        rows.append(describe(step) | measure(step, fa3, options.only))
        figures = rows[-1]["figures"]
        best = sorted(figures, key=figures.__getitem__)[:4]
        print(f"{step}: ours {figures.get('ours', 0):.1f};", end=" ")
        print(*(f"{name} {figures[name]:.1f}" for name in best), sep=", ", flush=True)
        options.json.write_text(serving_report.compact(document))


if __name__ == "__main__":
    main()
