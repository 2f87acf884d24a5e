"""One long document, cut over processes: a small Llama learns it as one process would.

Each process holds a share of the document's tokens and the whole (small) model; attention sees all
tokens by `torch_paged_attn.distributed.context_parallel`, in each of its three schemes. Losses and
gradients are compared with those of one process at every step, and the exit status is 1 if they
differ.

    torchrun --nproc-per-node 2 examples/long_context.py [--tokens 4096] [--steps 4]

Runs on GPUs (NCCL), one for each process, where there are as many, else on the CPU (gloo).
"""

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from corpus import sources
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, silu

import torch_paged_attn as tpa
from torch_paged_attn.distributed.context_parallel import (
    Shards,
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM = 2, 128, 8, 4, 16
LEARNING_RATE = 3e-3
MAX_DIFFERENCE = 1e-3  # of losses, and of gradients beside their largest one, in float32


class Layer(nn.Module):
    """Attention and a gated network, each behind a norm."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x, positions, attend):
        qkv = self.qkv(rms_norm(x, (WIDTH,))).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), 1)
        attended, _ = attend(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(attended.flatten(1))
        gate, up = self.up(rms_norm(x, (WIDTH,))).chunk(2, -1)
        return x + self.down(silu(gate) * up)


class Model(nn.Module):
    """Predicts the next byte."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        nn.init.normal_(self.embedding.weight, std=WIDTH**-0.5)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, tokens, positions, attend):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions, attend)
        return rms_norm(x, (WIDTH,)) @ self.embedding.weight.mT


def rotated(x, positions):
    """Rotary embeddings: a token knows where it stands in the document, wherever its rank is."""
    frequencies = 10000.0 ** -torch.linspace(0, 1, HEAD_DIM // 2, device=x.device)
    angles = (positions[:, None] * frequencies)[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), -1)


class OneProcess:
    """The whole document, on every process alike."""

    name = "one process"

    def __init__(self, tokens):
        self.tokens = tokens
        self.positions = torch.arange(len(tokens), device=tokens.device)
        self.bounds = torch.tensor([0, len(tokens)], dtype=torch.int32, device=tokens.device)

    def loss(self, model):
        logits = model(self.tokens, self.positions, self.attend)
        return cross_entropy(logits[:-1], self.tokens[1:])

    def attend(self, q, k, v):
        return tpa.flash_varlen(q, k, v, self.bounds, causal=True)

    def add_up(self, model, loss):
        return loss.detach()


class Cut:
    """This process' share of the document."""

    def __init__(self, tokens, scheme):
        self.scheme, self.name = scheme, scheme.__name__
        self.shards = Shards(
            torch.tensor([0, len(tokens)], dtype=torch.int32), device=tokens.device
        )
        targets = tokens.roll(-1)
        targets[-1] = -100  # the last byte predicts nothing
        self.tokens = self.shards.shard(tokens)
        self.targets = torch.full_like(self.tokens, -100)
        self.targets[: len(self.shards.indices)] = targets[self.shards.indices]
        self.predicted = len(tokens) - 1

    def loss(self, model):
        logits = model(self.tokens, self.shards.positions, self.attend)
        return cross_entropy(logits, self.targets, reduction="sum") / self.predicted

    def attend(self, q, k, v):
        return self.scheme(q, k, v, self.shards, causal=True)

    def add_up(self, model, loss):
        loss = loss.detach()
        for x in (loss, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(x)
        return loss


def train(way, device, steps):
    """Losses and gradients of each step, and the seconds of the last ones."""
    torch.manual_seed(0)
    model = Model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses, gradients, start = [], [], 0.0
    for step in range(steps):
        if step == 1:
            start = now(device)
        optimizer.zero_grad()
        loss = way.loss(model)
        loss.backward()
        losses.append(way.add_up(model, loss).item())
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        optimizer.step()
    return losses, gradients, (now(device) - start) / max(steps - 1, 1)


def now(device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def difference(found, wanted):
    """The largest difference of a step's gradients beside the largest of each parameter's."""
    pairs = [pair for step in zip(found, wanted, strict=True) for pair in zip(*step, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="bytes of the document")
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()
    local, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    on_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= world
    device = torch.device("cuda", local) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        return run(arguments, device)
    finally:
        dist.destroy_process_group()


def run(arguments, device):
    tokens = document(arguments.tokens).to(device)
    wanted, gradients, seconds = train(OneProcess(tokens), device, arguments.steps)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    say(f"{len(tokens)} tokens, {dist.get_world_size()} processes, {where}")
    headings = (
        f"{'first loss':>12}{'last loss':>12}{'loss off':>11}{'gradients off':>15}{'s/step':>9}"
    )
    say(f"{'':22}{headings}")
    say(f"{'one process':22}{wanted[0]:12.6f}{wanted[-1]:12.6f}{'':26}{seconds:9.3f}")
    failed = False
    for scheme in (all_gather_attention, ring_attention, ulysses_attention):
        losses, found, seconds = train(Cut(tokens, scheme), device, arguments.steps)
        off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        gradient_off = difference(found, gradients)
        failed |= not max(off, gradient_off) <= MAX_DIFFERENCE
        figures = f"{losses[0]:12.6f}{losses[-1]:12.6f}{off:11.1e}{gradient_off:15.1e}"
        say(f"{scheme.__name__:22}{figures}{seconds:9.3f}")
    say("different" if failed else "the same")
    return int(failed)


def document(length):
    """The library's source, as bytes."""
    found = bytearray()
    for _, text in sources():
        found += text.encode()
        if len(found) >= length:
            break
    return torch.frombuffer(found, dtype=torch.uint8)[:length].long()


def say(text):
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
