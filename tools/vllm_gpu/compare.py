"""vLLM's engine on our attention beside its own, side by side on one GPU.

    python compare.py MODEL --out FOLDER [--backends FLASH_ATTN,CUSTOM,TRITON_ATTN]

It fails unless tokens agree with FLASH_ATTN's as well as TRITON_ATTN's do (where that runs too),
and unless mixed lengths are served without a kernel compiled after the start (vLLM's own monitor,
set to `error`). It prints the engines' start, the GPU's busy time, and how far answers depend on
the order of requests. A prompt is new to each engine, so that nothing is in a prefix cache.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
# several engines share a GPU; room for 196,608 tokens of a model that takes 32 KiB for each
OPTIONS = {"kv_cache_memory_bytes": 6 << 30, "gpu_memory_utilization": 0.3}
# of a log in which a kernel is compiled while serving
COMPILED = "during inference:"


class Engine:
    """engine.py in a process of its own, whose environment gets `variables`."""

    def __init__(
        self, model: str, backend: str, options: dict, log: Path, variables: dict | None = None
    ) -> None:
        self.backend, self.path = backend, log
        command = [sys.executable, str(HERE / "engine.py"), model, backend, json.dumps(options)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.path.open("w"),
            text=True,
            env=os.environ | (variables or {}),
        )

    def read(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                return json.loads(line[7:])
        sys.exit(f"{self.backend} ended; its log's end:\n{self.path.read_text()[-4000:]}")

    def tell(self, **what) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def ask(self, **what) -> dict:
        self.tell(**what)
        return self.read()

    def compiled(self) -> list[str]:
        return [x[:300] for x in self.path.read_text().splitlines() if COMPILED in x]


def compared(a: dict, b: dict) -> dict:
    """How far two answers to the same requests agree."""
    pairs = list(zip(a["tokens"], b["tokens"], strict=True))
    off = [
        abs(x[t] - y[t])
        for x, y in zip(a["first"], b["first"], strict=True)
        for t in x.keys() & y.keys()
    ]
    return dict(
        first_equal=sum(x[0] == y[0] for x, y in pairs) / len(pairs),
        all_equal=sum(x == y for x, y in pairs) / len(pairs),
        logprob_mean=statistics.mean(off),
        logprob_max=max(off),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backends", default="FLASH_ATTN,CUSTOM,TRITON_ATTN")
    parser.add_argument("--quick", action="store_true", help="one order, and fewer requests")
    parser.add_argument("--options", default="{}", help="JSON, further arguments of LLM")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    begin, faults = time.perf_counter(), []
    result: dict = {"model": asked.model}

    def say(*words: object) -> None:
        print(f"{time.perf_counter() - begin:4.0f} s", *words, flush=True)
        (asked.out / "result.json").write_text(json.dumps(result, indent=1))

    names = asked.backends.split(",")
    orders = ("given",) if asked.quick else ("given", "reversed")
    turns = (
        {"mix": [1], "few": [*range(5)]} if asked.quick else {"mix": [1, 2], "few": [*range(20)]}
    )
    options = OPTIONS | json.loads(asked.options)
    # TRITON_ATTN's own kernels are not what is judged
    strict = {n: {} if n == "TRITON_ATTN" else {"jit_monitor_mode": "error"} for n in names}
    engines = {
        n: Engine(asked.model, n, options | strict[n], asked.out / f"{n}.log") for n in names
    }
    try:
        for name, engine in engines.items():
            ready = result.setdefault("start", {})[name] = engine.read()
            say(name, f"started: LLM() took {ready['llm_seconds']:.0f} s")
        checks = {
            (name, order): engine.ask(do="check", seed=0, order=order)
            for order in orders
            for name, engine in engines.items()
        }
        pairs = {f"{n} reversed": ((n, "given"), (n, x)) for n in names for x in orders[1:]}
        pairs |= {f"{n} beside {names[0]}": ((names[0], "given"), (n, "given")) for n in names[1:]}
        agreed = result["agreement"] = {
            title: compared(checks[a], checks[b]) for title, (a, b) in pairs.items()
        }
        for title, found in agreed.items():
            say(title, {key: round(x, 4) for key, x in found.items()})
        ours, theirs = (agreed.get(f"{n} beside FLASH_ATTN") for n in ("CUSTOM", "TRITON_ATTN"))
        if ours and theirs:
            if ours["logprob_mean"] > 1.1 * theirs["logprob_mean"]:
                faults.append("tokens' logprobs are further from FLASH_ATTN's than TRITON_ATTN's")
            if ours["first_equal"] < theirs["first_equal"] - 0.02:
                faults.append("fewer first tokens are FLASH_ATTN's than of TRITON_ATTN's")
        for kind, seeds in turns.items():
            for name, engine in engines.items():
                found = engine.ask(do="turn", kind=kind, seeds=seeds)
                result.setdefault("turns", {}).setdefault(kind, {})[name] = found
                say(kind, name, f"{found['new'] / found['seconds']:.0f} new tokens/s")
        for kind in ("decode", "prefill"):
            for name, engine in engines.items():
                found = engine.ask(do="profile", kind=kind, seed=99)
                result.setdefault("profile", {}).setdefault(kind, {})[name] = found
                busy = found["busy_ms"] / result["profile"][kind][names[0]]["busy_ms"]
                say(kind, name, f"GPU busy {found['busy_ms']:.0f} ms, {busy:.3f} of {names[0]}'s")
                for kernel, (ms, count) in found["top"][:4]:
                    print(f"       {ms:8.1f} ms {count:6d} {kernel[:80]}", flush=True)
        compiled = engines["CUSTOM"].compiled() if "CUSTOM" in engines else []
        result["compiled_while_serving"] = compiled
        if compiled:
            faults.append(f"{len(compiled)} kernels were compiled while serving: {compiled[:5]}")
        say("done;", "; ".join(faults) or "no fault")
    finally:
        for engine in engines.values():
            engine.process.kill()
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main()
