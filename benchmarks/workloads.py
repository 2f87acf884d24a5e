"""Benchmarks made of tensors: the call, how much work it is, and whether its result is right."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from measure import Ceiling, copy_ceiling, matmul_ceiling, read_ceiling
from problems import Attention, Backward, CacheWrite
from torch import Tensor

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.layouts import BlockSparseLayout
from torch_paged_attn.testing import (
    Call,
    Truth,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import cumulative, hostile_gradients

# a sequence with fewer scores than this is checked whole, a longer one in a few spans of rows
CHECKED_SCORES = 2**24
SPAN = 16

# How far a peer may be off, of the largest value: it rounds elsewhere, but computes the same thing.
PEER_TOLERANCE = 0.02


class AttentionWorkload:
    """One call of `flash_varlen` or `blocksparse`."""

    def __init__(self, benchmark: Attention) -> None:
        self.name, self.bound = benchmark.name, benchmark.bound
        self.call = build(benchmark.problem)
        self.written = as_written(self.call)
        problem, q, k, v = benchmark.problem, *(self.call.args[name] for name in "qkv")
        self.lengths = list(zip(problem.query_lens, problem.key_lens, strict=True))
        row_bytes = (k.shape[-1] * k.itemsize + v.shape[-1] * v.itemsize) * problem.num_kv_heads
        self.kv_bytes = sum(problem.key_lens) * row_bytes
        pairs = sum(visible_pairs(self.call, b) for b in range(len(self.lengths)))
        latent = v.shape[-1] if benchmark.problem.latent else 0
        flops = 2.0 * pairs * (q.shape[-1] + latent + v.shape[-1])
        self.work = {"read": float(self.kv_bytes), "matmul": flops, "call": 1.0}[self.bound]
        self.spans = list(self._spans())

    def run(self) -> tuple[Tensor, Tensor]:
        return self.written.run()

    def ceiling(self) -> Ceiling | None:
        if self.bound == "read":
            return read_ceiling(self.kv_bytes)
        return matmul_ceiling(self.call.args["q"].dtype) if self.bound == "matmul" else None

    def check(self) -> str:
        """Raise AssertionError unless the result is accurate; says what was looked at."""
        out, lse = self.run()
        rows = self._rows()
        self.truth = Truth.joined([rows_alone(self.call, *span).truth() for span in self.spans])
        assert_accurate(out[rows], lse[:, rows], self.truth)
        return f"{len(rows)} of {out.shape[0]} rows"

    def check_peer(self, out: Tensor) -> str | None:
        """Why a peer's result is not the same attention, or None."""
        error = (out[self._rows()].double() - self.truth.out).abs().max()
        allowed = PEER_TOLERANCE * self.truth.out.abs().max()
        return None if error <= allowed else f"wrong by {error:.2g}, allowed {allowed:.2g}"

    def _spans(self) -> Any:
        """(sequence, first row, last row + 1) of what is checked against the reference."""
        longest = max(range(len(self.lengths)), key=lambda b: self.lengths[b])
        num_heads = self.call.args["q"].shape[1]
        # dropout draws by a row's place in the call: one sequence, all its rows
        whole = self.call.args.get("dropout_p", 0.0) > 0
        for b in sorted({0, longest, len(self.lengths) - 1}):
            query_len, key_len = self.lengths[b]
            small = num_heads * query_len * key_len <= CHECKED_SCORES or query_len <= 3 * SPAN
            if small or whole:
                yield b, 0, query_len
            else:
                for first in (0, query_len // 2, query_len - SPAN):
                    yield b, first, first + SPAN

    def _rows(self) -> Tensor:
        starts = self.call.args["cu_seqlens_q"].tolist()
        spans = [torch.arange(starts[b] + first, starts[b] + stop) for b, first, stop in self.spans]
        return torch.cat(spans)


def as_written(call: Call) -> Call:
    """The call as people write it: without what is its default, which would cost time to pass."""
    schema = getattr(torch.ops.paged_attn, call.op).default._schema
    defaults = {x.name: x.default_value for x in schema.arguments if x.has_default_value()}

    def is_shown(name: str, value: Any) -> bool:
        return isinstance(value, Tensor) or name not in defaults or value != defaults[name]

    args = {name: value for name, value in call.args.items() if is_shown(name, value)}
    return dataclasses.replace(call, args=args)


def visible_pairs(call: Call, b: int) -> int:
    """Pairs of a query row and a key that sequence `b` computes, over all query heads."""
    masks = visible(call, b)
    return sum(int(mask.sum()) for mask in masks) * (call.args["q"].shape[1] // len(masks))


def visible(call: Call, b: int) -> Tensor:
    """Bool (layout heads or 1, Lq, Lk): which keys sequence `b` sees."""
    query_len, key_len = sequence_lengths(call)[b]
    positions, keys = torch.arange(key_len - query_len, key_len), torch.arange(key_len)
    assert call.args["window_size_left"] == call.args["window_size_right"] == -1
    causal = (keys <= positions[:, None])[None]
    if not call.args["causal"]:
        causal = torch.ones_like(causal)
    if call.op == "flash_varlen":
        return causal
    names = ("crow_indices", "col_indices", "q_block_size", "k_block_size")
    layout = BlockSparseLayout(*(call.args[name] for name in names), num_cols=key_len)
    rows = layout.dense()[:, positions // layout.q_block_size]
    return rows[..., keys // layout.k_block_size] & causal


def sequence_lengths(call: Call) -> list[tuple[int, int]]:
    """(Lq, Lk) of each sequence."""
    query_lens = call.args["cu_seqlens_q"].diff().tolist()
    seqused = call.args.get("seqused_k")
    return list(zip(query_lens, query_lens if seqused is None else seqused.tolist(), strict=True))


def rows_alone(call: Call, b: int, first: int, stop: int) -> Call:
    """Rows `first:stop` of sequence `b` as one call: of a causal one with the keys up to the last
    row, of another all its rows.
    """
    query_len, key_len = sequence_lengths(call)[b]
    alone = call.alone(b)
    args = dict(alone.args)
    assert args["causal"] or (first, stop) == (0, query_len)
    args["q"] = args["q"][first:stop]
    args["cu_seqlens_q"] = cumulative([stop - first])
    if "block_table" not in args:
        args["cu_seqlens_k"] = cumulative([args["k"].shape[0]])
    args["seqused_k"] = torch.tensor([key_len - (query_len - stop)], dtype=torch.int32)
    return dataclasses.replace(alone, args=args)


# calls that write elsewhere before the first slots come again: an engine has just computed what it
# stores, but the slots are those of a cache far larger than the processor's own
CACHE_WRITES = 8


class CacheWriteWorkload:
    """Calls of `reshape_and_cache` on two caches."""

    def __init__(self, benchmark: CacheWrite) -> None:
        self.name, self.bound, self.benchmark = benchmark.name, benchmark.bound, benchmark
        shape = (benchmark.num_tokens, benchmark.num_kv_heads, benchmark.head_dim)
        generator = torch.Generator().manual_seed(0)
        self.key, self.value = (
            torch.randn(shape, generator=generator).to(benchmark.dtype) for _ in range(2)
        )
        pages = CACHE_WRITES * -(-benchmark.num_tokens // benchmark.page_size)
        self.cache_shape = (pages, benchmark.num_kv_heads, benchmark.page_size, benchmark.head_dim)
        self.caches = self.empty_caches()
        slots = torch.randperm(pages * benchmark.page_size, generator=generator)
        self.slot_mappings = slots.view(CACHE_WRITES, -1)[:, : benchmark.num_tokens].unbind()
        self.next_slots = itertools.cycle(self.slot_mappings)
        itemsizes = benchmark.dtype.itemsize + benchmark.cache_dtype.itemsize
        self.work = float(2 * self.key.numel() * itemsizes)  # read and written

    def empty_caches(self) -> tuple[Tensor, Tensor]:
        k_cache, v_cache = (
            torch.zeros(self.cache_shape).to(self.benchmark.cache_dtype) for _ in range(2)
        )
        return k_cache, v_cache

    def run(self) -> None:
        slots = next(self.next_slots)
        torch_paged_attn.reshape_and_cache(self.key, self.value, self.caches, slots)

    def ceiling(self) -> Ceiling:
        return copy_ceiling(int(self.work) // 2, CACHE_WRITES)

    def check(self) -> str:
        """Raise AssertionError unless every byte of both caches is as the reference writes it."""
        written = self.empty_caches()
        for slots in self.slot_mappings:
            self.run()
            reference.reshape_and_cache_split(self.key, self.value, *written, slots)
        for cache, expected in zip(self.caches, written, strict=True):
            assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8)), "wrong bytes"
        return "every byte"


# what is compared with the reference's gradients, which looks at every product of every pair
CHECKED_TOKENS, CHECKED_HEADS = 160, (8, 2)


class BackwardWorkload:
    """The backward of one call of `flash_varlen`, or both directions."""

    def __init__(self, benchmark: Backward) -> None:
        self.name, self.bound, self.both = benchmark.name, benchmark.bound, benchmark.both
        self.problem = benchmark.problem
        self.call = build(benchmark.problem)
        self.out, self.lse = self.call.run()
        generator = torch.Generator().manual_seed(0)
        self.dout = torch.randn(self.out.shape, generator=generator).to(self.out.dtype)
        lengths = sequence_lengths(self.call)
        pairs = sum(visible_pairs(self.call, b) for b in range(len(lengths)))
        q, v = self.call.args["q"], self.call.args["v"]
        # of the five products of a backward three are along head_dim, two along head_dim_v
        backward = 2.0 * pairs * (3 * q.shape[-1] + 2 * v.shape[-1])
        self.work = backward + self.both * 2.0 * pairs * (q.shape[-1] + v.shape[-1])

    def run(self) -> tuple[Tensor, ...]:
        out, lse = self.call.run() if self.both else (self.out, self.lse)
        return self.call.backward(self.dout, None, out, lse).run()[:3]

    def ceiling(self) -> Ceiling:
        return matmul_ceiling(self.dout.dtype)

    def check(self) -> str:
        """Raise AssertionError unless the gradients of a shorter batch of fewer heads are accurate.
        At full size they are compared with a peer's.
        """
        seqs = tuple((min(n, CHECKED_TOKENS), context) for n, context in self.problem.seqs)
        num_heads, num_kv_heads = CHECKED_HEADS
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        short = build(dataclasses.replace(self.problem, seqs=seqs, **heads))
        out, lse = short.run()
        dout, dlse = hostile_gradients(short, out, lse)
        found = short.backward(dout, dlse, out, lse).run()
        assert_accurate_gradients(found, short.gradients(dout, dlse))
        return f"sequences of at most {CHECKED_TOKENS}, {num_heads} heads"

    def check_peer(self, gradients: Sequence[Tensor]) -> str | None:
        """Why a peer's gradients are not the same, or None."""
        for name, x, ours in zip(("dq", "dk", "dv"), gradients, self.run(), strict=True):
            error, allowed = (
                (x.float() - ours.float()).abs().max(),
                PEER_TOLERANCE * ours.abs().max(),
            )
            if not error <= allowed:
                return f"{name} wrong by {error:.2g}, allowed {allowed:.2g}"
        return None


Workload = AttentionWorkload | BackwardWorkload | CacheWriteWorkload


def make(benchmark: Attention | Backward | CacheWrite) -> Workload:
    """The tensors of a benchmark."""
    if isinstance(benchmark, Backward):
        return BackwardWorkload(benchmark)
    if isinstance(benchmark, Attention):
        return AttentionWorkload(benchmark)
    return CacheWriteWorkload(benchmark)
