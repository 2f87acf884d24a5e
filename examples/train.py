"""Train: a small Llama on documents of very different lengths, packed end to end without padding.

A Llama of bytes (grouped-query attention, float32) learns Python from the functions and classes of
the standard library's source, some 4,000 bytes a step, three ways, which take turns on the clock:

    packed       one row, `torch_paged_attn.flash_varlen` with `cu_seqlens`
    masked       one row, where a mask keeps the documents apart: FlexAttention on a GPU; SDPA on a
                 CPU, where FlexAttention has no backward
    padded       SDPA on batches sorted by length and padded to the longest, gradients accumulated

All see the same documents in the same steps. Their losses must agree at every step, or the exit
status is 1. So must those of the packed way under torch.compile, activation checkpointing and
gradient accumulation, all run for some steps, and that of a small gpt-oss (sinks, sliding windows)
beside Transformers' eager attention. Under bfloat16 autocast the loss must come out the same to two
digits.

    python examples/train.py [--quick]

Prints two tables and draws examples/out/train.png.
"""

import argparse
import ast
import copy
import os
import sys
import time
from dataclasses import dataclass, field

os.environ["HF_HUB_OFFLINE"] = "1"
# a thread that waits sleeps instead of spinning: on a busy machine that is several times faster
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import plots
import torch
from corpus import sources
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GptOssConfig, GptOssForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from torch_paged_attn.integrations import transformers as paged

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS, TOKENS = 30, 4096  # of documents, a step
LENGTHS = 64, 4096  # bytes in a document
PADDED_BATCHES = 4
MAX_DIFFERENCE = 1e-3  # between the losses of a step, in float32
LEARNING_RATE = 3e-3

LLAMA = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=LENGTHS[1],
    tie_word_embeddings=True,
)
GPT_OSS = GptOssConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=2,
    num_experts_per_tok=1,
    sliding_window=32,
    max_position_embeddings=LENGTHS[1],
)


def documents():
    """Top-level functions and classes of the library's source, as bytes, in random order."""
    found = []
    for _, source in sources():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                text = (ast.get_source_segment(source, node) or "").encode()
                if LENGTHS[0] <= len(text) <= LENGTHS[1]:
                    found.append(torch.frombuffer(bytearray(text), dtype=torch.uint8).long())
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return [found[i] for i in order]


def steps_of(found, tokens, count):
    """The documents of each step: as many as fill its tokens."""
    batches, batch = [], []
    for document in found:
        if len(document) + sum(map(len, batch)) > tokens:
            batches.append(batch)
            batch = []
        batch.append(document.to(DEVICE))
    return batches[:count]


def predicted(batch):
    """Bytes of a step that have one before them in their document."""
    return sum(map(len, batch)) - len(batch)


def packed_loss(model, batch, **arguments):
    """The mean loss of documents that lie end to end in one row."""
    row = torch.cat(batch)
    positions = torch.cat([torch.arange(len(document), device=row.device) for document in batch])
    logits = model(row[None], position_ids=positions[None], use_cache=False, **arguments).logits[0]
    # a document's last byte predicts nothing
    targets = row.roll(-1).masked_fill(positions.roll(-1) == 0, -100)
    return cross_entropy(logits.float(), targets, reduction="sum")


def varlen_loss(model, batch):
    """The same, where attention gets the documents' bounds."""
    lengths = torch.tensor([len(document) for document in batch])
    bounds = pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)
    longest = int(lengths.max())
    return packed_loss(
        model,
        batch,
        cu_seq_lens_q=bounds,
        cu_seq_lens_k=bounds,
        max_length_q=longest,
        max_length_k=longest,
    )


def padded_loss(model, batch):
    """The sum of the losses of documents in rows of their own."""
    tokens = pad_sequence(batch, batch_first=True)
    seen = pad_sequence([torch.ones_like(document) for document in batch], batch_first=True)
    logits = model(tokens, attention_mask=seen, use_cache=False).logits[:, :-1]
    targets = tokens.masked_fill(seen == 0, -100)[:, 1:]
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="sum")


def split(batch, parts):
    """Documents sorted by length, in parts of about as many bytes."""
    batch, size = sorted(batch, key=len), sum(map(len, batch)) / parts
    found, filled = [[] for _ in range(parts)], 0
    for document in batch:
        found[min(int(filled / size), parts - 1)].append(document)
        filled += len(document)
    return [part for part in found if part]


