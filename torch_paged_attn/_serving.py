"""`Serving`: the calls of attention that an engine makes, and a warm-up that covers their kernels.

Which kernel a call takes follows from the numbers of its sequences and queries and from two hints.
`Serving.steps` lists combinations of them, closer together where kernels change, far more than
there are kernels. Processes without a GPU plan them all and compile what is missing; the engine's
process then makes one call for each kernel, which loads it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from torch_paged_attn.ops import flash_varlen_out, reshape_and_cache

# numbers of sequences and of queries that are all tried; above, powers of two and two between them
ALL_UP_TO = 16
# queries of the longest sequence, where a kernel may depend on them: up to 64
FEW = (*range(2, 9), 12, 16, 24, 32, 48, 64)
# longer than that
LONG = 65
# keys of the longest sequence: steps of 64 up to the first number, then four to a power of two
KEYS_IN_STEPS, KEY_STEP = 512, 64
# pages of the cache of the calls
PAGES = 64


class Step(NamedTuple):
    """The sizes of one call: max_seqlen_q and max_seqlen_k are hints."""

    batch: int
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int


def _sizes(most: int, least: int = 1) -> list[int]:
    """Numbers from `least` to `most`: all of the first, then four to a power of two."""
    powers = (1 << i for i in range(most.bit_length()))
    found = {n * i // 4 for n in powers for i in (4, 5, 6, 7)} | set(range(1, ALL_UP_TO + 1))
    return sorted({x for x in found if least <= x <= most} | {least, most})


def _key_hints(most: int) -> list[int]:
    """The values of max_seqlen_k between which no plan differs."""
    steps = range(KEY_STEP, min(most, KEYS_IN_STEPS), KEY_STEP)
    return sorted({*steps, *_sizes(most, min(most, KEYS_IN_STEPS))})


@dataclasses.dataclass(frozen=True)
class Serving:
    """An engine's calls of `flash_varlen_out` and `reshape_and_cache`: what all of them share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int
    max_pages: int
    """Columns of the block table."""
    max_batch: int
    max_tokens: int
    """Queries of a step."""
    max_length: int
    """Keys of a sequence."""
    has_sinks: bool = False
    has_slopes: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `flash_varlen_out` by name."""

    def steps(self) -> Iterator[Step]:
        """Sizes of calls, such that each kernel that a call may take is taken by one of them."""
        keys = _key_hints(self.max_length)
        for batch in _sizes(self.max_batch):
            for total, longest in self._queries(batch):
                for most in keys:
                    if most >= min(longest, keys[-1]):
                        yield Step(batch, total, longest, most)

    def _queries(self, batch: int) -> Iterator[tuple[int, int]]:
        """All queries, and those of the longest sequence."""
        most = min(self.max_tokens, batch * self.max_length)
        if batch <= most:
            yield batch, 1
        for longest in FEW:
            if longest > self.max_length:
                break
            for total in {batch, batch + longest - 1, batch * (longest + 1) // 2, batch * longest}:
                if batch <= total <= min(most, batch * longest):
                    yield total, longest
        if self.max_length >= LONG:
            for total in _sizes(most, min(most, batch + LONG - 1)):
                yield total, LONG

    def slots(self) -> list[int]:
        """Numbers of tokens of the calls of `reshape_and_cache`."""
        return _sizes(self.max_tokens)

    def calls(self, device: torch.device) -> list[Callable[[], None]]:
        """The calls on a device. No sequence has a query or a key: kernels return at once."""
        zeros = functools.partial(torch.zeros, device=device)
        shape = PAGES, self.num_kv_heads, self.page_size, 2 * self.head_dim
        caches = zeros(shape, dtype=self.kv_dtype).split(self.head_dim, -1)
        queries, results = (
            torch.empty(
                self.max_tokens, self.num_heads, self.head_dim, dtype=self.dtype, device=device
            )
            for _ in range(2)
        )
        new = queries[:, : self.num_kv_heads]
        starts = zeros(self.max_batch + 1, dtype=torch.int32)
        table = zeros(self.max_batch, self.max_pages, dtype=torch.int32)
        options = dict(self.options)
        scales: tuple[torch.Tensor, ...] = ()
        if self.kv_dtype.itemsize == 1:
            scales = zeros(()), zeros(())
            options |= {"k_descale": scales[0], "v_descale": scales[1]}
        if self.has_sinks:
            options["sinks"] = zeros(self.num_heads)
        if self.has_slopes:
            options["alibi_slopes"] = zeros(self.num_heads)
        slots = torch.full((self.max_tokens,), -1, device=device)

        def write(tokens: int) -> None:
            reshape_and_cache(new[:tokens], new[:tokens], caches, slots[:tokens], *scales)

        def attend(step: Step) -> None:
            batch, total = step.batch, step.total_q
            flash_varlen_out(
                results[:total],
                queries[:total],
                caches[0],
                caches[1],
                starts[: batch + 1],
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.max_seqlen_k,
                seqused_k=starts[:batch],
                block_table=table[:batch],
                **options,
            )

        return [
            *(functools.partial(write, tokens) for tokens in self.slots()),
            *map(functools.partial, itertools.repeat(attend), self.steps()),
        ]


@functools.cache
def warm_up(serving: Serving, device: torch.device, num_processes: int) -> int:
    """Compile and load the kernels of an engine's calls on a GPU, once; returns how many calls
    were made there. The device waits for nothing but them.
    """
    # Triton must not be imported where there is no GPU
    from torch_paged_attn.backends.triton.compile_ahead import compile_calls

    needed = compile_calls(serving.calls, device, num_processes)
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        calls = serving.calls(device)
        for i in needed:
            calls[i]()
    stream.synchronize()
    return len(needed)
