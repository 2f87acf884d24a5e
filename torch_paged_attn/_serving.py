"""`Serving`: the calls of attention that an engine makes, and a warm-up that covers their kernels.

Which kernel a call takes follows from the numbers of its sequences and queries and from two hints.
`Serving.steps` lists combinations of them, closer together where kernels change, far more than
there are kernels. Processes without a GPU plan some of each line of them, by which kernels these
take, and compile what is missing; the engine's process then makes one call for each kernel, which
loads it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from torch_paged_attn.ops import flash_varlen_out, reshape_and_cache
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import refuse

# numbers of sequences and of queries that are all tried; above, so many to a power of two
ALL_UP_TO, PARTS = 16, 8
# queries of the longest sequence, on which a kernel may depend up to so many rows of queries that
# share keys (BLOCK_M in the Triton backend)
FEW, MOST_ROWS = (*range(2, 9), 12, 16, 24, 32, 48, 64), 64
# keys of the longest sequence: steps of 64 up to the first number, then four to a power of two
KEYS_IN_STEPS, KEY_STEP = 512, 64
# where max_seqlen_k says nothing, as many keys are assumed as the geometric mean of this number and
# of the most that there may be (LEAST_UNSAID in the Triton backend)
LEAST_UNSAID = 1024
# pages of the cache of the calls
PAGES = 64


class Step(NamedTuple):
    """The sizes of one call: max_seqlen_q and max_seqlen_k are hints."""

    batch: int
    total_q: int
    max_seqlen_q: int
    max_seqlen_k: int


def _sizes(most: int, least: int = 1, parts: int = PARTS) -> list[int]:
    """Numbers from `least` to `most`: all of the first, then `parts` to a power of two, and one
    more than each power.
    """
    powers = (1 << i for i in range(most.bit_length()))
    found = {n * i // parts for n in powers for i in range(parts, 2 * parts)}
    found |= {*range(1, ALL_UP_TO + 1), *((1 << i) + 1 for i in range(most.bit_length()))}
    return sorted({x for x in found if least <= x <= most} | {least, most})


def key_hints(most: int) -> list[int]:
    """The values of max_seqlen_k between which no plan differs."""
    steps = range(KEY_STEP, min(most, KEYS_IN_STEPS), KEY_STEP)
    return sorted({*steps, *_sizes(most, min(most, KEYS_IN_STEPS), 4)})


def hints_in_order(most: int, room: int) -> list[int]:
    """`key_hints`, in order of the keys that the longest sequence is assumed to have.
    `room`: keys that the block table has room for; a hint of as many, rounded up, says nothing.
    """

    def assumed(hint: int) -> int:
        step = KEY_STEP if hint <= KEYS_IN_STEPS else 1 << ((hint - 1).bit_length() - 3)
        said = -(-hint // step) * step
        return said if said < room or room <= LEAST_UNSAID else math.isqrt(LEAST_UNSAID * room)

    return sorted(key_hints(most), key=assumed)


def _are_on_a_line(a: int | Step, b: int | Step) -> bool:
    if not (isinstance(a, Step) and isinstance(b, Step) and a[:3] == b[:3]):
        return False
    # a decode or a step of few queries has few work items: kernels change often along its line, and
    # more often where keys are few
    is_end = a.max_seqlen_k <= KEYS_IN_STEPS < b.max_seqlen_k
    return a.max_seqlen_q > 1 and a.total_q > ALL_UP_TO and not is_end


class Calls(Sequence[Callable[[], None]]):
    """A call for each size: a number of tokens that are written, or a step of attention. Far more
    than are made, so each is put together when it is asked for.

    Attributes:
        lines: ranges of neighbours that differ in max_seqlen_k alone, in order of the keys that
            are assumed. Along most lines kernels change once or never; where they change often,
            each call is a line
    """

    def __init__(
        self,
        write: Callable[[int], None],
        attend: Callable[[Step], None],
        sizes: list[int | Step],
    ) -> None:
        self._write, self._attend, self._sizes = write, attend, sizes
        ends = [i for i in range(1, len(sizes)) if not _are_on_a_line(sizes[i - 1], sizes[i])]
        self.lines = list(map(range, [0, *ends], [*ends, len(sizes)]))

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, index: Any) -> Any:
        size = self._sizes[index]
        call: Any = self._attend if isinstance(size, Step) else self._write
        return functools.partial(call, size)


# bytes of a scale
SCALE = 4


def rows_with_scales(cache: torch.Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Keys, values, and their scales by token and head, as views of a cache whose rows are a key,
    its scale, a value and its scale, as vLLM has them.

    cache: (num_pages, num_kv_heads, page_size, 2 * (head_dim + 4)), any strides, an 8-bit dtype
    dtype: of keys and values, 8 bits

    Returns keys and values (num_pages, num_kv_heads, page_size, head_dim), and float32 scales
    (num_pages, num_kv_heads, page_size).
    """
    parts = cache.view(torch.uint8).split([head_dim, SCALE] * 2, -1)
    k, v = (x.view(dtype) for x in parts[::2])
    k_scale, v_scale = (x.view(torch.float32)[..., 0] for x in parts[1::2])
    return k, v, k_scale, v_scale


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
    by_token: bool = False
    """Keys and values have scales by token and head: see `rows_with_scales`."""
    tokens_first: bool = True
    """A page's memory is token by token, as vLLM's is by default, not head by head. Kernels depend
    on it if scales are in the rows, whose bytes are then no multiple of 16."""
    options: tuple[tuple[str, Any], ...] = ()
    """Further arguments of `flash_varlen_out` by name."""

    def steps(self) -> Iterator[Step]:
        """Sizes of calls, such that each kernel that a call may take is taken by one of them."""
        keys = hints_in_order(self.max_length, self.max_pages * self.page_size)
        for batch in _sizes(self.max_batch, parts=4):
            for total, longest in self._queries(batch):
                for most in keys:
                    if most >= longest:
                        yield Step(batch, total, longest, most)

    def _queries(self, batch: int) -> Iterator[tuple[int, int]]:
        """All queries, and those of the longest sequence."""
        most = min(self.max_tokens, batch * self.max_length)
        # the first value of max_seqlen_q that says nothing
        long = max(MOST_ROWS * self.num_kv_heads // self.num_heads, 1) + 1
        if batch <= most:
            yield batch, 1
        for longest in sorted({*FEW, long - 1}):
            if not 1 < longest < min(long, self.max_length + 1):
                continue
            # plans depend on the mean, rounded up, and on whether all sequences have as many
            means = {1 + (longest - 1) * i // PARTS for i in range(PARTS + 1)}
            totals = {batch + longest - 1, *(mean * batch for mean in means)}
            totals |= {mean * batch - 1 for mean in means if mean > 1}
            for total in sorted(totals):
                if total <= most:
                    yield total, longest
        if self.max_length >= long:
            for total in _sizes(most, min(most, batch + long - 1)):
                yield total, long

    def calls(self, device: torch.device) -> Calls:
        """The calls on a device. No sequence has a query or a key: kernels return at once."""
        sizes: list[int | Step] = [*_sizes(self.max_tokens), *self.steps()]
        return Calls(self._writing(device), self.attention(device), sizes)

    def attention(self, device: torch.device) -> Callable[[Step], None]:
        """A function that makes a call of attention of these sizes."""
        zeros = functools.partial(torch.zeros, device=device)
        k_cache, v_cache, *scales = self._caches(device)
        queries, results = (
            torch.empty(
                self.max_tokens, self.num_heads, self.head_dim, dtype=self.dtype, device=device
            )
            for _ in range(2)
        )
        starts = zeros(self.max_batch + 1, dtype=torch.int32)
        lengths = zeros(self.max_batch, dtype=torch.int32)
        table = zeros(self.max_batch, self.max_pages, dtype=torch.int32)
        options = dict(self.options)
        if scales:
            options |= {"k_descale": scales[0], "v_descale": scales[1]}
        if self.has_sinks:
            options["sinks"] = zeros(self.num_heads)
        if self.has_slopes:
            options["alibi_slopes"] = zeros(self.num_heads)

        def attend(step: Step) -> None:
            batch, total = step.batch, step.total_q
            flash_varlen_out(
                results[:total],
                queries[:total],
                k_cache,
                v_cache,
                starts[: batch + 1],
                max_seqlen_q=step.max_seqlen_q,
                max_seqlen_k=step.max_seqlen_k,
                seqused_k=lengths[:batch],
                block_table=table[:batch],
                **options,
            )

        return attend

    def _caches(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """Keys and values, and their scales if they have 8 bits."""
        row = 2 * (self.head_dim + SCALE * self.by_token)
        zeros = functools.partial(torch.zeros, dtype=self.kv_dtype, device=device)
        if self.tokens_first:
            cache = zeros(PAGES, self.page_size, self.num_kv_heads, row).transpose(1, 2)
        else:
            cache = zeros(PAGES, self.num_kv_heads, self.page_size, row)
        if self.by_token:
            return rows_with_scales(cache, self.head_dim, self.kv_dtype)
        k_cache, v_cache = cache.split(self.head_dim, -1)
        if self.kv_dtype.itemsize > 1:
            return k_cache, v_cache
        # each a tensor of its own, as a layer has them: a kernel is compiled for its alignment
        return k_cache, v_cache, *(torch.ones((), device=device) for _ in "kv")

    def _writing(self, device: torch.device) -> Callable[[int], None]:
        """A function that makes a call of `reshape_and_cache` for so many tokens."""
        k_cache, v_cache, *scales = self._caches(device)
        shape = self.max_tokens, self.num_kv_heads, self.head_dim
        new = torch.zeros(shape, dtype=self.dtype, device=device)
        slots = torch.full((self.max_tokens,), -1, device=device)

        def write(tokens: int) -> None:
            new_rows = new[:tokens]
            reshape_and_cache(
                new_rows, new_rows, (k_cache, v_cache), slots[:tokens], *scales,
                quantize=self.by_token,
            )  # fmt: skip

        return write


@functools.cache
def warm_up(serving: Serving, device: torch.device, num_processes: int) -> int:
    """Compile and load the kernels of an engine's calls on a GPU, once; returns how many calls
    were made there. The device waits for nothing but them. A file in Triton's cache remembers which
    calls these are, for the next start.
    """
    backend, reason = serving_device(device)
    compiler = None if backend is None else backend.compiler()
    if compiler is None:
        refuse("warm_up", reason or f"there is nothing to compile for {device}")
    with compiler.remembered(repr(serving), device) as known:
        if known.calls is None:
            known.calls = compiler.compile_calls(serving.calls, device, num_processes)
    needed = known.calls
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        calls = serving.calls(device)
        for i in needed:
            calls[i]()
    stream.synchronize()
    del calls
    torch.cuda.empty_cache()  # an engine is about to take what is free
    return len(needed)