@dataclass
class Run:
    """A model on its way: what one step computes, and the losses and seconds of those done."""

    name: str
    model: torch.nn.Module
    loss: object
    parts: int = 1
    autocast: bool = False
    losses: list = field(default_factory=list)
    seconds: list = field(default_factory=list)

    def __post_init__(self):
        self.model.to(DEVICE).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, batch):
        start = time.perf_counter()
        total = 0.0
        for part in split(batch, self.parts) if self.parts > 1 else [batch]:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast):
                loss = self.loss(self.model, part) / predicted(batch)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(total)
        self.seconds.append(time.perf_counter() - start)

    def speed(self, batches):
        """Tokens a second, without the first two steps, in which things are compiled."""
        seconds = self.seconds[2:] or self.seconds
        tokens = [sum(map(len, batch)) for batch in batches[: len(self.seconds)]]
        return sum(tokens[-len(seconds) :]) / sum(seconds)


def new(kind, config, attention):
    torch.manual_seed(0)
    # a model keeps the config it is given, and writes its attention into it
    return kind._from_config(copy.deepcopy(config), attn_implementation=attention)


def llama(attention):
    return new(LlamaForCausalLM, LLAMA, attention)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def compiled(model):
    # documents are as many and as long as they come: sizes are symbols from the start
    model.compile(dynamic=True)
    return model


def three_ways():
    masked = "flex_attention" if DEVICE == "cuda" else "sdpa"
    return [
        Run("torch_paged_attn, packed", llama(paged.NAME), varlen_loss),
        Run(
            f"{'FlexAttention' if DEVICE == 'cuda' else 'SDPA'}, masked", llama(masked), packed_loss
        ),
        Run("SDPA, padded", llama("sdpa"), padded_loss, parts=PADDED_BATCHES),
    ]


def variations():
    """What else the packed way must stand, each from the same start."""
    return [
        Run("torch.compile", compiled(llama(paged.NAME)), varlen_loss),
        Run("activation checkpointing", checkpointed(llama(paged.NAME)), varlen_loss),
        Run("gradients of 4 parts added up", llama(paged.NAME), varlen_loss, parts=4),
        Run("bfloat16 autocast", llama(paged.NAME), varlen_loss, autocast=True),
    ]


def gpt_oss():
    """A model with sinks and windows: ours packed, and Transformers' formula."""
    return [
        Run("gpt-oss, packed", new(GptOssForCausalLM, GPT_OSS, paged.NAME), varlen_loss),
        Run("gpt-oss, eager", new(GptOssForCausalLM, GPT_OSS, "eager"), padded_loss),
    ]


def train(runs, batches, progress, description):
    for batch in progress.track(batches, description=description):
        for run in runs:
            run.step(batch)


def difference(run, reference):
    """The largest difference of two runs' losses over the steps that both did."""
    return max(abs(a - b) for a, b in zip(run.losses, reference.losses, strict=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and smaller steps")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    paged.register()
    console = Console()

    count, tokens = (6, TOKENS // 4) if arguments.quick else (STEPS, TOKENS)
    batches = steps_of(documents(), tokens, count)
    few = batches[: max(4, count // 3)]
    small = steps_of(documents(), 1024, len(few))
    columns = (TextColumn("{task.description:22}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        ways = three_ways()
        train(ways, batches, progress, "three ways")
        others = variations()
        train(others, few, progress, "variations")
        models = gpt_oss()
        train(models, small, progress, "sinks and windows")

    ours = ways[0]
    rows = [(run, ours, batches) for run in ways] + [(run, ours, few) for run in others]
    rows += [(run, models[1], small) for run in models]
    failed = show(console, rows, len(batches))
    plots.draw_training(ways, others, batches)
    return int(failed)


def show(console, rows, count):
    """Print every run beside the one that its losses must agree with; whether one does not."""
    table = Table(title=f"{count} steps on {DEVICE}, {torch.get_num_threads()} threads")
    table.add_column("training")
    for heading in ("tokens/s", "first loss", "last loss", "largest difference"):
        table.add_column(heading, justify="right")
    failed = False
    for run, reference, batches in rows:
        limit = 0.01 * reference.losses[0] if run.autocast else MAX_DIFFERENCE
        wrong = difference(run, reference) > limit
        failed |= wrong
        table.add_row(
            run.name,
            f"{run.speed(batches):,.0f}",
            f"{run.losses[0]:.4f}",
            f"{run.losses[-1]:.4f}",
            f"[{'red' if wrong else 'green'}]{difference(run, reference):.1e}",
        )
    console.print(table)
    return failed


if __name__ == "__main__":
    sys.exit(main())
