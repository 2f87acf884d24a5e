"""What a user waits for who has nothing compiled: a front end's first call, and those after it.

    python benchmarks/gpu/first_call.py [--only 'flash_*'] [--steps 24]

Each front end has a process and a cache of its own. A loop's lengths grow with each step
(tests/helpers/growing_calls.py): `first` is its first step, `others` all others together, `again`
the whole loop once more, in seconds, and `kernels` what Triton compiled for it, by its own hook.
`generate` is a Llama of 1.1 billion weights in Transformers, 8 prompts of 2,048 tokens and 64 new
ones, beside the same with SDPA.
"""

import argparse
import fnmatch
import functools
import importlib.util
import json
import os
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
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
GENERATE = "generate"

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


def measure_generate() -> Row:
    """`model.generate`, in this process."""
    import torch
    import transformers

    from torch_paged_attn.integrations import transformers as paged

    paged.register()
    kernels = count_kernels()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**LLAMA, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
        ids = torch.randint(1, config.vocab_size, (BATCH, PROMPT))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False}
    figures = {}
    for label, attention in (("SDPA ", "sdpa"), ("", paged.NAME)):
        model.set_attn_implementation(attention)
        call = functools.partial(model.generate, ids, **options, pad_token_id=0)
        before = len(kernels)
        figures |= {f"{label}first": seconds(call), f"{label}again": seconds(call)}
        figures[f"{label}kernels"] = len(kernels) - before
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


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], Row]]:
    """Front ends for `run.py`."""
    names = [*growing_calls.LOOPS]
    if importlib.util.find_spec("transformers"):
        names.insert(0, GENERATE)
    return {name: functools.partial(measure, name, STEPS) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", metavar="GLOB", help="front ends to run")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--alone", metavar="NAME", help="this one, in this process")
    options = parser.parse_args()
    if options.alone:
        is_loop = options.alone != GENERATE
        row = measure_loop(options.alone, options.steps) if is_loop else measure_generate()
        print(json.dumps(row))
        return
    print(f"{'front end':34} {'first s':>8} {'others s':>9} {'again s':>8} {'kernels':>8}")
    for name in problems({}):
        if not fnmatch.fnmatch(name, options.only):
            continue
        row = measure(name, options.steps)["figures"]
        numbers = row["first"], row.get("others", 0.0), row["again"], row["kernels"]
        print("{:34} {:8.2f} {:9.2f} {:8.3f} {:8d}".format(name, *numbers), flush=True)
        if "SDPA first" in row:
            numbers = row["SDPA first"], 0.0, row["SDPA again"], row["SDPA kernels"]
            print("{:34} {:8.2f} {:9.2f} {:8.3f} {:8d}".format("  with SDPA", *numbers), flush=True)


if __name__ == "__main__":
    main()
