"""Time decode over caches of 8 bits and int4 on the CPU, beside bfloat16 and onnxruntime.

    python benchmarks/cache_steps.py                   8 sequences of 8,192 keys, on one thread
    python benchmarks/cache_steps.py --models DIR      onnxruntime's models are kept there: without
                                                       onnx they are read, else written

32 query heads and 8 KV heads of 128, bfloat16 queries, pages of 16 in random order. onnxruntime's
GroupQueryAttention has float32 queries, one buffer of keys, and a scale for each channel of a KV
head. Contenders take turns (measure.py); a result that is wrong is not timed.
"""

import argparse
import functools
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ort_peer
import torch
from measure import interleave, sampler
from rich.console import Console
from rich.table import Table
from torch import Tensor

from torch_paged_attn import flash_varlen, reshape_and_cache
from torch_paged_attn.ops.checks import INT4

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
SCALE = DIM**-0.5
INT8, E4M3 = torch.int8, torch.float8_e4m3fn
# dtype of the cache, and what has a scale of its own
OURS = {
    "bfloat16": (torch.bfloat16, ""),
    "int8, by head": (INT8, "head"),
    "int8": (INT8, "token"),
    "int4": (INT4, "token"),
    "e4m3": (E4M3, "token"),
}


class Ours:
    """A cache in pages, written by `reshape_and_cache`."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype, scaled: str) -> None:
        """q (batch, heads, DIM); keys and values (batch, keys, KV heads, DIM)."""
        batch, keys = k.shape[:2]
        self.table = torch.randperm(batch * keys // PAGE).int().view(batch, -1)
        slots = (self.table.long()[..., None] * PAGE + torch.arange(PAGE)).flatten()
        width = DIM // 2 if dtype == INT4 else DIM
        pages = self.table.numel()
        self.kv = [torch.zeros(pages, KV_HEADS, PAGE, width, dtype=dtype) for _ in "kv"]
        new = k.flatten(0, 1), v.flatten(0, 1)
        self.scales: list[Tensor] = []
        if scaled == "head":
            self.scales = [x.abs().amax((0, 2)).float() / 127 for x in new]
            most = [x[None, :, None] for x in self.scales]
            rounded = [(x / s).round().clamp(-127, 127) for x, s in zip(new, most, strict=True)]
            for cache, rows in zip(self.kv, rounded, strict=True):
                cache.transpose(1, 2)[slots // PAGE, slots % PAGE] = rows.to(dtype)
            given = [x.expand(batch, -1) for x in self.scales]
        else:
            if scaled:
                self.scales = [torch.ones(pages, KV_HEADS, PAGE) for _ in "kv"]
            reshape_and_cache(*new, (*self.kv,), slots, *self.scales, quantize=bool(scaled))
            given = self.scales
        self.by_head = scaled == "head"
        cu, used = torch.arange(batch + 1).int(), torch.full((batch,), keys).int()
        descale: dict[str, Any] = dict(zip(("k_descale", "v_descale"), given, strict=bool(given)))
        self.run: Callable[[], Any] = functools.partial(
            flash_varlen, q, *self.kv, cu, None, 1, keys, used, self.table, causal=True, **descale
        )

    def numbers(self) -> list[Tensor]:
        """The first sequence's keys and values (KV heads, keys, DIM) in float64."""
        found, pages = [], self.table[0].long()
        for i, x in enumerate(self.kv):
            rows = x[pages].transpose(0, 1)
            if rows.dtype == INT4:
                rows = (torch.stack([rows & 15, rows >> 4], -1).flatten(-2) ^ 8).double() - 8.0
            rows = rows.double()
            if self.by_head:
                rows = rows * self.scales[i].double()[:, None, None, None]
            elif self.scales:
                rows = rows * self.scales[i][pages].transpose(0, 1)[..., None].double()
            found.append(rows.flatten(1, 2))
        return found

    def result(self) -> Tensor:
        return self.run()[0][0]


