"""What a cache's format costs in accuracy: the perplexity of a small language model on real text.

    python benchmarks/cache_formats.py [--steps N] [--threads N] [--text FILE ...]

A byte-level decoder (4 layers, 2 heads of 64, RoPE) is trained on the CPU on most files of Python's
standard library, or of the texts given. It then reads the other files with keys and values stored
in each format by `reshape_and_cache`. With a window, each query sees the keys nearest to it in
bfloat16, and only those before them in the format. Takes some minutes on one core, and prints the
table of `docs/cache_formats.md`.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torch_paged_attn import PagedKVCache, reshape_and_cache
from torch_paged_attn.ops.checks import INT4

LENGTH, HEADS, DIM, LAYERS = 512, 2, 64, 4
WIDTH, PAGE, BATCH = HEADS * DIM, 16, 8
# a format's name -> the dtype of its numbers, and whether rows have scales
FORMATS = {
    "bfloat16": (torch.bfloat16, False),
    "float8_e4m3fn, no scale": (torch.float8_e4m3fn, False),
    "float8_e4m3fn": (torch.float8_e4m3fn, True),
    "float8_e5m2": (torch.float8_e5m2, True),
    "int8": (torch.int8, True),
    "int4": (INT4, True),
}
WINDOWS = (0, 32, 128)
# of the models that the bytes of a format are given for
MODEL_DIM = 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor, attend: "Attend") -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        q, k = turned(q), turned(k)
        x = x + self.out(attend(q, k, v).flatten(2))
        return x + self.mlp(self.after(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor, attend: "Attend") -> Tensor:
        """Logits (batch, length, 256) of tokens (batch, length)."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attend)
        return self.head(self.norm(x))


def turned(x: Tensor) -> Tensor:
    """x (batch, length, heads, DIM), turned by its position (RoPE)."""
    angle = torch.arange(x.shape[1])[:, None] * 10000.0 ** -torch.linspace(0, 1, DIM // 2)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Attend:
    """Causal attention to keys and values as they come."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class AttendCache(Attend):
    """The same to keys and values that a cache of a format holds, but for the `window` keys nearest
    to each query, which are bfloat16.
    """

    def __init__(self, dtype: torch.dtype, has_scales: bool, window: int) -> None:
        self.dtype, self.has_scales, self.window = dtype, has_scales, window

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        stored = stored_as(k, v, self.dtype, self.has_scales)
        exact = [x.bfloat16().float() for x in (k, v)]
        distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
        is_near = distance < self.window
        q = q.bfloat16().float()
        far, near = (torch.einsum("bqhd,bkhd->bhqk", q, x[0]) for x in (stored, exact))
        scores = torch.where(is_near, near, far) * DIM**-0.5
        p = scores.masked_fill(distance < 0, -math.inf).softmax(-1)
        parts = (p * ~is_near, stored[1]), (p * is_near, exact[1])
        return sum(torch.einsum("bhqk,bkhd->bqhd", *part) for part in parts)


def stored_as(k: Tensor, v: Tensor, dtype: torch.dtype, has_scales: bool) -> tuple[Tensor, Tensor]:
    """Keys and values (batch, length, heads, DIM) as a cache of `dtype` holds them, in float32."""
    rows = [x.bfloat16().flatten(0, 1) for x in (k, v)]
    pages = -(-len(rows[0]) // PAGE)
    width = DIM // 2 if dtype == INT4 else DIM
    caches = [torch.zeros(pages, HEADS, PAGE, width, dtype=dtype) for _ in rows]
    scales = [torch.ones(pages, HEADS, PAGE) for _ in rows]
    slots = torch.arange(len(rows[0]))
    given = scales if has_scales else ()
    reshape_and_cache(*rows, (caches[0], caches[1]), slots, *given, quantize=has_scales)
    found = []
    for cache, scale in zip(caches, scales, strict=True):
        numbers = unpacked(cache) if dtype == INT4 else cache.float()
        real = (numbers * scale[..., None]).transpose(1, 2).flatten(0, 1)[: len(slots)]
        found.append(real.view(k.shape))
    return found[0], found[1]


def unpacked(cache: Tensor) -> Tensor:
    """The numbers of int4: of each byte the low bits, then the high ones."""
    nibbles = torch.stack([cache & 15, cache >> 4], -1).flatten(-2)
    return ((nibbles ^ 8).float()) - 8.0


def texts(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Bytes to train on, and sequences (n, LENGTH + 1) to read."""
    seen, unseen = (
        b"".join(x.read_bytes() for i, x in enumerate(paths) if (i % 8 == 0) is is_read)
        for is_read in (False, True)
    )
    train, read = (torch.tensor(list(x[: 2**22]), dtype=torch.uint8) for x in (seen, unseen))
    count = min(len(read) // (LENGTH + 1), 96)
    apart = len(read) // max(count, 1)
    return train, torch.stack([read[i * apart :][: LENGTH + 1] for i in range(count)]).long()


def train(model: Model, text: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=(0.9, 0.95))
    decay = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for step in range(steps):
        starts = torch.randint(len(text) - LENGTH - 1, (BATCH,))
        batch = torch.stack([text[i : i + LENGTH + 1] for i in starts]).long()
        loss = F.cross_entropy(model(batch[:, :-1], Attend()).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        decay.step()
        if step % 50 == 49:
            print(f"step {step + 1}: {loss.item():.3f} nats a byte", flush=True)


@torch.inference_mode()
def perplexity(model: Model, sequences: Tensor, attend: Attend) -> float:
    """Of a byte, over all that have at least a quarter of LENGTH before them."""
    losses = []
    for batch in sequences.split(8):
        logits = model(batch[:, :-1], attend)[:, LENGTH // 4 :]
        wanted = batch[:, 1 + LENGTH // 4 :]
        losses.append(F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="none"))
    return math.exp(torch.cat(losses).mean().item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--text", type=Path, nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    paths = options.text or sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text, sequences = texts(paths)
    model = Model()
    train(model, text, options.steps)
    exact = perplexity(model, sequences, Attend())
    print(f"perplexity of a byte in float32: {exact:.4f}, over {sequences.numel()} bytes\n")
    head = ["format", "bytes of a token and head", "tokens in the same memory"]
    head += [f"last {w} in bfloat16" if w else "all stored" for w in WINDOWS]
    print(f"| {' | '.join(head)} |")
    print("|---" * len(head) + "|")
    baseline: list[float] = []
    for name, (dtype, has_scales) in FORMATS.items():
        found = [perplexity(model, sequences, AttendCache(dtype, has_scales, w)) for w in WINDOWS]
        baseline = baseline or found
        size, of_bfloat16 = (
            PagedKVCache.bytes_per_token(1, 1, MODEL_DIM, dtype=x, token_scales=y)
            for x, y in ((dtype, has_scales), (torch.bfloat16, False))
        )
        row = [name, str(size), f"{of_bfloat16 / size:.2f}x"]
        row += [
            f"{x:.4f} ({100 * (x / y - 1):+.2f} %)" for x, y in zip(found, baseline, strict=True)
        ]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
