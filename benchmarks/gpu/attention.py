"""Prefill and decode beside FlashAttention-3 and SDPA's kernels, and the chip's ceilings.

Our result, of prefill that of one head, is compared with a float32 formula before it is timed.
Medians of CUDA-graph replays; those of prefill take turns, because the chip slows down when it is
hot. Each row of prefill says which of our kernels answered.
"""

import dataclasses
import functools
import logging
import statistics
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench, do_bench_cudagraph

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
from torch_paged_attn.backends.triton.portable.forward.plan import attend

DEVICE = "cuda"


@dataclasses.dataclass(frozen=True)
class Prefill:
    """Sequences of these lengths, packed."""

    lengths: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    page_size: int = 0

    def __str__(self) -> str:
        same = len(set(self.lengths)) == 1
        size = f"{len(self.lengths)}x{self.lengths[0]}" if same else f"ragged{len(self.lengths)}"
        mask = "causal" if self.causal else "full"
        pages = f" page{self.page_size}" if self.page_size else ""
        return f"prefill {size} {self.num_heads}/{self.num_kv_heads} d{self.head_dim} {mask}{pages}"

    @property
    def flops(self) -> float:
        """Causal counts as half."""
        share = 0.5 if self.causal else 1.0
        return sum(4 * self.num_heads * self.head_dim * n * n * share for n in self.lengths)


@dataclasses.dataclass(frozen=True)
class Decode:
    """One query a sequence over these many keys, pages in random order."""

    contexts: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    page_size: int = 16
    head_dim: int = 128
    kv_dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        same = len(set(self.contexts)) == 1
        size = (
            f"b{len(self.contexts)} ctx{self.contexts[0]}"
            if same
            else f"ragged{len(self.contexts)}"
        )
        kind = "" if self.kv_dtype == torch.bfloat16 else f" {str(self.kv_dtype).split('.')[1]}"
        return f"decode {size} {self.num_heads}/{self.num_kv_heads} p{self.page_size}{kind}"

    @property
    def bytes(self) -> float:
        """Keys and values, each read once."""
        return sum(self.contexts) * self.num_kv_heads * self.head_dim * 2 * self.kv_dtype.itemsize


def ragged(count: int, power: float, most: int, least: int) -> tuple[int, ...]:
    """Lengths of few long and many short sequences, the same every time."""
    generator = torch.Generator().manual_seed(1)
    return tuple((torch.rand(count, generator=generator) ** power * most + least).int().tolist())