class Onnxruntime:
    """GroupQueryAttention over a cache in `bits`, 0 for float32; the step's token is appended."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bits: int, models: Path | None, threads: int
    ) -> None:
        import onnxruntime

        batch, keys = k.shape[:2]
        self.bits, self.scales, self.caches = bits, [], []
        values: dict[str, Tensor] = {"query": q.float().flatten(1)[:, None]}
        for name, x in ("key", k.float()), ("value", v.float()):
            values[name] = x[:, -1:].flatten(2)
            rows = x.transpose(1, 2).contiguous()
            if bits:
                most = 127 if bits == 8 else 7
                self.scales.append(x.abs().amax((0, 1)) / most)
                rows = (rows / self.scales[-1][:, None]).round().clamp(-most, most)
            if bits == 8:
                rows = rows.to(INT8)
            if bits == 4:
                pairs = (rows + 8).to(torch.uint8)
                rows = pairs[..., ::2] | pairs[..., 1::2] << 4
            self.caches.append(rows)
        values |= dict(zip(("k_scale", "v_scale"), self.scales, strict=bool(bits)))
        values["seqlens_k"] = torch.full((batch,), keys - 1, dtype=torch.int32)
        values["total_length"] = torch.tensor([keys], dtype=torch.int32)
        self.out = torch.empty(batch, 1, HEADS * DIM)
        self.session = ort_peer.start(self.model(models), threads)
        self.binding = self.session.io_binding()

        def value(x: Tensor) -> Any:
            return onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy())

        for name, x in values.items():
            self.binding.bind_ortvalue_input(name, value(x))
        for name, x in zip(("key", "value"), self.caches, strict=True):
            buffer = value(x)
            self.binding.bind_ortvalue_input(f"past_{name}", buffer)
            self.binding.bind_ortvalue_output(f"present_{name}", buffer)
        self.bound = value(self.out)
        self.binding.bind_ortvalue_output("output", self.bound)

    def model(self, folder: Path | None) -> bytes:
        file = folder and folder / f"gqa_{self.bits}.onnx"
        if importlib.util.find_spec("onnx") is None and file:
            return file.read_bytes()
        made = ort_peer.model(HEADS, KV_HEADS, SCALE, "float32", self.bits)
        if file:
            file.write_bytes(made)
        return made

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def numbers(self) -> list[Tensor]:
        found = []
        for i, x in enumerate(self.caches):
            rows = x[0]
            if self.bits == 4:
                rows = torch.stack([rows & 15, rows >> 4], -1).flatten(-2).double() - 8.0
            rows = rows.double()
            found.append(rows * self.scales[i][:, None].double() if self.bits else rows)
        return found

    def result(self) -> Tensor:
        self.run()
        return torch.from_numpy(self.bound.numpy())[0].view(HEADS, DIM)


def check(name: str, q: Tensor, contender: Ours | Onnxruntime) -> None:
    """Raise AssertionError if the first sequence's result is wrong."""
    k, v = contender.numbers()
    heads = q[0].double().view(KV_HEADS, -1, DIM)
    p = torch.softmax(torch.einsum("hgd,hkd->hgk", heads, k) * SCALE, -1)
    want = torch.einsum("hgk,hkd->hgd", p, v).flatten(0, 1)
    error = (contender.result().double() - want).norm() / want.norm()
    assert error < 0.01, f"{name}: relative error {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--keys", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender")
    parser.add_argument("--models", type=Path, metavar="DIR")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    q = torch.randn(options.batch, HEADS, DIM).bfloat16()
    k, v = torch.randn(2, options.batch, options.keys, KV_HEADS, DIM).bfloat16()
    contenders: dict[str, Ours | Onnxruntime] = {
        name: Ours(q, k, v, *kind) for name, kind in OURS.items()
    }
    if importlib.util.find_spec("onnxruntime"):
        for name, bits in (("float32", 0), ("int8", 8), ("int4", 4)):
            peer = Onnxruntime(q, k, v, bits, options.models, options.threads)
            contenders[f"onnxruntime {name}"] = peer
    for name, contender in contenders.items():
        check(name, q, contender)
    samplers = {name: sampler(contender.run) for name, contender in contenders.items()}
    found = interleave(samplers, options.seconds, options.threads)
    table = Table("cache", "ms", "of bfloat16's time")
    for name, timing in found.items():
        busy = "~" if timing.busy else ""
        share = timing.seconds / found["bfloat16"].seconds
        table.add_row(name, f"{busy}{timing.seconds * 1e3:.2f}", f"{share:.2f}")
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
