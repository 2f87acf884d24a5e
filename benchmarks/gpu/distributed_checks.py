"""What `distributed.py` holds to the accuracy rule before it times anything."""

import math
from collections.abc import Callable
from typing import Any

import torch
from rank_timer import Machine
from torch import Tensor

import torch_paged_attn as tpa
from torch_paged_attn import reference
from torch_paged_attn.distributed import decode
from torch_paged_attn.distributed.context_parallel import (
    Shards,
    SharedKeys,
    all_gather_attention,
    ring_attention,
    ulysses_attention,
)
from torch_paged_attn.testing import (
    Gradients,
    Truth,
    assert_accurate,
    assert_accurate_gradients,
)

SCHEMES = (all_gather_attention, ring_attention, ulysses_attention)
COMBINES = ("all_to_all", "all_gather", "reduce_scatter")


def bounds_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def check_schemes(m: Machine) -> dict[str, Any]:
    """Every scheme and cut by the accuracy rule, with gradients; in 16 bits without."""
    found = {}
    cu = bounds_of([5, 0, 40, 1, 17, 64, 3, 200])
    tokens = int(cu[-1])
    for dtype in dict.fromkeys((torch.float32, m.dtype)):
        trains = dtype == torch.float32
        inputs = [
            m.randn(tokens, heads, 16, seed=i, dtype=torch.float32).to(dtype)
            for i, heads in enumerate((8, 4, 4))
        ]
        dout, dlse = m.randn(tokens, 8, 16, seed=3, dtype=torch.float32), m.randn(8, tokens, seed=4)
        args = dict(zip("qkv", (x.cpu() for x in inputs), strict=True))
        args |= {"cu_seqlens_q": cu, "max_seqlen_q": 0, "max_seqlen_k": 0, "causal": True}
        truth = Truth.of(reference.flash_varlen, **args)
        dlse = dlse.float()
        gradients = Gradients.by_reference("flash_varlen", args, dout.to(dtype).cpu(), dlse.cpu())
        memory = shared_keys(m, inputs[1], dtype)
        for cut in ("contiguous", "head_tail", "documents"):
            shards = Shards(cu, load_balance=cut, device=m.device)
            for scheme in SCHEMES:
                own = [shards.shard(x).detach().requires_grad_(trains) for x in inputs]
                out, lse = scheme(*own, shards, causal=True)
                key = f"{scheme.__name__} {cut} {str(dtype).removeprefix('torch.')}"
                if scheme is all_gather_attention:
                    found |= _without_gradients(memory, own, shards, truth, key)
                whole = shards.unshard(out.detach()), shards.unshard(lse.detach().mT).mT
                found[key] = verdict(assert_accurate, *whole, truth)
                if trains:
                    given = [shards.shard(dout), shards.shard(dlse.mT).mT]
                    torch.autograd.backward([out, lse], given)
                    grads = [shards.unshard(x.grad).cpu() for x in own]
                    grads += [grads[0].new_empty(0)] * 2
                    found[f"{key} gradients"] = verdict(assert_accurate_gradients, grads, gradients)
    return summary(found)


def shared_keys(m: Machine, k: Tensor, dtype: torch.dtype) -> SharedKeys | None:
    """Memory for keys and values of a batch like k; None on CPUs."""
    tokens, heads, dim = k.shape
    return None if m.dry else SharedKeys(None, tokens, heads, dim, dim, dtype, m.device)


def _without_gradients(
    memory: SharedKeys | None, own: list[Tensor], shards: Shards, truth: Truth, key: str
) -> dict[str, str]:
    """Where keys lie once: by messages, and by shared memory the same bits, twice."""
    found = {}
    with torch.no_grad():
        out, lse = all_gather_attention(*own, shards, causal=True)
        whole = shards.unshard(out), shards.unshard(lse.mT).mT
        found[f"{key} without gradients"] = verdict(assert_accurate, *whole, truth)
        for again in range(2 if memory is not None else 0):
            result = all_gather_attention(*own, shards, causal=True, memory=memory)
            same = torch.equal(result[0], out) and torch.equal(result[1], lse)
            found[f"{key} shared memory {again}"] = "right" if same else "WRONG: other bits"
    return found


