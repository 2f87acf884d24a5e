"""Rollout: a sampler and a trainer whose log-probabilities are equal in every bit.

Reinforcement learning divides the trainer's probability of a token by the sampler's. Both run the
same weights, but the sampler decodes over pages in a changing batch and the trainer reads packed
documents: with ordinary kernels the two numbers differ in their last bits, and the ratio is not 1.

A small Llama samples by continuous batching: prompts are prefilled in chunks, tokens are decoded
over a paged cache, prompts with a common prefix share its pages, and sequences join and leave the
batch. A trainer then computes the log-probabilities of the same tokens in one packed row, with
gradients. With `batch_invariant=True`, and with everything around attention computed in blocks of
16 rows, all bits must be equal, or the exit status is 1. The same is counted for the default of
`flash_varlen` and for SDPA, with what each costs. A policy-gradient run follows: its importance
ratio must be exactly 1 at every token of every step.

    python examples/rollout.py [--quick] [--json OUT --machine NAME]
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from itertools import pairwise
from pathlib import Path

# a thread that waits sleeps instead of spinning: on a busy machine that is several times faster
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

import torch_paged_attn as tpa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = 16  # rows of a block: tokens that pass through a linear layer together
PAGE_SIZE = 16
PREFIX = 40  # tokens with which half of the prompts begin
ROPE_BASE = 10000.0


@dataclass
class Config:
    vocab_size: int = 256
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64


@dataclass
class Mode:
    """A way to compute: which attention, and whether rows are computed in blocks of ROWS."""

    name: str
    attention: str  # "paged": flash_varlen over pages and packed keys; "sdpa"
    batch_invariant: bool = False

    def by_blocks(self, function, *rows):
        """`function` of tensors that have a row for each token.

        A matrix product of 16 rows always takes the same kernel, so a row's bits depend on the row
        alone; a product of any number of rows takes kernels that add up in different orders.
        """
        if not self.batch_invariant:
            return function(*rows)
        count = len(rows[0])
        filled = [pad(x, (0, 0) * (x.dim() - 1) + (0, -count % ROWS)) for x in rows]
        blocks = zip(*(x.split(ROWS) for x in filled), strict=True)
        return torch.cat([function(*block) for block in blocks])[:count]


INVARIANT = Mode("batch_invariant", "paged", batch_invariant=True)
DEFAULT = Mode("default", "paged")
SDPA = Mode("SDPA", "sdpa")


class Llama(nn.Module):
    """A Llama with random weights, in as few lines as show what runs by blocks."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = c = config
        sizes = {
            "qkv": (c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
            "out": (c.num_heads * c.head_dim, c.hidden_size),
            "up": (c.hidden_size, 4 * c.hidden_size),
            "down": (2 * c.hidden_size, c.hidden_size),
        }
        self.embedding = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size))
        # logits of unit variance: with larger ones all log-probabilities would round to 0
        self.head = nn.Parameter(torch.randn(c.vocab_size, c.hidden_size) / c.hidden_size**0.5)
        self.layers = nn.ModuleList(
            nn.ParameterDict(
                {n: nn.Parameter(torch.randn(o, i) / math.sqrt(i)) for n, (i, o) in sizes.items()}
            )
            for _ in range(c.num_layers)
        )

    def forward(self, tokens, positions, attend, mode):
        """Log-probabilities (tokens, vocab_size) in float32.

        tokens, positions: (tokens,), all sequences end to end
        attend: (layer, q, k, v) -> out, where q, k, v are (tokens, heads, head_dim)
        """
        c = self.config
        angles = positions[:, None, None] * ROPE_BASE ** -(
            torch.arange(0, c.head_dim, 2, device=tokens.device) / c.head_dim
        )
        cos, sin = angles.cos(), angles.sin()

        def project(x, cos, sin, weights):
            """Rotated queries and keys, and values, in one tensor (rows, heads, head_dim)."""
            qkv = linear(normed(x), weights["qkv"]).unflatten(1, (-1, c.head_dim))
            turned, kept = qkv.split((c.num_heads + c.num_kv_heads, c.num_kv_heads), 1)
            a, b = turned.float().chunk(2, 2)
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], 2)
            return torch.cat([turned.to(qkv.dtype), kept], 1)

        def after_attention(x, out, weights):
            x = x + linear(out.flatten(1), weights["out"])
            gate, up = linear(normed(x), weights["up"]).chunk(2, 1)
            return x + linear(silu(gate) * up, weights["down"])

        x = self.embedding[tokens]
        for i, weights in enumerate(self.layers):
            qkv = mode.by_blocks(lambda *rows, w=weights: project(*rows, w), x, cos, sin)
            q, k, v = qkv.split((c.num_heads, c.num_kv_heads, c.num_kv_heads), 1)
            out = attend(i, q, k, v)
            x = mode.by_blocks(lambda *rows, w=weights: after_attention(*rows, w), x, out)
        return mode.by_blocks(lambda x: linear(normed(x), self.head).float().log_softmax(-1), x)


