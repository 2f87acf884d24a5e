"""Index: a small model learns which keys to attend to, and then serves with what it learned.

A model of bytes (grouped-query attention, float32) has an indexer in each layer, as DeepSeek V3.2
does: `select_keys` takes the keys with the best index scores, `selected_attention` attends to
them, and `selected_mass` says how much attention each of them got. The indexer learns that share
by a KL loss, the rest of the model the next byte.

The same model is trained beside it by the eager formula, with matrices of all queries and keys.
Both losses have to agree at every step. Then it writes text, a byte at a time, with paged caches of
keys, values and index keys; the bytes have to be those of the eager formula over the whole text.
The exit status is 1 if they are not.

    python examples/indexer.py [--quick]
"""

import argparse
import copy
import itertools
import sys
import time

import torch
from corpus import sources
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, rms_norm

import torch_paged_attn as tpa

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DIM, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 96, 6, 2, 16, 2
INDEX_HEADS, INDEX_DIM = 4, 16
SELECTED, LONGEST, PAGE = 16, 160, 16
MAX_DIFFERENCE = 1e-3  # between the losses of a step, in float32


def by_operators(layer, q, k, v, index, bounds):
    """Attention to the selected keys, and the indexer's loss."""
    index_q, index_k, weights = index
    chosen = (x.detach() for x in index)
    lists, _ = tpa.select_keys(*chosen, bounds, num_units=SELECTED, force_last=1)
    out, lse = tpa.selected_attention(q, k, v, lists, bounds)
    target = tpa.selected_mass(q.detach(), k.detach(), lse.detach(), lists, bounds)[:, 0] / HEADS
    lists = lists[:, 0].long()
    row = torch.arange(len(q), device=q.device)
    first = bounds[torch.searchsorted(bounds[1:].contiguous(), row, right=True)]
    keys = index_k[first[:, None] + lists.clamp(min=0), 0]
    products = torch.einsum("thd,tnd->thn", index_q, keys).relu()
    scores = torch.einsum("thn,th->tn", products, weights)
    return out, indexer_loss(scores.masked_fill(lists < 0, float("-inf")), target)


def by_formula(layer, q, k, v, index, bounds):
    """The same with matrices of all queries and keys."""
    index_q, index_k, weights = index
    row = torch.arange(len(q), device=q.device)
    document = torch.searchsorted(bounds[1:].contiguous(), row, right=True)
    visible = (document[:, None] == document) & (row <= row[:, None])
    products = torch.einsum("thd,jd->thj", index_q, index_k[:, 0]).relu()
    scores = torch.einsum("thj,th->tj", products, weights)
    ranked = scores.detach().masked_fill(~visible, float("-inf"))
    ranked = ranked.masked_fill(row == row[:, None], float("inf"))  # the token's own key
    # of equal scores the smallest id first, as `select_keys` has it
    best = ranked.sort(descending=True, stable=True).indices[:, :SELECTED]
    seen = torch.zeros_like(visible).scatter(1, best, True) & visible
    keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    logits = torch.einsum("thd,jhd->thj", q, keys) * HEAD_DIM**-0.5
    p = logits.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("thj,jhd->thd", p, values)
    return out, indexer_loss(scores.masked_fill(~seen, float("-inf")), p.detach().mean(1))


def indexer_loss(scores, target):
    """KL of the attention to the softmax of the index scores, -inf where no key is selected."""
    logs = scores.log_softmax(-1).masked_fill(scores == float("-inf"), 0.0)
    return kl_div(logs, target, reduction="batchmean")


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, DIM, bias=False)
        self.index = nn.Linear(DIM, (INDEX_HEADS + 1) * INDEX_DIM + INDEX_HEADS, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))

    def forward(self, x, bounds, attend):
        """x: (tokens, DIM). Returns it and the indexer's loss."""
        normed = rms_norm(x, (DIM,))
        heads = self.qkv(normed).unflatten(1, (-1, HEAD_DIM))
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], 1)
        index = self.index(normed.detach())  # the indexer learns by its own loss alone
        sizes = [INDEX_HEADS * INDEX_DIM, INDEX_DIM, INDEX_HEADS]
        index_q, index_k, weights = index.split(sizes, 1)
        index_q, index_k = (y.unflatten(1, (-1, INDEX_DIM)) for y in (index_q, index_k))
        out, loss = attend(self, q, k, v, (index_q, index_k, weights), bounds)
        x = x + self.out(out.flatten(1))
        return x + self.mlp(rms_norm(x, (DIM,))), loss


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, DIM), nn.Embedding(LONGEST, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 256)

    def forward(self, text, positions, bounds, attend):
        """(tokens, 256) logits, and the sum of the indexers' losses."""
        x, total = self.bytes(text) + self.positions(positions), 0.0
        for layer in self.layers:
            x, loss = layer(x, bounds, attend)
            total = total + loss
        return self.head(rms_norm(x, (DIM,))), total


