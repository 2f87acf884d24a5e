"""What vLLM's engine can do besides plain requests, on our attention and on its own, on one GPU.

    python features.py MODEL WINDOWED --out FOLDER [--only window,sinks]

MODEL and WINDOWED are `few` and `few_window` of make_model.py. A window, sinks, caches of 8 bits,
the engine in a process of its own, and drafts by n-grams: each is an engine, and all start side by
side, without Inductor and with graphs of decodes. It prints how far their answers agree with
vLLM's own backend under the same option, and with the plain model's (which an option should
change), and fails if too few first tokens are the same, if answers differ by more than the bound of
the cache's format, or if one of our kernels was compiled while serving. With `--no-warm-up` they
compile when they are needed, of which there are fewer: it is sooner over.
"""

import argparse
import functools
import json
import os
import re
import sys
import time
from pathlib import Path

from compare import COMPILED, Engine, compared

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
COMMON = {
    "kv_cache_memory_bytes": 3 << 30,
    "gpu_memory_utilization": 0.1,
    "compilation_config": GRAPHS | {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128]},
    "jit_monitor_mode": "warn",  # n-grams are found by kernels that vLLM compiles while it serves
}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
PLAIN = ("plain", "FLASH_ATTN")
KERNELS = Path(__file__).parents[2] / "torch_paged_attn" / "backends" / "triton"
# (name, vLLM's backend, options, variables, share of first tokens, mean difference of logprobs);
# vLLM's FLASH_ATTN rounds queries, too, to a float8 cache's dtype
CASES = (
    ("window", "FLASH_ATTN", {}, {}, 0.95, 0.03),
    ("sinks", "FLASH_ATTN", {"sinks": True}, {}, 0.95, 0.03),
    ("fp8", "FLASH_ATTN", {"kv_cache_dtype": "fp8"}, {}, 0.75, 0.15),
    ("int8", "TRITON_ATTN", {"kv_cache_dtype": "int8_per_token_head"}, {}, 0.95, 0.03),
    ("processes", None, {}, IN_PROCESS, 0.95, 0.03),
    (
        "ngrams",
        None,
        {"speculative_config": NGRAMS | {"prompt_lookup_min": 1}, "disable_log_stats": False},
        {},
        0.95,
        0.03,
    ),
)


@functools.cache
def our_kernels() -> frozenset[str]:
    """vLLM's monitor names a kernel's function alone."""
    found = (re.findall(r"^def (\w+_kernel)\(", x.read_text(), re.M) for x in KERNELS.rglob("*.py"))
    return frozenset(name for names in found for name in names)


def is_ours(compiled: str) -> bool:
    return compiled.split(".")[0].strip() in our_kernels()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("windowed")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="names of cases, with commas between")
    parser.add_argument("--no-warm-up", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    begin, faults, result = time.perf_counter(), [], {}
    cases = [x for x in CASES if asked.only is None or x[0] in asked.only.split(",")]

    cores = sorted(os.sched_getaffinity(0))
    common = COMMON | ({"kernel_config": {"enable_jit_warmup": False}} if asked.no_warm_up else {})

    engines: dict[tuple[str, str], Engine] = {}

    def start(name: str, backend: str, options: dict, variables: dict) -> None:
        """An engine on four of the cores: it compiles with as many processes as it has cores."""
        model = asked.windowed if name == "window" else asked.model
        log = asked.out / f"{name}_{backend}.log"
        at = 4 * len(engines)
        os.sched_setaffinity(0, {cores[(at + i) % len(cores)] for i in range(4)})
        engine = engines[name, backend] = Engine(model, backend, common | options, log, variables)
        os.sched_setaffinity(0, cores)
        engine.tell(do="check", seed=0, order="given", kind="repeats")  # once it is ready

    @functools.cache
    def answers(key: tuple[str, str]) -> dict | None:
        """What an engine says; None, and a fault, if it ended."""
        try:
            engines[key].read()  # that it is ready
            return engines[key].read()
        except SystemExit as ended:
            faults.append(f"{' '.join(key)} ended")
            print(str(ended)[-1500:], flush=True)
            return None

    start(*PLAIN, {}, {})
    for name, theirs, options, variables, *_ in cases:
        for backend in filter(None, ("CUSTOM", theirs)):
            start(name, backend, options, variables)
    try:
        for name, theirs, _, _, share, difference in cases:
            ours, beside = answers((name, "CUSTOM")), (name, theirs) if theirs else PLAIN
            row = result[name] = {}
            for title, key in {"": beside, "plain ": PLAIN}.items():
                if ours and (other := answers(key)):
                    row |= {title + k: round(x, 4) for k, x in compared(other, ours).items()}
            if name == "ngrams" and ours:
                row |= engines[name, "CUSTOM"].ask(do="drafts")
            row["compiled"] = [x.partition(COMPILED)[2] for x in engines[name, "CUSTOM"].compiled()]
            print(f"{time.perf_counter() - begin:4.0f} s", name, "CUSTOM beside", *beside)
            print("      ", json.dumps(row), flush=True)
            if not row.get("first_equal", 0) >= share or row["logprob_mean"] > difference:
                faults.append(f"{name}: answers are too far from {' '.join(beside)}'s")
            if not asked.no_warm_up and any(is_ours(x) for x in row["compiled"]):
                faults.append(f"{name}: kernels of ours were compiled while serving")
    finally:
        for engine in engines.values():
            engine.process.kill()
        (asked.out / "features.json").write_text(json.dumps(result, indent=1))
    print("; ".join(faults) or "no fault")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