def normed(x):
    return rms_norm(x, x.shape[-1:], eps=1e-5)


@dataclass
class Sample:
    """A prompt, the tokens sampled after it, and the log-probability of each of these."""

    prompt: list
    tokens: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    arrival: int = 0  # the step from which on it may join the batch


@dataclass
class Sampler:
    """Continuous batching over a paged cache."""

    model: Llama
    mode: Mode
    new_tokens: int
    max_sequences: int = 12
    max_batch_tokens: int = 96  # a longer prompt is prefilled in chunks
    seed: int = 0

    @torch.no_grad()
    def run(self, samples):
        """Sample `new_tokens` tokens after each prompt."""
        c, weight = self.model.config, self.model.embedding
        lengths = [len(s.prompt) + self.new_tokens for s in samples]
        pages = tpa.PagedKVCache.pages_for(lengths, PAGE_SIZE)
        self.cache = tpa.PagedKVCache(
            *(c.num_layers, pages, c.num_kv_heads, PAGE_SIZE, c.head_dim),
            dtype=weight.dtype,
            device=weight.device,
        )
        self.generators = [
            torch.Generator().manual_seed(self.seed * len(samples) + i) for i in range(len(samples))
        ]
        waiting, running, step = list(range(len(samples))), {}, 0
        while waiting or running:
            while waiting and len(running) < self.max_sequences:
                if samples[waiting[0]].arrival > step and running:
                    break
                running[waiting.pop(0)] = 0  # tokens that the cache holds
            self._step(samples, running)
            step += 1

    def _step(self, samples, running):
        """One forward pass: a token of each decoding sequence, and a chunk of each prompt that is
        not yet in the cache, as long as the batch has room.
        """
        parts, room = [], self.max_batch_tokens
        for i, held in running.items():
            known = samples[i].prompt + samples[i].tokens
            chunk = known[held : held + room]
            # all of a prompt's prefix that other sequences have written is shared here
            reused = self.cache.append(i, chunk) if chunk else 0
            chunk = chunk[reused:]
            running[i] = held = held + reused + len(chunk)
            room -= len(chunk)
            if chunk:
                parts.append((i, held - len(chunk), chunk, held == len(known)))
        ids = [i for i, *_ in parts]
        self.batch = self.cache.batch(ids, [len(chunk) for _, _, chunk, _ in parts])
        tokens = [t for _, _, chunk, _ in parts for t in chunk]
        positions = [start + j for _, start, chunk, _ in parts for j in range(len(chunk))]
        tokens, positions = (torch.tensor(x, device=DEVICE) for x in (tokens, positions))
        log_probs = self.model(tokens, positions, self._attend, self.mode)
        last = self.batch.cu_seqlens_q[1:].long() - 1
        for (i, _, _, is_whole), row in zip(parts, log_probs[last].cpu(), strict=True):
            if not is_whole:
                continue
            # Gumbel's way to draw from a categorical distribution, by noise of the sequence's own
            noise = torch.rand(row.shape, generator=self.generators[i])
            token = int((row - (-noise.log()).log()).argmax())
            samples[i].tokens.append(token)
            samples[i].log_probs.append(row[token])
            if len(samples[i].tokens) == self.new_tokens:
                self.cache.free(i)
                del running[i]

    def _attend(self, layer, q, k, v):
        batch, pages = self.batch, self.cache.kv_cache[layer]
        tpa.reshape_and_cache(k, v, pages, batch.slot_mapping)
        if self.mode.attention == "paged":
            options = {"causal": True, "batch_invariant": self.mode.batch_invariant}
            return tpa.flash_varlen(q, *pages, **batch.arguments(), **options)[0]
        # SDPA knows no pages: gather each sequence's keys, and mask the future
        outs = []
        bounds = batch.cu_seqlens_q.tolist()
        for row, used, (a, b) in zip(
            batch.block_table, batch.seqused_k.tolist(), pairwise(bounds), strict=True
        ):
            keys = [x[row[row >= 0].long()].transpose(1, 2).flatten(0, 1)[:used] for x in pages]
            outs.append(by_sdpa(q[a:b], *keys))
        return torch.cat(outs)


