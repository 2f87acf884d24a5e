"""Serve: 64 prompts of very different lengths by continuous batching over pages.

A small Llama (bytes in, bytes out, grouped-query attention) has learnt Python from the standard
library's source; it is in examples/serve-model, and --retrain makes it again, in some minutes. It
continues 64 snippets of modules it has not seen, 5 to 1,500 bytes long, through Transformers' own
continuous batching, `model.generate_batch`: once with `torch_paged_attn`, where `reshape_and_cache`
writes new keys and values into pages and `flash_varlen` reads them through a block table, and once
with Transformers' own SDPA, which gathers every key and masks what belongs to other sequences.

In float32, every token must be the one that plain greedy `generate` with eager attention gives, one
prompt at a time, or the exit status is 1.

    python examples/serve.py [--quick] [--retrain]

Prints two tables and draws examples/out/serve.png.
"""

import argparse
import copy
import itertools
import os
import sys
import time
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
# a thread that waits sleeps instead of spinning: on a busy machine that is several times faster
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import plots
import torch
from corpus import sources
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from torch_paged_attn.integrations import transformers as paged

CHECKPOINT = Path(__file__).parent / "serve-model"
PROMPTS = 64
LENGTHS = (5, 1500)
NEW_TOKENS = 48
PAGE_SIZE = 16
MAX_BATCH_TOKENS = 512  # longer prompts are prefilled in chunks, among other sequences' decodes

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=0,
)
TRAIN_STEPS, TRAIN_BATCH, TRAIN_LENGTH = 1000, 4, 384


def as_tokens(text):
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()


def as_text(tokens):
    return bytes(tokens).decode(errors="replace")


def split_sources():
    """Text to learn from, and every tenth module's, held out for prompts."""
    texts = [text for _, text in sources()]
    held_out = texts[::10]
    del texts[::10]
    return texts, held_out


def train(texts, progress):
    torch.manual_seed(0)
    model = LlamaForCausalLM._from_config(CONFIG, attn_implementation="sdpa")
    data = as_tokens("\n".join(texts))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=TRAIN_STEPS)
    task = progress.add_task("training", total=TRAIN_STEPS)
    for _ in range(TRAIN_STEPS):
        starts = torch.randint(len(data) - TRAIN_LENGTH, (TRAIN_BATCH, 1))
        batch = data[starts + torch.arange(TRAIN_LENGTH)]
        loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, description=f"training, loss {loss.item():.2f}")
    # half the bytes to keep in the repository; float32 holds them exactly
    model.bfloat16().save_pretrained(CHECKPOINT)


def cut_prompts(texts, count):
    """Snippets of held-out source: lengths even on a logarithmic scale, in random order."""
    generator = torch.Generator().manual_seed(0)
    data = as_tokens("\n".join(texts))
    lengths = torch.logspace(*torch.tensor(LENGTHS).log10(), count).round().long()
    prompts = []
    for length in lengths[torch.randperm(count, generator=generator)]:
        start = torch.randint(len(data) - int(length), (), generator=generator)
        prompts.append(data[start : start + length].tolist())
    return prompts


@dataclass
class Run:
    """A way to answer all prompts: the new tokens of each, and their times since the start."""

    name: str
    answers: list
    times: list

    @property
    def seconds(self):
        return max(map(max, self.times))

    @property
    def speed(self):
        return sum(map(len, self.answers)) / self.seconds


GREEDY = GenerationConfig(
    max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0, bos_token_id=None, eos_token_id=None
)


def one_by_one(model, prompts, progress):
    """Transformers' plain greedy `generate` with eager attention: the reference."""
    model.set_attn_implementation("eager")
    name = "eager, one by one"
    answers, times = [], []
    start = time.perf_counter()
    for prompt in progress.track(prompts, description=name):
        tokens = model.generate(torch.tensor([prompt]), generation_config=GREEDY)
        answers.append(tokens[0, len(prompt) :].tolist())
        times.append([time.perf_counter() - start] * NEW_TOKENS)
    return Run(name, answers, times)


