"""What a user waits for who has nothing compiled: a front end's first call, and those after it.

    python benchmarks/gpu/first_call.py [--only 'flash_*'] [--steps 24] [--jobs 1] [--json OUT]

Each front end has a process and a cache of its own. A loop's lengths grow with each step
(tests/helpers/growing_calls.py): `first` is its first step, `others` all others together, `again`
the whole loop once more, in seconds, and `kernels` what Triton compiled for it, by its own hook.
`--jobs` loops at a time: their kernels are then counted as well, but they wait for each other.
`generate` and `generate_batch` are a Llama of 1.1 billion weights in Transformers beside the same
with SDPA: 8 prompts of 2,048 tokens and 64 new ones each, and 128 prompts of 64 to 3,000 tokens and
96 new ones each, for which SDPA has one run.
"""

import argparse
import concurrent.futures
import fnmatch
import functools
import importlib.util
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "tests" / "helpers"))

import growing_calls

STEPS = 24
BATCH, PROMPT, NEW = 8, 2048, 64
# a run is short, and the host not equally fast all the time
AGAIN = 5
PROMPTS, LEAST, MOST, NEW_IN_BATCH, PAGE = 128, 64, 3000, 96, 16
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
MODELS = ("generate", "generate_batch")

Row = dict[str, Any]


def count_kernels() -> set[Any]:
    """A set that Triton's hook adds each kernel to that this process compiles."""
    from triton import knobs

    found: set[Any] = set()
    knobs.runtime.jit_post_compile_hook = lambda *, key, fn, **_: found.add((fn.name, key))
    return found


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes, with the work that it leaves to the GPU."""
    import torch

    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return round(time.perf_counter() - start, 3)


def measure_loop(name: str, steps: int) -> Row:
    """A front end's loop, in this process."""
    import torch

    kernels = count_kernels()
    torch.zeros(1, device="cuda")

    def all_others() -> None:
        for i in range(1, steps):
            step(i)

    step = growing_calls.LOOPS[name](growing_calls.New(torch.device("cuda")))
    figures = {"first": seconds(lambda: step(0)), "others": seconds(all_others)}
    step = growing_calls.LOOPS[name](growing_calls.New(torch.device("cuda")))
    figures["again"] = seconds(lambda: [step(i) for i in range(steps)])
    return {"unit": "s", "figures": figures | {"kernels": len(kernels)}}