def by_sdpa(q, k, v):
    """Causal attention of one sequence, the last len(q) of whose tokens are queries."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    mask = mask.tril(k.shape[2] - q.shape[2])
    out = scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def trained_log_probs(model, samples, mode):
    """Log-probabilities (sampled tokens,) of all samples, by one packed row, with gradients."""
    documents = [s.prompt + s.tokens for s in samples]
    lengths = torch.tensor([len(d) for d in documents])
    bounds = pad(lengths.cumsum(0), (1, 0)).int().to(DEVICE)
    tokens = torch.tensor([t for d in documents for t in d], device=DEVICE)
    positions = torch.cat([torch.arange(len(d)) for d in documents]).to(DEVICE)

    def attend(layer, q, k, v):
        if mode.attention == "paged":
            invariant = mode.batch_invariant
            return tpa.flash_varlen(q, k, v, bounds, causal=True, batch_invariant=invariant)[0]
        parts = zip(*(x.split(lengths.tolist()) for x in (q, k, v)), strict=True)
        return torch.cat([by_sdpa(*part) for part in parts])

    log_probs = model(tokens, positions, attend, mode)
    # the token at a row is predicted by the row before it
    starts = bounds.tolist()
    rows = [
        torch.arange(start + len(s.prompt), start + len(s.prompt) + len(s.tokens))
        for s, start in zip(samples, starts, strict=False)
    ]
    rows = torch.cat(rows).to(DEVICE)
    return log_probs[rows - 1, tokens[rows]]


def prompts(count, longest, seed=0):
    """Random prompts of very different lengths; every second one begins with a common prefix."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length):
        return torch.randint(256, (int(length),), generator=generator).tolist()

    prefix = draw(PREFIX)
    lengths = torch.logspace(0.7, math.log10(longest), count).round()
    samples = []
    for i in torch.randperm(count, generator=generator).tolist():
        prompt = (prefix if i % 2 else []) + draw(lengths[i])
        samples.append(Sample(prompt, arrival=2 * len(samples)))
    return samples


@dataclass
class Result:
    mode: Mode
    equal: int
    total: int
    largest: float  # difference of two log-probabilities of one token
    sampling: float  # seconds
    training: float


def compare(model, mode, count, longest, new_tokens):
    """How many log-probabilities of the sampler and the trainer are equal in every bit."""

    def timed(function):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        value = function()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return value, time.perf_counter() - start

    def sample():
        samples = prompts(count, longest)
        Sampler(model, mode, new_tokens).run(samples)
        return samples

    def train(samples):
        model.zero_grad()
        log_probs = trained_log_probs(model, samples, mode)
        log_probs.sum().backward()
        return log_probs.detach().cpu()

    train(sample())  # compiles and fills caches
    samples, sampling = timed(sample)
    trained, training = timed(lambda: train(samples))
    sampled = torch.stack([x for s in samples for x in s.log_probs])
    equal = int((sampled == trained).sum())
    largest = float((sampled - trained).abs().max())
    return Result(mode, equal, len(sampled), largest, sampling, training)