PREFILL = (
    Prefill((16384,), 32, 8, 128),
    Prefill((4096,) * 4, 32, 8, 128),
    Prefill((4096,) * 4, 32, 32, 128, causal=False),
    Prefill((1024,) * 16, 32, 8, 64),
    Prefill((8192,) * 2, 16, 16, 256),
    Prefill(ragged(24, 3, 4000, 16), 32, 8, 128),
    Prefill((4096,) * 4, 32, 8, 128, page_size=16),
    Prefill((4096,) * 4, 32, 8, 128, page_size=128),
    *(
        Prefill((n,) * (16384 // n), 2048 // d, 2048 // d, d, causal)
        for d in (64, 128, 256)
        for causal in (False, True)
        for n in (1024, 4096, 16384)
    ),
)
DECODE = (
    Decode((1024,), 32, 8),
    Decode((4096,), 32, 8),
    Decode((32768,), 32, 8),
    Decode((131072,), 32, 8),
    Decode((1024,) * 8, 32, 8),
    Decode((4096,) * 8, 32, 8),
    Decode((4096,) * 32, 32, 8),
    Decode((8192,) * 32, 32, 8, 64),
    Decode((2048,) * 64, 64, 8),
    Decode((2048,) * 64, 32, 32),
    Decode((1000,) * 16, 32, 32),
    Decode((512,) * 256, 32, 8),
    Decode(ragged(64, 3, 32000, 17), 32, 8),
    Decode((8192,) * 32, 32, 8, 64, kv_dtype=torch.float8_e4m3fn),
    Decode((8192,) * 32, 32, 8, 16, kv_dtype=torch.float8_e4m3fn),
    Decode((8192,) * 32, 32, 8, 16, kv_dtype=torch.int8),
)


def ours(*args, config=None, splits=None, **options):
    """The operator's backend, or its launcher with tiles of the caller's choice."""
    if config is None:
        return flash_varlen(*args, **options)
    return attend(AttentionCall.flash_varlen(*args, **options), config=config, splits=splits)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)


def paged(lengths: tuple[int, ...], page_size: int, heads: int, dim: int, dtype: torch.dtype):
    """Caches (pages, slots, heads, dim), their table and the lengths."""
    counts = [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(counts), device=DEVICE, dtype=torch.int32)
    table = torch.zeros(len(lengths), max(counts), device=DEVICE, dtype=torch.int32)
    for row, part in zip(table, order.split(counts), strict=True):
        row[: part.numel()] = part
    shape = (sum(counts), page_size, heads, dim)
    spread = 40.0 if dtype == torch.int8 else 1.0
    k, v = ((torch.randn(shape, device=DEVICE) * spread).to(dtype) for _ in range(2))
    return k, v, table, torch.tensor(lengths, device=DEVICE, dtype=torch.int32)


def relative_error(out: torch.Tensor, want: torch.Tensor) -> float:
    return ((out.float() - want.float()).norm() / want.float().norm()).item()


def check(errors: dict[str, float]) -> None:
    """Raise if a result is wrong, so that it is not timed."""
    wrong = {name: error for name, error in errors.items() if not error < 0.01}
    assert not wrong, f"relative errors {wrong}"


def without_pages(cache: torch.Tensor, table: torch.Tensor, lengths: tuple[int, ...]):
    """Each sequence's keys or values."""
    return [
        cache[row[: -(-n // cache.shape[1])].long()].flatten(0, 1)[:n]
        for row, n in zip(table, lengths, strict=True)
    ]


def prefill_calls(p: Prefill, fa3) -> tuple[dict[str, Callable], torch.Tensor]:
    total, longest = sum(p.lengths), max(p.lengths)
    cu = cumulative(p.lengths)
    lengths = cu, None, longest, longest
    shape = (total, p.num_heads, p.head_dim)
    q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    calls: dict[str, Callable] = {}
    if p.page_size:
        *pages, table, used = paged(p.lengths, p.page_size, p.num_kv_heads, p.head_dim, q.dtype)
        k, v = (torch.cat(without_pages(cache, table, p.lengths)) for cache in pages)
        caches = [cache.transpose(1, 2) for cache in pages]
        calls["ours"] = lambda **o: ours(q, *caches, *lengths, used, table, causal=p.causal, **o)[0]
        calls["packed"] = lambda: ours(q, k, v, *lengths, causal=p.causal)[0]
        if fa3:
            calls["FA3"] = lambda: fa3.fwd(
                q, *pages, cu_q=cu, seqused_k=used, max_q=longest, max_k=longest, page_table=table,
                causal=p.causal,
            )[0]  # fmt: skip
    else:
        k, v = (
            torch.randn(total, p.num_kv_heads, p.head_dim, device=DEVICE, dtype=q.dtype)
            for _ in range(2)
        )
        calls["ours"] = lambda **o: ours(q, k, v, *lengths, causal=p.causal, **o)[0]
        if fa3:
            calls["FA3"] = lambda: fa3.fwd(
                q, k, v, cu_q=cu, cu_k=cu, max_q=longest, max_k=longest, causal=p.causal
            )[0]
        if len(set(p.lengths)) == 1:
            dense = [
                t.view(len(p.lengths), longest, -1, p.head_dim).transpose(1, 2).contiguous()
                for t in (q, k, v)
            ]

            def sdpa(backend: SDPBackend) -> torch.Tensor:
                with sdpa_kernel(backend):
                    gqa = p.num_heads != p.num_kv_heads
                    return scaled_dot_product_attention(*dense, is_causal=p.causal, enable_gqa=gqa)

            calls["cuDNN"] = lambda: sdpa(SDPBackend.CUDNN_ATTENTION)
            calls["FA2"] = lambda: sdpa(SDPBackend.FLASH_ATTENTION)
    first_heads = (t[:, 0].float().split(p.lengths) for t in (q, k, v))
    want = [
        scaled_dot_product_attention(*(t[None, None] for t in qkv), is_causal=p.causal)[0, 0]
        for qkv in zip(*first_heads, strict=True)
    ]
    return calls, torch.cat(want)  # the first head of every row


def decode_formula(d: Decode, q, k, v, table) -> torch.Tensor:
    """The result in float32, sequence by sequence."""
    rows = []
    caches = (without_pages(cache, table, d.contexts) for cache in (k, v))
    for query, *kv in zip(q, *caches, strict=True):
        keys, values = (x.float().transpose(0, 1)[None] for x in kv)
        query = query.float()[None, :, None]
        rows.append(scaled_dot_product_attention(query, keys, values, enable_gqa=True)[0, :, 0])
    return torch.stack(rows)


def decode_calls(d: Decode, fa3) -> tuple[dict[str, Callable], torch.Tensor]:
    k, v, table, used = paged(d.contexts, d.page_size, d.num_kv_heads, d.head_dim, d.kv_dtype)
    batch, longest = len(d.contexts), max(d.contexts)
    q = torch.randn(batch, d.num_heads, d.head_dim, device=DEVICE, dtype=torch.bfloat16)
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    caches = k.transpose(1, 2), v.transpose(1, 2)
    calls: dict[str, Callable] = {
        "ours": lambda **o: ours(q, *caches, cu, None, 1, longest, used, table, causal=True, **o)[0]
    }
    if fa3 and d.kv_dtype == q.dtype:
        calls["FA3"] = lambda: fa3.fwd(
            q, k, v, cu_q=cu, seqused_k=used, max_q=1, max_k=longest, page_table=table, causal=True
        )[0]
    return calls, decode_formula(d, q, k, v, table)


@triton.jit
def _read_kernel(x_ptr, sums_ptr, n, BLOCK: tl.constexpr):
    """Every program sums every num_programs-th block of float32."""
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.range(
        tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK, num_stages=1, loop_unroll_factor=4
    ):
        total += tl.load(x_ptr + i + tl.arange(0, BLOCK))
    tl.store(sums_ptr + tl.program_id(0), tl.sum(total, 0))


def read_all(x: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Sums of float32s, as fast as memory allows."""
    _read_kernel[(sums.numel(),)](x, sums, x.numel(), BLOCK=4096, num_warps=8)
    return sums


def take_turns(
    calls: dict[str, Callable], rounds: int = 9, each_ms: float = 10
) -> dict[str, float]:
    """Median milliseconds of a call, from graphs of several, replayed in turn."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def elapsed(run: Callable) -> float:
        start.record()
        run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    graphs = {}
    for name, call in calls.items():
        call()
        count = max(2, int(each_ms / elapsed(call)))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
        graph.replay()
        graphs[name] = graph, count
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (graph, count) in graphs.items():
            times[name].append(elapsed(graph.replay) / count)
    return {name: statistics.median(values) for name, values in times.items()}


def ceilings() -> dict[str, float]:
    """TB/s of a copy and of a read, TFLOP/s of a bf16 matrix product."""
    x = torch.randn(2**30, device=DEVICE, dtype=torch.bfloat16)
    y = torch.empty_like(x)
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    copy = do_bench(lambda: y.copy_(x), return_mode="median")
    sums = torch.empty(132 * 8, device=DEVICE)
    floats = torch.rand(2**29, device=DEVICE)
    assert torch.allclose(read_all(floats, sums).double().sum(), floats.double().sum(), rtol=1e-3)
    read = do_bench(lambda: read_all(floats, sums), return_mode="median")
    product = do_bench(lambda: a @ b, return_mode="median")
    return {
        "copy TB/s": 2 * x.nbytes / copy * 1e-9,
        "read TB/s": floats.nbytes / read * 1e-9,
        "bf16 TFLOP/s": 2 * 8192**3 / product * 1e-9,
    }


def first_answer(call: Callable) -> tuple[torch.Tensor, str]:
    """The result of a call that is the first of its kind, and which of our kernels gave it, as the
    debug log says: what was decided once is not said again.
    """
    said: list[str] = []
    logger = logging.getLogger("torch_paged_attn.backends.triton.flash_varlen")
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    out = call()
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    return out, said[0].partition(": the ")[2] if said else "as a call before"


def measure_prefill(p: Prefill, fa3) -> dict[str, Any]:
    calls, want = prefill_calls(p, fa3)
    out, kernel = first_answer(calls["ours"])
    error = relative_error(out[:, 0], want)
    check({"ours": error})
    rates = {name: p.flops / ms * 1e-9 for name, ms in take_turns(calls).items()}
    return {"unit": "TFLOP/s", "figures": rates, "error": error, "kernel": kernel}


def measure_decode(d: Decode, fa3) -> dict[str, Any]:
    calls, want = decode_calls(d, fa3)
    error = relative_error(calls["ours"](), want)
    check({"ours": error})
    # a graph of so many calls as there are counters set aside for
    timed = functools.partial(do_bench_cudagraph, rep=10, return_mode="median")
    times = {name: timed(call) * 1e3 for name, call in calls.items()}
    rate = d.bytes / times["ours"] * 1e-6
    return {"unit": "us", "figures": times, "error": error, "TB/s": rate}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    fa3 = peers.get("FA3")
    rows = {str(p): functools.partial(measure_prefill, p, fa3) for p in PREFILL}
    return rows | {str(d): functools.partial(measure_decode, d, fa3) for d in DECODE}