def summary(found: dict[str, str]) -> dict[str, str]:
    """What is right, counted; what is not, in full."""
    wrong = {name: text for name, text in found.items() if text != "right"}
    return {"right": f"{len(found) - len(wrong)} of {len(found)}"} | wrong


def verdict(check: Callable[..., None], *args: Any) -> str:
    try:
        check(*args)
    except AssertionError as error:
        return f"WRONG: {error}"
    return "right"


class DealtCache:
    """A batch for decode: the whole cache on every rank, and what each rank has of it."""

    def __init__(self, m: Machine, batch: int, context: int, heads: int, kv_heads: int) -> None:
        page = 16
        pages = context // page
        share = math.ceil(pages / m.size)
        self.lengths = torch.full((batch,), context, dtype=torch.int32, device=m.device)
        self.lengths -= torch.arange(batch, dtype=torch.int32, device=m.device) % 7
        g = torch.Generator(m.device).manual_seed(7)
        shape = (2, batch * pages, kv_heads, page, 128)
        self.cache = torch.randn(shape, generator=g, device=m.device, dtype=m.dtype)
        order = torch.randperm(batch * pages, generator=g, device=m.device)
        self.table = order.view(batch, pages).int()
        # runs of a page go round
        mine = self.table[:, m.rank :: m.size].contiguous()
        self.own_table = torch.arange(mine.numel(), device=m.device, dtype=torch.int32)
        self.own_table = self.own_table.view(mine.shape)
        self.own = self.cache[:, mine.flatten().long()]
        assert share >= mine.shape[1]
        self.q = m.randn(batch, heads, 128, seed=8)
        self.bounds = torch.arange(batch + 1, dtype=torch.int32, device=m.device)
        self.m, self.page = m, page

    def one(self) -> tuple[Tensor, Tensor]:
        return tpa.flash_varlen(
            *(self.q, *self.cache, self.bounds, None, 1, None, self.lengths, self.table)
        )

    def all(self, by: Any) -> tuple[Tensor, Tensor]:
        return decode.decode_attention(
            *(self.q, *self.own, None, self.lengths, self.own_table),
            combine=by,
            interleave=self.page,
        )


def check_decode(m: Machine) -> dict[str, Any]:
    """Each combine by the accuracy rule, and in a graph with the same bits."""
    found = {}
    cache = DealtCache(m, 4, 512, 8, 2)
    args = {
        **{"q": cache.q, "k": cache.cache[0], "v": cache.cache[1], "cu_seqlens_q": cache.bounds},
        **{"max_seqlen_q": 0, "max_seqlen_k": 0},
        **{"seqused_k": cache.lengths, "block_table": cache.table},
    }
    args = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in args.items()}
    truth = Truth.of(reference.flash_varlen, **args)
    for name, by in contenders(m, cache):
        kept: list[Tensor] = []

        def step(by: Any = by, kept: list[Tensor] = kept) -> None:
            kept[:] = cache.all(by)

        step()
        out, lse = kept
        whole, lses = decode.gather_heads(out), decode.gather_heads(lse.mT[..., None])
        found[name] = verdict(assert_accurate, whole, lses[..., 0].mT, truth)
        if not m.dry:
            replay = m.captured(step)
            for _ in range(3):
                replay()
            torch.cuda.synchronize()
            same = torch.equal(kept[0], out) and torch.equal(kept[1], lse)
            found[f"{name} in a graph"] = "same bits" if same else "WRONG: other bits"
    return found


def contenders(m: Machine, cache: DealtCache) -> list[tuple[str, Any]]:
    """Ways to combine: name, argument."""
    found: list[tuple[str, Any]] = [(n, n) for n in COMBINES]
    try:
        tokens, heads, dim = cache.q.shape
        by = decode.SymmetricCombine(None, tokens, heads, dim, m.device)
        found.append(("symmetric", by))
    except Exception as error:
        m.say("symmetric memory:", type(error).__name__, str(error)[:300])
    return found
