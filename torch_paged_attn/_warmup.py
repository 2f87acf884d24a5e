"""`warmup`: GPU kernels are compiled before a model needs them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch

from torch_paged_attn.layouts import BlockSparseLayout
from torch_paged_attn.ops import blocksparse, flash_varlen, merge_states, reshape_and_cache
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import fail

# numbers of keys per sequence for which kernels may differ: one tile, a few tiles, many tiles; of a
# single decode one kernel is chosen around 12,288 keys alone
CONTEXTS = (64, 128, 256, 512, 1024, 4096, 12288, 1 << 14, 1 << 16)

# numbers of queries per sequence just above a multiple of the tile: the last tile is nearly empty,
# and a kernel with smaller tiles may be chosen
RAGGED = (257, 1025)

# up to so many queries per sequence, kernels also depend on the hints `max_seqlen_q` and
# `max_seqlen_k`, so that calls are made with and without them
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
            to MOST_PROCESSES, when omitted. With 1 no process is started.
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
    if num_processes > 1:
        backend, _ = serving_device(device)
        compiler = None if backend is None else backend.compiler()
        if compiler is not None and compiler.compiled_elsewhere(described, device) is None:
            compiler.compile_ahead(make_calls, device, num_processes)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        make_calls(device)
    stream.synchronize()


def usable_cores() -> int:
    """How many cores this process may use, which Linux alone tells; elsewhere those of the host."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def in_turn(*warmups: tuple[str, Callable[[torch.device], Any]]) -> tuple[str, Callable]:
    """Several warm-ups as one: their descriptions, and a function that makes their calls."""
    texts, makers = zip(*warmups, strict=True)
    return "; ".join(texts), functools.partial(_make_in_turn, makers)


def _make_in_turn(makers: tuple[Callable[[torch.device], Any], ...], device: torch.device) -> None:
    with torch.inference_mode():
        for make in makers:
            for call in make(device) or ():  # one makes its calls, or returns them
                call()


def calls_of(*arguments: Any) -> tuple[str, Callable[[torch.device], None]]:
    """A description of a warm-up, and the function that makes its calls on a device: from the
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
) -> None:
    """Call the operators with all sizes for which kernels may differ."""
    head_dim = dims[0]

    def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    new = [zeros(max_tokens, num_kv_heads, dim, dtype=dtype) for dim in dims]
    queries = zeros(max_tokens, num_heads, head_dim, dtype=dtype)
    if page_size is None:
        packed = [zeros(max_tokens, num_kv_heads, dim, dtype=kv_dtype) for dim in dims]
    else:
        pages = -(-max_tokens // page_size)
        k_cache, v_cache = (
            zeros(pages, page_size, num_kv_heads, dim, dtype=kv_dtype).transpose(1, 2)
            for dim in dims
        )
        for tokens in sizes_up_to(max_tokens):
            # a negative slot writes nothing; PagedKVCache has slots of 32 bits, engines of 64
            for of_slots in (torch.int64, torch.int32):
                slots = torch.full((tokens,), -1, dtype=of_slots, device=device)
                reshape_and_cache(new[0], new[1], (k_cache, v_cache), slots)
    attend: list[Callable[..., Any]] = [functools.partial(flash_varlen, **options)]
    with torch.inference_mode():
        lengths_of_queries = [*sizes_up_to(max_tokens), *RAGGED]
        for batch, length in itertools.product(sizes_up_to(max_batch), lengths_of_queries):
            total = batch * length
            if total > max_tokens:
                continue
            if layout is not None:
                listed = _for_batch(layout, batch).arguments()
                attend[1:] = [functools.partial(blocksparse, **listed, **options)]
            q = queries[:total]
            starts = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)
            for op in attend:
                if page_size is None:
                    results = op(q, packed[0][:total], packed[1][:total], cu_seqlens_q=starts)
                    continue
                # no sequence has a key: the kernel returns at once
                lengths = {"cu_seqlens_q": starts, "seqused_k": zeros(batch, dtype=torch.int32)}
                for context in CONTEXTS:
                    table = zeros(batch, -(-context // page_size), dtype=torch.int32)
                    hints: list[dict[str, int]] = [{}]
                    if length <= FEW:
                        # max_seqlen_k is missing, or small, or what the block table holds
                        longest = {"max_seqlen_q": length}
                        reaches = CONTEXTS[0], context
                        hints += longest, *({**longest, "max_seqlen_k": n} for n in reaches)
                    elif context == CONTEXTS[-1]:
                        # small values need no call: a narrow block table has the same effect
                        hints.append({"max_seqlen_k": context})
                    for said in hints:
                        results = op(q, k_cache, v_cache, block_table=table, **lengths, **said)
        if results[0].dtype.itemsize > 1:
            merge_states(*results, *results)