def batches(count, documents):
    """Packed bytes, their positions, and bounds of documents."""
    data = "".join(text for _, text in itertools.islice(sources(), 40)).encode()
    data = torch.frombuffer(bytearray(data), dtype=torch.uint8).long()
    g = torch.Generator().manual_seed(0)
    for _ in range(count):
        lengths = torch.randint(20, LONGEST, (documents,), generator=g)
        starts = torch.randint(len(data) - LONGEST, (documents,), generator=g)
        ends = (starts + lengths).tolist()
        parts = [data[start:end] for start, end in zip(starts.tolist(), ends, strict=True)]
        bounds = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
        positions = torch.cat([torch.arange(len(x)) for x in parts])
        yield torch.cat(parts).to(DEVICE), positions.to(DEVICE), bounds.to(DEVICE)


def train(model, attend, steps):
    """(cross entropy, KL) of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for text, positions, bounds in steps:
        logits, kl = model(text, positions, bounds, attend)
        targets = text.roll(-1)
        targets[bounds[1:].long() - 1] = -100  # a document's last byte has no next one
        loss = cross_entropy(logits, targets)
        optimizer.zero_grad()
        (loss + kl).backward()
        optimizer.step()
        losses.append((loss.item(), kl.item()))
    return losses


class Cache:
    """Pages of keys, values and index keys of one sequence, for each layer."""

    def __init__(self):
        pages = -(-LONGEST // PAGE)
        zeros = lambda *shape: torch.zeros(*shape, device=DEVICE)  # noqa: E731
        self.kv = [zeros(2, pages, KV_HEADS, PAGE, HEAD_DIM) for _ in range(LAYERS)]
        self.index = [zeros(pages, 1, PAGE, INDEX_DIM) for _ in range(LAYERS)]
        self.table = torch.randperm(pages).int()[None].to(DEVICE)
        self.length = 0

    def attend(self, layers):
        """A function for `Model` that writes new keys, and attends to the selected ones."""

        def attend(layer, q, k, v, index, bounds):
            i = layers.index(layer)
            positions = torch.arange(self.length, self.length + len(q), device=DEVICE)
            slots = self.table[0, positions // PAGE].long() * PAGE + positions % PAGE
            tpa.reshape_and_cache(k.contiguous(), v.contiguous(), self.kv[i], slots)
            index_q, index_k, weights = index
            self.index[i][slots // PAGE, 0, slots % PAGE] = index_k[:, 0]
            used = torch.tensor([self.length + len(q)], dtype=torch.int32, device=DEVICE)
            pages = {"seqused_k": used, "block_table": self.table}
            lists, _ = tpa.select_keys(
                *(index_q, self.index[i], weights, bounds),
                num_units=SELECTED,
                force_last=1,
                **pages,
            )
            return tpa.selected_attention(q, *self.kv[i], lists, bounds, **pages)[0], 0.0

        return attend


@torch.no_grad()
def write(model, prompt, count):
    """The most probable next bytes, one at a time."""
    cache, layers = Cache(), list(model.layers)
    text, new = prompt.clone(), prompt
    for _ in range(count):
        positions = torch.arange(cache.length, len(text), device=DEVICE)
        bounds = torch.tensor([0, len(new)], dtype=torch.int32, device=DEVICE)
        logits, _ = model(new, positions, bounds, cache.attend(layers))
        cache.length = len(text)
        new = logits[-1:].argmax(-1)
        text = torch.cat([text, new])
    return text


@torch.no_grad()
def write_by_formula(model, prompt, count):
    """The same, from all bytes at each step."""
    text = prompt.clone()
    for _ in range(count):
        bounds = torch.tensor([0, len(text)], dtype=torch.int32, device=DEVICE)
        positions = torch.arange(len(text), device=DEVICE)
        logits, _ = model(text, positions, bounds, by_formula)
        text = torch.cat([text, logits[-1:].argmax(-1)])
    return text


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a few steps")
    arguments = parser.parse_args()
    count, documents, written = (6, 4, 12) if arguments.quick else (30, 6, 64)
    torch.manual_seed(0)
    ours = Model().to(DEVICE)
    theirs = copy.deepcopy(ours)
    steps = list(batches(count, documents))
    table = Table(title=f"{count} steps on {DEVICE}")
    for name in ("training", "seconds", "first loss, KL", "last loss, KL", "largest difference"):
        table.add_column(name)
    losses = []
    for model, attend, name in ((theirs, by_formula, "formula"), (ours, by_operators, "operators")):
        start = time.perf_counter()
        losses.append(train(model, attend, steps))
        seconds = time.perf_counter() - start
        apart = float((torch.tensor(losses[0]) - torch.tensor(losses[-1])).abs().max())
        ends = (f"{losses[-1][at][0]:.4f}, {losses[-1][at][1]:.4f}" for at in (0, -1))
        table.add_row(name, f"{seconds:.1f}", *ends, f"{apart:.1e}" if len(losses) > 1 else "")
    prompt = steps[0][0][:40]
    text, wanted = write(ours, prompt, written), write_by_formula(ours, prompt, written)
    same = torch.equal(text, wanted)
    console = Console()
    console.print(table)
    console.print(f"{written} bytes written: {'the same' if same else 'OTHERS'} as by the formula")
    return int(apart > MAX_DIFFERENCE or not same)


if __name__ == "__main__":
    sys.exit(main())
