"""Where a call's time on the host goes, part by part, on a machine without a GPU.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/gpu/host_parts.py [--runs 40] [--json OUT]

`no_gpu.py` stands in for the driver, so that what a launch takes in it, and what CUDA's allocator
takes beyond the CPU's, are missing. A call is timed as users make it, past the dispatcher, and
from each of the functions that it passes with the dispatcher, with the arguments that the function
got; a part is the difference of two neighbours. All
take turns, and a figure is the median of runs, in microseconds. Next, a step of LAYERS decode
layers of a size that no call had before, and again; last, how long the functions that plan take in
the first call of a new size, those that they call included.
"""

import argparse
import contextlib
import functools
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import no_gpu
import torch

no_gpu.pretend()

from torch_paged_attn import flash_varlen, reshape_and_cache  # noqa: E402
from torch_paged_attn.backends.triton import BACKEND  # noqa: E402
from torch_paged_attn.backends.triton.runtime import launch_cache  # noqa: E402
from torch_paged_attn.ops import _library, kinds  # noqa: E402

CALLS = 100
HEADS, KV_HEADS, DIM, PAGE, CONTEXT = 32, 8, 128, 16, 1024
MOST_SEQUENCES = 64
LAYERS, STEPS = 32, 24
BF16 = torch.bfloat16
MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}

Call = Callable[[], Any]


def microseconds(call: Call, number: int = CALLS) -> float:
    start = time.perf_counter()
    for _ in range(number):
        call()
    return (time.perf_counter() - start) / number * 1e6