def continuously(name, model, prompts, progress):
    """Transformers' continuous batching with whatever attention the model has."""
    task = progress.add_task(name, total=None)
    pages = sum(-(-(len(prompt) + NEW_TOKENS) // PAGE_SIZE) for prompt in prompts)
    start = time.perf_counter()
    results = model.generate_batch(
        prompts,
        generation_config=copy.deepcopy(GREEDY),  # it is written to
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=pages, max_batch_tokens=MAX_BATCH_TOKENS
        ),
        record_timestamps=True,
    ).values()
    if failed := [result.error for result in results if result.error] or len(results) < len(
        prompts
    ):
        raise RuntimeError(f"{name}: generate_batch left prompts unanswered: {failed}")
    progress.update(task, total=len(prompts), completed=len(results))
    answers = [result.generated_tokens for result in results]
    return Run(name, answers, [[t - start for t in result.timestamps] for result in results])


def serve(model, prompts, progress):
    """Every way to answer, the reference first."""
    runs = [one_by_one(model, prompts, progress)]
    model.set_attn_implementation("sdpa")
    runs.append(continuously("SDPA, continuous", model, prompts, progress))
    paged.use(model)
    runs.append(continuously("torch_paged_attn, continuous", model, prompts, progress))
    return runs


def wrong_tokens(run, reference):
    """(prompt, position) of the first token of each answer that is not the reference's."""
    for prompt, (answer, expected) in enumerate(zip(run.answers, reference.answers, strict=True)):
        if answer != expected:
            pairs = zip(answer, expected, strict=False)
            same = list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
            yield prompt, len(same)


def show_speed(runs, prompts, console):
    table = Table(
        title=f"{len(prompts)} prompts of {min(map(len, prompts))} to {max(map(len, prompts)):,}"
        f" bytes, {NEW_TOKENS} new each, float32, {torch.get_num_threads()} threads"
    )
    table.add_column("attention")
    for heading in ("seconds", "new tokens/s", "speed", "equal to eager"):
        table.add_column(heading, justify="right")
    for run in runs:
        wrong = len(list(wrong_tokens(run, runs[0])))
        table.add_row(
            run.name,
            f"{run.seconds:.1f}",
            f"{run.speed:,.0f}",
            f"{run.speed / runs[1].speed:.2f}x",
            f"[{'red' if wrong else 'green'}]{len(prompts) - wrong} of {len(prompts)} answers",
        )
    console.print(table)


def show_wrong(model, run, reference, prompts, console):
    """Where answers part, and how far apart eager attention saw the two tokens."""
    model.set_attn_implementation("eager")
    for i, position in wrong_tokens(run, reference):
        expected = reference.answers[i]
        with torch.inference_mode():
            logits = model(torch.tensor([prompts[i] + expected[:position]])).logits[0, -1]
        got = run.answers[i][position] if position < len(run.answers[i]) else None
        gap = "no token" if got is None else f"{logits[expected[position]] - logits[got]:.2e} below"
        console.print(
            f"[red]prompt {i}, token {position}: {got}, eager {expected[position]} ({gap})"
        )


def show_answers(run, prompts, console, count=5):
    table = Table(title="Some answers (a small model, minutes of learning)", show_lines=True)
    table.add_column("bytes", justify="right", min_width=5)
    table.add_column("end of the prompt")
    table.add_column("answer", style="cyan")
    by_length = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for i in by_length[count :: len(prompts) // count]:
        texts = as_text(prompts[i][-32:]), as_text(run.answers[i])
        table.add_row(f"{len(prompts[i]):,}", *(escape(" ".join(text.split())) for text in texts))
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the prompts")
    parser.add_argument("--retrain", action="store_true", help="train again")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    getLogger("ContinuousBatchingLogger").setLevel("ERROR")
    console = Console()

    texts, held_out = split_sources()
    prompts = cut_prompts(held_out, PROMPTS // 4 if arguments.quick else PROMPTS)
    columns = (TextColumn("{task.description:29}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        if arguments.retrain:
            train(texts, progress)
        model = LlamaForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
        runs = serve(model, prompts, progress)

    reference, _, ours = runs
    show_speed(runs, prompts, console)
    show_wrong(model, ours, reference, prompts, console)
    show_answers(ours, prompts, console)
    plots.draw_serving(runs, prompts)
    return int(ours.answers != reference.answers)


if __name__ == "__main__":
    sys.exit(main())
