"""vLLM's whole engine on our attention beside its own: tokens a second, prompts and new ones.

    .venv-vllm/bin/python benchmarks/vllm_engine.py [--turns 25] [--json FILE]

after `make test-vllm`.

A Llama of random weights in bfloat16, eight prompts of 200 to 2,048 tokens, 24 new tokens each. Two
engines are up at once and take turns in shuffled order, so that what else the machine does falls on
both; a turn's prompts are new, and nothing of them is in a prefix cache. The ratio is taken turn by
turn: of tokens a second, and of the seconds of processors that an engine took, which what else runs
here hardly touches. Attention is a part of a step: the rest is the same code in both.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

LENGTHS = (200, 384, 512, 768, 1024, 1300, 1700, 2048)
NEW_TOKENS = 24
VOCABULARY = 1024
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=4,
    head_dim=64,
    max_position_embeddings=4096,
)


def save_model(folder: str) -> None:
    import torch
    import transformers

    transformers.set_seed(0)
    config = transformers.LlamaConfig(**SIZES)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def serve(model: str, backend: str) -> None:
    """An engine that answers each line of stdin, a seed, with the seconds that its turn took."""
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        enable_prefix_caching=False,
        enforce_eager=True,
        disable_log_stats=True,
        **({} if backend == "stock" else {"attention_backend": backend}),
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False
    )
    print("READY", flush=True)
    for line in sys.stdin:
        draw = random.Random(int(line))
        prompts = [
            {"prompt_token_ids": [draw.randrange(3, VOCABULARY) for _ in range(n)]} for n in LENGTHS
        ]
        start = time.perf_counter()
        answers = engine.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(x.outputs[0].token_ids) == NEW_TOKENS for x in answers)
        print("SECONDS", seconds, flush=True)


def processor_seconds(root: int) -> float:
    """Seconds of processors that a process and all its descendants have taken."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(path.parent.name)] = int(fields[1])
        ticks[int(path.parent.name)] = int(fields[11]) + int(fields[12])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(pid, 0) for pid in family) / os.sysconf("SC_CLK_TCK")


class Engine:
    """The process of one engine."""

    def __init__(self, model: str, backend: str) -> None:
        command = [sys.executable, __file__, "--serve", model, backend]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(command, text=True, **pipes)
        self.answer("READY")

    def answer(self, word: str) -> str:
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise SystemExit(f"an engine ended: {self.process.args}")

    def turn(self, seed: int) -> tuple[float, float]:
        """Tokens a second, and for each second of a processor."""
        before = processor_seconds(self.process.pid)
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        tokens = sum(LENGTHS) + len(LENGTHS) * NEW_TOKENS
        rate = tokens / float(self.answer("SECONDS"))
        return rate, tokens / (processor_seconds(self.process.pid) - before)


def spread(numbers: list[float], form: str) -> str:
    """Their median, and the quarters in the middle."""
    low, middle, high = statistics.quantiles(numbers, n=4)
    return f"{middle:{form}} ({low:{form}} to {high:{form}})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        return serve(*asked.serve)
    names = {"CUSTOM": "torch_paged_attn", "stock": "vLLM's CPU_ATTN"}
    found = {backend: [] for backend in names}
    with tempfile.TemporaryDirectory() as folder:
        save_model(folder)
        engines = {backend: Engine(folder, backend) for backend in names}
        for turn in range(-1, asked.turns):  # the first one warms up
            order = random.Random(turn).sample(list(names), 2)
            for backend in order:
                rate = engines[backend].turn(turn)
                if turn >= 0:
                    found[backend].append(rate)
            print(turn, {b: [*map(round, x[-1])] for b, x in found.items() if x}, flush=True)
        for engine in engines.values():
            engine.process.stdin.close()
            engine.process.wait()
    for i, unit in enumerate(("tokens/s", "tokens a second of a processor")):
        of = {backend: [turn[i] for turn in turns] for backend, turns in found.items()}
        for backend, name in names.items():
            print(f"{name}: {spread(of[backend], '.0f')} {unit}")
        ratios = [a / b for a, b in zip(of["CUSTOM"], of["stock"], strict=True)]
        print(f"ratio {spread(ratios, '.2f')}")
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if asked.json:
        asked.json.write_text(json.dumps({"tokens_per_second": found, "load": os.getloadavg()}))


if __name__ == "__main__":
    main()