def medians(calls: dict[str, Call], runs: int) -> dict[str, float]:
    """Of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(runs):
        for name, call in calls.items():
            times[name].append(microseconds(call))
    return {name: statistics.median(values) for name, values in times.items()}


class Batch:
    """Sequences of one new token each, over CONTEXT keys in pages, and LAYERS caches of them."""

    def __init__(self) -> None:
        pages = MOST_SEQUENCES * CONTEXT // PAGE
        shape = 2, pages, PAGE, KV_HEADS, DIM
        # views of one memory at different addresses: nothing is read or written
        rows = torch.zeros(LAYERS - 1 + pages, *shape[2:], dtype=BF16)
        layers = [rows[i : i + pages] for i in range(LAYERS)]
        self.layers = [(x.transpose(1, 2), x.transpose(1, 2)) for x in layers]
        self.cache = torch.zeros(*shape, dtype=BF16).transpose(2, 3)
        self.q = torch.zeros(MOST_SEQUENCES, HEADS, DIM, dtype=BF16)
        self.new = torch.zeros(2, MOST_SEQUENCES, KV_HEADS, DIM, dtype=BF16)
        self.bounds = torch.arange(MOST_SEQUENCES + 1, dtype=torch.int32)
        self.table = torch.arange(pages, dtype=torch.int32).view(MOST_SEQUENCES, -1)
        self.lengths = torch.full((MOST_SEQUENCES,), CONTEXT, dtype=torch.int32)
        self.slots = torch.arange(MOST_SEQUENCES)

    def decode(self, batch: int) -> Call:
        return functools.partial(self._decode(batch), *self.layers[0])

    def _decode(self, batch: int) -> Callable[..., Any]:
        q, bounds = self.q[:batch], self.bounds[: batch + 1]
        table, lengths = self.table[:batch], self.lengths[:batch]

        def call(k: torch.Tensor, v: torch.Tensor) -> Any:
            return flash_varlen(
                q, k, v, bounds, None, 1, CONTEXT,
                seqused_k=lengths, block_table=table, causal=True,
            )  # fmt: skip

        return call

    def write(self, batch: int) -> Call:
        key, value = self.new[:, :batch]
        return functools.partial(reshape_and_cache, key, value, self.cache, self.slots[:batch])

    def prefill(self, batch: int, length: int = 8) -> Call:
        total = batch * length
        q = torch.zeros(total, HEADS, DIM, dtype=BF16)
        k, v = torch.zeros(2, total, KV_HEADS, DIM, dtype=BF16)
        bounds = torch.arange(batch + 1, dtype=torch.int32) * length
        return lambda: flash_varlen(q, k, v, bounds, None, length, length, causal=True)

    def step(self, batch: int) -> Call:
        call = self._decode(batch)

        def step() -> None:
            for k, v in self.layers:
                call(k, v)

        return step


def stations(op: str, call: Call) -> dict[str, Call]:
    """A call from each of the functions that it passes, the first first."""
    for _ in range(3):
        call()

    def dispatched() -> Any:
        with no_gpu.replaced(kinds, "repeat", lambda *given: NotImplemented):
            return call()

    found: dict[str, Call] = {"public function": call, "(by the dispatcher)": dispatched}

    def stop_at(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def stopped(*args: Any, **options: Any) -> Any:
            found[name] = functools.partial(function, *args, **options)
            return function(*args, **options)

        return stopped

    # what the operator's kernel is handed, by an operator with the same schema
    kernel = _library.GATES[op].wrapped(lambda: BACKEND.function(op))
    results = call()
    library = torch.library.Library("host_parts", "FRAGMENT")
    library.define(_library.SCHEMAS[op])
    library.impl(op, stop_at("gate", kernel), "CPU")
    module = importlib.import_module(f"torch_paged_attn.ops.{op}")
    empty = getattr(torch.ops.host_parts, op).default
    operator = getattr(module, f"_{op}")
    stopping = operator._replace(op=stop_at("operator", empty))
    with no_gpu.replaced(module, f"_{op}", stopping):
        dispatched()
    by_schema = found["operator"]
    found["operator"] = functools.partial(operator.op, *by_schema.args, **by_schema.keywords)
    nothing = torch.library.Library("host_parts_empty", "FRAGMENT")
    nothing.define(_library.SCHEMAS[op])
    nothing.impl(op, lambda *args, **options: results, "CPU")
    arrives = getattr(torch.ops.host_parts_empty, op).default
    found["(operator that does nothing)"] = functools.partial(
        arrives, *by_schema.args, **by_schema.keywords
    )
    gate = found.pop("gate")
    found["gate for gradients"] = gate
    found["backend"] = functools.partial(BACKEND.function(op), *gate.args, **gate.keywords)
    with no_gpu.replaced(launch_cache, "call", stop_at("launch cache", launch_cache.call)):
        dispatched()
    key, _, *given = found["launch cache"].args
    guard, plan = launch_cache._recent[key][0]
    matched = guard.match(*given)
    found["(guard)"] = functools.partial(guard.match, *given)
    found["plan"] = functools.partial(plan, *matched)
    launches: list[Call] = []
    start = launch_cache.Launch.start

    def note(self: Any, *args: Any) -> None:
        launches.append(functools.partial(start, self, *args))
        start(self, *args)

    with no_gpu.replaced(launch_cache.Launch, "start", note):
        call()
    found["launches"] = launches[0] if len(launches) == 1 else lambda: [x() for x in launches]
    # libraries go with the calls that need them
    found["launches"].libraries = library, nothing  # type: ignore[attr-defined]
    return found


TRITON = "torch_paged_attn.backends.triton"
# what a plan is made by: module of the backend, and function or method
PLANNING = (
    ("runtime.launch_cache", "_call"),
    ("runtime.launch_cache", "described"),
    ("runtime.launch_cache", "_guard"),
    ("flash_varlen", "AttentionOp.plan"),
    ("flash_varlen", "flash_varlen._check"),
    ("flash_varlen", "choose"),
    ("hopper.forward.plan", "plan_attention"),
    ("hopper.forward.plan", "plan_launches"),
    ("hopper.forward.choices", "choose_tiles"),
    ("hopper.forward.tiles", "options_of"),
    ("hopper.forward.tiles", "boxes_of"),
    ("hopper.forward.tiles", "grid_of"),
    ("hopper.forward.tiles", "sizes_of"),
    ("hopper.forward.tiles", "scalars_of"),
    ("runtime.launch_cache", "Launch._make_ready"),
    ("runtime.launch_cache", "compiled_for"),
    ("runtime.launcher", "ReadyKernel.map_arguments"),
    ("runtime.launch_cache", "Launch.__call__"),
)


def time_planning(step: Callable[[int], Call], sizes: list[int]) -> dict[str, float]:
    """Microseconds that each function of PLANNING takes in the first call of a new size."""
    spent: dict[str, float] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **options)
            finally:
                spent[name] = spent.get(name, 0.0) + (time.perf_counter() - start) * 1e6

        return run

    totals: dict[str, list[float]] = {}
    with contextlib.ExitStack() as stack:
        for path, name in PLANNING:
            owner: Any = importlib.import_module(f"{TRITON}.{path}")
            *holders, last = name.split(".")
            for holder in holders:
                owner = getattr(owner, holder)
            function = timed(f"{path}.{name}", getattr(owner, last))
            stack.enter_context(no_gpu.replaced(owner, last, function))
        for size in sizes:
            call = step(size)
            spent.clear()
            call()
            for name, value in spent.items():
                totals.setdefault(name, []).append(value)
    return {name: statistics.median(values) for name, values in totals.items()}


def show(title: str, figures: dict[str, float]) -> None:
    print(title)
    for name, value in figures.items():
        print(f"    {name:60}{value:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures")
    options = parser.parse_args()
    batch, document = Batch(), {}

    def keep(title: str, figures: dict[str, float]) -> None:
        document[title] = figures
        show(title, figures)

    calls = {
        "decode b8": batch.decode(8),
        "prefill 8x8": batch.prefill(8),
        "write of 8": batch.write(8),
    }
    for call in calls.values():
        call()
        call()
    for mode, entered in MODES.items():
        with entered():
            keep(f"whole calls, {mode}", medians(calls, options.runs))
    with torch.inference_mode():
        for title, op in {"decode b8": "flash_varlen", "write of 8": "reshape_and_cache"}.items():
            found = medians(stations(op, calls[title]), options.runs)
            keep(f"{title}, from each function on", found)
        for size in (62, 63):  # kernels are compiled
            batch.step(size)()
        new, again = [], []
        for size in range(10, 10 + STEPS):
            step = batch.step(size)
            new.append(microseconds(step, 1))
            again.append(microseconds(step, 1))
        figures = {"new size": statistics.median(new), "again": statistics.median(again)}
        keep(f"a step of {LAYERS} decode layers", figures)
        launch_cache.clear()
        batch.decode(62)()
        found = time_planning(batch.decode, list(range(10, 10 + STEPS)))
        keep("the first call of a new size, function by function", found)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
