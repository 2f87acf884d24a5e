"""`warmup`: GPU kernels are compiled before a model needs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from torch_paged_attn._serving import hints_in_order, key_hints
from torch_paged_attn.layouts import BlockSparseLayout
from torch_paged_attn.ops import blocksparse, flash_varlen, merge_states, reshape_and_cache
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import fail

# numbers of keys per sequence for which kernels may differ: one tile, a few tiles, many tiles; of a
# single decode one kernel is chosen around 12,288 keys alone
CONTEXTS = (64, 128, 256, 512, 1024, 4096, 12288, 1 << 14, 1 << 16)

# keys that block tables have room for, of which kernels with the hint `max_seqlen_k` may differ
TABLES = (1 << 11, 1 << 12, 1 << 16)

# numbers of queries per sequence just above a multiple of the tile: the last tile is nearly empty,
# and a kernel with smaller tiles may be chosen
RAGGED = (257, 1025)

# up to so many queries per sequence, kernels also depend on the hint `max_seqlen_q`, so that calls
# are made with and without it
FEW = 64

# that compile, by default
MOST_PROCESSES = 8


def sizes_up_to(most: int) -> list[int]:
    """All powers of two and numbers halfway between two of them up to `most`, and `most` itself."""
    powers = [2**i for i in range(most.bit_length())]
    halfway = [3 * n // 2 for n in powers if n > 1 and 3 * n // 2 <= most]
    return sorted({*powers, *halfway, most})


def _for_batch(layout: BlockSparseLayout, batch: int) -> BlockSparseLayout:
    """A layout for `batch` sequences: if it has a batch, its first entry is repeated."""
    crow, col = layout.crow_indices, layout.col_indices
    if crow.dim() == 2:
        return layout
    return dataclasses.replace(
        layout,
        crow_indices=crow[:1].expand(batch, -1, -1),
        col_indices=col[:1].expand(batch, -1, -1),
    )


def warmup(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    page_size: int | None = None,
    device: torch.device | str = "cuda",
    max_batch: int = 256,
    max_tokens: int = 8192,
    layout: BlockSparseLayout | None = None,
    num_units: int | None = None,
    select_size: int = 1,
    num_processes: int | None = None,
    **options: Any,
) -> None:
    """Compile the GPU kernels that a model needs, before it runs.

    These are the kernels of `flash_varlen`, `reshape_and_cache`, `merge_states`, if a layout is
    given `blocksparse`, and with num_units `selected_attention`, for decode, prefill and mixed
    batches of up to `max_batch` sequences and `max_tokens` queries in all. Compiled kernels do not
    depend on lengths and strides: calls of other sizes use the same ones. On a CPU there is nothing
    to compile.

    Most of it is done by processes without a GPU, which fill Triton's cache on the disk. A thread
    may call it while others serve (`threading.Thread(target=warmup, ...)`): it launches on a stream
    of its own and waits for that alone. What it has not come to yet is compiled by the call that
    needs it.

    Args:
        num_heads, num_kv_heads, head_dim, head_dim_v: of the model; head_dim_v is head_dim when
            omitted.
        dtype, kv_dtype: of queries, and of keys and values when they differ.
        page_size: of a paged cache whose layout is `(num_pages, page_size, num_kv_heads,
            head_dim)`, passed transposed; None: keys are packed.
        layout: an example of the layouts that `blocksparse` will get, with the same block sizes and
            number of heads, and with a batch if those have one. Its rows and columns do not matter.
        num_units: entries of the lists of `selected_attention` over pages, one for each KV head;
            None: it is not called. With one KV head and head_dim_v below head_dim, values are the
            first columns of keys.
        select_size: keys of a unit of these lists.
        num_processes: that compile, each a share of the kernels; one for each core of the host, up
            to MOST_PROCESSES, when omitted. With 1, no process is started, and fewer sizes are
            tried.
        options: further arguments of `flash_varlen` and `blocksparse`, such as `causal=True`.
            Tensors among them must not depend on the batch.

    Raises:
        ValueError: the device is neither a GPU of this machine nor a CPU. (A TPU, for example,
            compiles for each shape, which cannot be done in advance.) Or num_units is given without
            page_size.
    """
    device = torch.device(device)
    if num_units is not None and page_size is None:
        fail("warmup", "page_size", "None", "the cache's, with num_units")
    if device.type == "cpu":
        return
    if device.type != "cuda":
        fail("warmup", "device", device, "a GPU or a CPU")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= gpus:
        expected = f"a CPU, or one of the {gpus} GPUs that torch {torch.__version__} finds"
        fail("warmup", "device", device, expected)
    if num_processes is None:
        num_processes = min(usable_cores(), MOST_PROCESSES)
    if num_processes < 1:
        fail("warmup", "num_processes", num_processes, "at least 1, or None")
    described, make_calls = calls_of(
        num_heads, num_kv_heads, (head_dim, head_dim if head_dim_v is None else head_dim_v),
        dtype, dtype if kv_dtype is None else kv_dtype, page_size, max_batch, max_tokens, layout,
        options,
    )  # fmt: skip
    if num_units is not None and page_size is not None:
        from torch_paged_attn._model_calls import selected_calls_of

        plain = num_heads, num_kv_heads, head_dim, head_dim_v or head_dim, options
        sizes = page_size, max_batch, max_tokens, num_units, select_size
        of_lists = selected_calls_of(*plain, dtype, kv_dtype or dtype, *sizes)
        described, make_calls = in_turn((described, make_calls), of_lists)
    needed = None
    if num_processes > 1:
        backend, _ = serving_device(device)
        compiler = None if backend is None else backend.compiler()
        if compiler is not None:
            needed = compiler.compiled_elsewhere(described, device)
            if needed is None:
                needed = compiler.compile_calls(make_calls, device, num_processes)
    stream = torch.cuda.Stream(device)
    with torch.inference_mode(), torch.cuda.stream(stream):
        calls = make_calls(device)
        for i in calls.of_lines() if needed is None else needed:
            calls[i]()
    stream.synchronize()


def usable_cores() -> int:
    """How many cores this process may use, which Linux alone tells; elsewhere those of the host."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class CallList(list[Callable[[], Any]]):
    """Calls that a warm-up makes.

    Attributes:
        lines: ranges of neighbours along which kernels change once or never
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[range] = []

    def add_line(self, calls: Iterable[Callable[[], Any]]) -> None:
        first = len(self)
        self.extend(calls)
        if len(self) > first:
            self.lines.append(range(first, len(self)))

    def add_each(self, calls: Iterable[Callable[[], Any]]) -> None:
        """Calls each of which is a line."""
        for call in calls:
            self.add_line([call])

    def of_lines(self) -> Iterator[int]:
        """Some calls of each line, for a warm-up that does not look which kernels they take."""
        for line in self.lines:
            yield from sorted({line[(len(line) - 1) * i // 4] for i in range(5)})


def in_turn(*warmups: tuple[str, Callable[[torch.device], Any]]) -> tuple[str, Callable]:
    """Several warm-ups as one: their descriptions, and a function that returns their calls."""
    texts, makers = zip(*warmups, strict=True)
    return "; ".join(texts), functools.partial(_make_in_turn, makers)


def _make_in_turn(
    makers: tuple[Callable[[torch.device], Any], ...], device: torch.device
) -> CallList:
    found = CallList()
    for make in makers:
        calls = make(device)
        for line in getattr(calls, "lines", None) or [range(i, i + 1) for i in range(len(calls))]:
            found.add_line(calls[i] for i in line)
    return found


def calls_of(*arguments: Any) -> tuple[str, Callable[[torch.device], CallList]]:
    """A description of a warm-up, and the function that returns its calls on a device: from the
    arguments of `_make_calls`. Layouts and other tensors are described by their shapes alone.
    """
    *plain, layout, options = arguments
    shown = {n: x.shape if isinstance(x, torch.Tensor) else x for n, x in sorted(options.items())}
    sizes = None if layout is None else layout.crow_indices.shape
    described = f"warmup {*plain, sizes, shown}"
    return described, functools.partial(_make_calls, *arguments)


def _make_calls(
    num_heads: int,
    num_kv_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int | None,
    max_batch: int,
    max_tokens: int,
    layout: BlockSparseLayout | None,
    options: dict[str, Any],
    device: torch.device,
) -> CallList:
    """Calls of the operators with all sizes for which kernels may differ."""
    calls, new = CallList(), functools.partial(torch.zeros, device=device)
    fresh = [new(max_tokens, num_kv_heads, dim, dtype=dtype) for dim in dims]
    queries = new(max_tokens, num_heads, dims[0], dtype=dtype)
    rows = max_tokens if page_size is None else page_size * -(-max_tokens // page_size)
    cached = [new(rows, num_kv_heads, dim, dtype=kv_dtype) for dim in dims]
    if page_size is not None:
        cached = [x.unflatten(0, (-1, page_size)).transpose(1, 2) for x in cached]

    def write(tokens: int, of_slots: torch.dtype) -> None:
        # a negative slot writes nothing
        slots = torch.full((tokens,), -1, dtype=of_slots, device=device)
        reshape_and_cache(fresh[0], fresh[1], (cached[0], cached[1]), slots)

    def attend(op: Callable[..., Any], batch: int, total: int, keys: int, **hints: int) -> Any:
        """`keys`: of the block table. No sequence has any: the kernel returns at once."""
        q, starts = queries[:total], new(batch + 1, dtype=torch.int32)
        if page_size is None:
            return op(q, *(x[:total] for x in cached), cu_seqlens_q=starts)
        table = torch.empty(batch, -(-keys // page_size), dtype=torch.int32, device=device)
        lengths = {"cu_seqlens_q": starts, "seqused_k": new(batch, dtype=torch.int32)}
        return op(q, *cached, block_table=table, **lengths, **hints)

    def merge() -> None:
        results = attend(functools.partial(flash_varlen, **options), 1, 1, CONTEXTS[0])
        if results[0].dtype.itemsize > 1:
            merge_states(*results, *results)

    if page_size is not None:
        # PagedKVCache has slots of 32 bits, engines of 64
        kinds = torch.int64, torch.int32
        of_tokens = itertools.product(sizes_up_to(max_tokens), kinds)
        calls.add_each(functools.partial(write, *x) for x in of_tokens)
    for batch, total, longest in _batches(max_batch, max_tokens):
        ops: list[Callable[..., Any]] = [functools.partial(flash_varlen, **options)]
        if layout is not None:
            listed = _for_batch(layout, batch).arguments()
            ops.append(functools.partial(blocksparse, **listed, **options))
        for op in ops:
            call = functools.partial(attend, op, batch, total)
            if page_size is None:
                calls.add_each([functools.partial(call, 0)])
                continue
            # of decodes kernels change often
            add = calls.add_each if longest == 1 else calls.add_line
            for line in _lines_of_keys(longest):
                add(functools.partial(call, keys, **hints) for keys, hints in line)
    calls.add_each([merge])
    return calls


def _batches(max_batch: int, max_tokens: int) -> Iterator[tuple[int, int, int]]:
    """Sequences, queries, and those of the longest: all alike, or one shorter than the others."""
    lengths = sizes_up_to(max_tokens) + list(RAGGED)
    for batch, longest in itertools.product(sizes_up_to(max_batch), lengths):
        for total in (batch * longest, batch * longest - 1):
            if max(batch, longest) <= total <= max_tokens:
                yield batch, total, longest


def _lines_of_keys(longest: int) -> Iterator[list[tuple[int, dict[str, int]]]]:
    """Keys of block tables, and hints: each table without a hint on keys, and of some tables all
    values of the hint between which kernels may differ."""
    said: list[dict[str, int]] = [{}]  # as of a chunk of a prompt beside decodes
    if 1 < longest <= FEW:
        said.append({"max_seqlen_q": longest})
    for hints in said:
        yield [(keys, hints) for keys in key_hints(CONTEXTS[-1])]
        for keys in TABLES:
            yield [(keys, {**hints, "max_seqlen_k": n}) for n in hints_in_order(keys, keys)]