def policy_gradient(model, mode, steps, progress):
    """Reward bytes that are lower-case letters. Returns the mean reward of the first and the last
    tenth of the steps, and the largest distance of an importance ratio from 1.
    """
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    rewards, farthest = [], 0.0
    for step in range(steps):
        samples = prompts(8, 24, seed=step)
        for s in samples:
            s.arrival //= 2
        Sampler(model, mode, new_tokens=8, seed=step).run(samples)
        sampled = torch.stack([x for s in samples for x in s.log_probs]).to(DEVICE)
        reward = torch.tensor([97 <= t < 123 for s in samples for t in s.tokens]).float().to(DEVICE)
        trained = trained_log_probs(model, samples, mode)
        ratio = (trained - sampled).exp()
        farthest = max(farthest, float((ratio.detach() - 1).abs().max()))
        loss = -(ratio * (reward - reward.mean())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(float(reward.mean()))
        progress(f"policy gradient, step {step + 1} of {steps}, reward {rewards[-1]:.2f}")
    tenth = max(1, steps // 10)
    return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth, farthest


def add_rows(path, machine, results):
    """Add results, (dtype, Result) each, to the "rollout" part of a JSON file of benchmarks."""
    versions = {"torch": torch.__version__, "date": str(date.today())}
    document = {"machine": versions, "parts": {"rollout": []}}
    if path.exists():
        document = json.loads(path.read_text())
    for dtype, r in results:
        figures = {"equal": r.equal, "tokens": r.total, "largest": r.largest}
        figures |= {"sampling": round(r.sampling, 3), "training": round(r.training, 3)}
        row = {"problem": f"{machine}, {dtype}, {r.mode.name}", "unit": "s", "figures": figures}
        document["parts"]["rollout"].append(row)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    shorter = "fewer prompts and steps; on a GPU without the default mode"
    parser.add_argument("--quick", action="store_true", help=shorter)
    parser.add_argument("--json", type=Path, metavar="OUT", help="add the table's rows to a file")
    parser.add_argument("--machine", default=DEVICE, help="its name in those rows")
    arguments = parser.parse_args()
    quick = arguments.quick
    console = Console(width=96)
    count, longest, new_tokens, steps = (8, 100, 8, 10) if quick else (32, 600, 32, 200)
    modes = [INVARIANT, DEFAULT, SDPA]
    if quick and DEVICE == "cuda":
        # it takes other kernels for other batches, most of all that would be compiled
        modes.remove(DEFAULT)

    table = Table(title=f"Log-probabilities of the sampler and the trainer, {DEVICE}", width=96)
    for name in ("dtype", "attention"):
        table.add_column(name)
    for name in ("equal bits", "largest difference", "sampling, s", "training, s"):
        table.add_column(name, justify="right")
    failed, results = False, []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = Llama(Config()).to(DEVICE, dtype)
        for mode in modes:
            result = compare(model, mode, count, longest, new_tokens)
            failed |= mode is INVARIANT and result.equal < result.total
            results.append((str(dtype).removeprefix("torch."), result))
            table.add_row(
                str(dtype).removeprefix("torch."),
                mode.name,
                f"{result.equal:,} of {result.total:,}",
                f"{result.largest:.1e}",
                f"{result.sampling:.2f}",
                f"{result.training:.2f}",
            )
    console.print(table)
    if arguments.json:
        add_rows(arguments.json, arguments.machine, results)

    torch.manual_seed(0)
    # the same heads, so that no other kernels are compiled
    model = Llama(Config(hidden_size=64, num_layers=2)).to(DEVICE)
    with console.status("policy gradient") as status:
        before, after, farthest = policy_gradient(model, INVARIANT, steps, status.update)
    console.print(
        f"policy gradient, {steps} steps: reward {before:.2f} -> {after:.2f}, importance ratio"
        f" {'exactly 1 at every token' if farthest == 0 else f'up to {farthest:.1e} from 1'}"
    )
    return int(failed or farthest > 0)


if __name__ == "__main__":
    sys.exit(main())
