"""How many kernels a serving day compiles, and how long its steps wait for them.

    python benchmarks/gpu/warmup.py --seed 900 --steps 300 --json OUT

A day is one model's steps (32/8 heads of 128, pages of 16), drawn as in `draws.py`: decodes,
draft tokens, chunks of prompts and mixed batches of all sizes, each with its cache write. Each of
three days begins in a process of its own with nothing compiled: one without `warmup`, one that
calls it first, one that serves while a thread calls it. A step that takes the host longer than
`STALL` is a stall.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

STALL = 0.02
# seconds from the begin of a step to the next one's, while a thread warms up
STEP_SECONDS = 0.02
HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
DAYS = ("cold", "warm", "background")


def steps_of(seed: int, count: int) -> list[Any]:
    from draws import draw_steps

    same = {"page_size": 16, "dtype": "bfloat16", "kv_dtype": "bfloat16", "window": -1}
    drawn = [step for step in draw_steps(seed, 2 * count) if step.kind != "encoder"]
    return [dataclasses.replace(s, **HEADS, **same, sinks=False) for s in drawn[:count]]


def host_seconds(step: Any) -> float:
    """What the host needs for a step's cache write and attention; the device is idle before."""
    import serving
    import torch

    from torch_paged_attn import reshape_and_cache

    b = serving.Batch(step, 1, serving.SMALL_POOL)
    new = torch.zeros(step.total_q, *b.k.shape[2:], dtype=b.k.dtype, device=b.k.device)
    slots = torch.full((step.total_q,), -1, device=b.k.device)
    caches = b.k.transpose(1, 2), b.v.transpose(1, 2)
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        reshape_and_cache(new, new, caches, slots)
        serving.ours(b, 0)
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent


def day(kind: str, seed: int, count: int) -> dict[str, Any]:
    """One day, in this process."""
    import torch
    from triton.runtime.jit import JITFunction

    from torch_paged_attn import warmup

    compiled: list[str] = []
    compile_kernel = JITFunction._do_compile

    def note(self: Any, *args: Any) -> Any:
        # Triton's hooks want constants that JSON knows, which element types are not
        compiled.append(f"{self.__name__} for {now}")
        return compile_kernel(self, *args)

    JITFunction._do_compile = note
    steps, now = steps_of(seed, count), "warmup"
    torch.zeros(1, device="cuda")
    found: dict[str, Any] = {"day": kind}

    def warm() -> None:
        start = time.perf_counter()
        warmup(**HEADS, page_size=16, causal=True, max_tokens=2 * 2048 + 256)
        found["warmup seconds"] = round(time.perf_counter() - start, 1)
        found["warmup kernels"] = len(compiled)

    spent = []
    if kind == "warm":
        warm()
        compiled.clear()
    if kind == "background":
        thread = threading.Thread(target=warm)
        thread.start()
        while thread.is_alive():
            start = time.perf_counter()
            now = steps[len(spent) % count]
            spent.append(host_seconds(now))
            time.sleep(max(start + STEP_SECONDS - time.perf_counter(), 0))
        thread.join()
        found["steps meanwhile"] = len(spent)
    else:
        for now in steps:
            spent.append(host_seconds(now))
    stalls = [x for x in spent if x > STALL]
    return found | {
        "kernels": len(compiled),
        "compiled": compiled,
        "stalls": len(stalls),
        "stall seconds": round(sum(stalls), 2),
        "longest": round(max(spent), 3),
        "median us": round(1e6 * statistics.median(spent)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--day", choices=DAYS, help="this one alone, in this process")
    parser.add_argument("--json", type=Path, required=True, metavar="OUT")
    options = parser.parse_args()
    if options.day:
        options.json.write_text(json.dumps(day(options.day, options.seed, options.steps)))
        return
    found = []
    for kind in DAYS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "day.json"
            arguments = ["--seed", str(options.seed), "--steps", str(options.steps)]
            command = [sys.executable, __file__, *arguments, "--day", kind, "--json", str(out)]
            subprocess.run(command, check=True, env=os.environ | {"TRITON_CACHE_DIR": folder})
            found.append(json.loads(out.read_text()))
        print({key: value for key, value in found[-1].items() if key != "compiled"}, flush=True)
        for name in found[-1]["compiled"] if kind == "warm" else []:
            print(f"  not warmed up: {name}")
    options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