def llama() -> Any:
    """The model, whose weights are random."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()


def measure_generate() -> Row:
    """`model.generate`, in this process; `again` is a median, and both contenders take turns."""
    import torch

    from torch_paged_attn.integrations import transformers as paged

    paged.register()
    kernels = count_kernels()
    model = llama()
    ids = torch.randint(1, LLAMA["vocab_size"], (BATCH, PROMPT), device="cuda")
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    call = functools.partial(model.generate, ids, **options, pad_token_id=0)
    contenders = {"SDPA ": "sdpa", "": paged.NAME}
    figures: dict[str, float] = {}
    for label, attention in contenders.items():
        model.set_attn_implementation(attention)
        before = len(kernels)
        figures[f"{label}first"] = seconds(call)
        figures[f"{label}kernels"] = len(kernels) - before
    again: dict[str, list[float]] = {label: [] for label in contenders}
    for _ in range(AGAIN):
        for label, attention in contenders.items():
            model.set_attn_implementation(attention)
            again[label].append(seconds(call))
    figures |= {f"{label}again": statistics.median(times) for label, times in again.items()}
    figures |= {f"{label}least": min(times) for label, times in again.items()}
    return {"unit": "s", "figures": figures}


def measure_generate_batch() -> Row:
    """`model.generate_batch`, in this process: seconds, new tokens a second, and how many prompts
    have the first token that they have with SDPA.
    """
    from transformers import ContinuousBatchingConfig, GenerationConfig

    from torch_paged_attn.integrations import transformers as paged

    kernels = count_kernels()
    model = llama()
    draw = random.Random(5)
    lengths = [round(LEAST * (MOST / LEAST) ** draw.random()) for _ in range(PROMPTS)]
    prompts = [[draw.randrange(1, LLAMA["vocab_size"]) for _ in range(n)] for n in lengths]
    # 5.17 names a page's size otherwise
    known = inspect.signature(ContinuousBatchingConfig.__init__).parameters
    batching = ContinuousBatchingConfig(
        num_blocks=sum(-(-(n + NEW_IN_BATCH) // PAGE) for n in lengths),
        max_batch_tokens=8192,
        **{"page_size" if "page_size" in known else "block_size": PAGE},
    )
    generation = GenerationConfig(
        max_new_tokens=NEW_IN_BATCH,
        do_sample=False,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    tokens: dict[str, list[list[int]]] = {}

    def call(label: str) -> None:
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching
        )
        if faults := [x.error for x in found.values() if x.error]:
            raise RuntimeError(faults[0])
        tokens[label] = [x.generated_tokens for x in found.values()]

    paged.use(model)
    figures: dict[str, float] = {"first": seconds(lambda: call("ours"))}
    figures |= {"kernels": len(kernels), "again": seconds(lambda: call("ours"))}
    figures["tokens/s"] = round(PROMPTS * NEW_IN_BATCH / figures["again"])
    model.set_attn_implementation("sdpa")
    figures["SDPA first"] = seconds(lambda: call("SDPA"))
    figures["SDPA tokens/s"] = round(PROMPTS * NEW_IN_BATCH / figures["SDPA first"])
    pairs = zip(tokens["ours"], tokens["SDPA"], strict=True)
    figures["first tokens alike"] = sum(a[0] == b[0] for a, b in pairs)
    return {"unit": "s", "figures": figures}


def measure(name: str, steps: int) -> Row:
    """A front end in a process and a cache of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--alone", name, "--steps", str(steps)]
        done = subprocess.run(
            command, env=os.environ | {"TRITON_CACHE_DIR": folder}, capture_output=True, text=True
        )
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2])
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def names() -> list[str]:
    """The front ends that this machine has."""
    models = MODELS if importlib.util.find_spec("transformers") else ()
    return [*models, *growing_calls.LOOPS]


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], Row]]:
    """Front ends for `run.py`."""
    return {name: functools.partial(measure, name, STEPS) for name in names()}


def alone(name: str, steps: int) -> Row:
    """A front end in this process."""
    if name in MODELS:
        return {"generate": measure_generate, "generate_batch": measure_generate_batch}[name]()
    return measure_loop(name, steps)


def show(name: str, figures: dict[str, float]) -> None:
    for label, title in (("", name), ("SDPA ", "  with SDPA")):
        if f"{label}first" in figures:
            times = (figures.get(f"{label}{x}", 0) for x in ("first", "others", "again"))
            kernels, rate = (int(figures.get(label + x, 0)) for x in ("kernels", "tokens/s"))
            print("{:34} {:8.2f} {:9.2f} {:8.3f}".format(title, *times), end="")
            print(f" {kernels:8d} {f'{rate} tokens/s' if rate else ''}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=["*"], metavar="GLOB", help="front ends")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--jobs", type=int, default=1, help="loops at a time")
    parser.add_argument(
        "--json", type=Path, metavar="OUT", help="write the results; rows are added"
    )
    parser.add_argument("--commit", default="", help="where git does not say it")
    parser.add_argument("--alone", metavar="NAME", help="this one, in this process")
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(alone(options.alone, options.steps)))
        return

    from run import describe_machine, git_commit

    print(f"{'front end':34} {'first s':>8} {'others s':>9} {'again s':>8} {'kernels':>8}")
    machine = describe_machine(options.commit or git_commit())
    document: dict[str, Any] = {"machine": machine, "parts": {"first_call": []}}
    if options.json and options.json.exists():
        document["parts"] = json.loads(options.json.read_text())["parts"]
    chosen = [x for x in names() if any(fnmatch.fnmatch(x, y) for y in options.only)]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        rows = {pool.submit(measure, name, options.steps): name for name in chosen}
        failed = False
        for row in concurrent.futures.as_completed(rows):
            name = rows[row]
            if error := row.exception():
                print(f"{name:34} {error}", flush=True)
                failed = True
                continue
            show(name, row.result()["figures"])
            document["parts"]["first_call"].append({"problem": name, **row.result()})
            if options.json:
                options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
