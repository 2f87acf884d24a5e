"""What a call costs on the host, in microseconds, beside FlashAttention-3.

    python benchmarks/gpu/host.py [--fa3 _vllm_fa3_C.abi3.so [--wrapper fa3_peer.py]] [--json OUT]
        [--rows WORD ...]

Medians over runs of calls; the GPU ends its work in between. The contenders of a row take turns,
because a host is not equally fast all the time. Every row is timed in each of MODES, and no tensor
requires a gradient. `FA3` gets its scheduler's metadata made beforehand, `FA3 alone` makes them
itself. `step` rows are 32 layers, each with caches of its own: of a size that no call had before
(the first layer plans, FA3's metadata are made once), and of the same size again; in one of them
ours write the step's keys and values, too, and FA3 attends alone.
Results are compared with a formula first.
"""

import argparse
import functools
import itertools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention import DEVICE, paged, relative_error
from formula import formula

from torch_paged_attn import blocksparse, flash_varlen, merge_states, reshape_and_cache
from torch_paged_attn.integrations.flash_attn import flash_attn_with_kvcache
from torch_paged_attn.layouts import local_strided

MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
}
CALLS = 40
RUNS = 15
# until the host's clock has risen
WARMUP_SECONDS = 0.1

LAYERS = 32
STEPS = 12

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
BF16 = torch.bfloat16

Calls = dict[str, Callable[[], Any]]
Row = dict[str, Any]


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=BF16)


def bounds(count: int, length: int = 1) -> torch.Tensor:
    return torch.arange(0, count * length + 1, length, device=DEVICE, dtype=torch.int32)


def microseconds(call: Callable[[], Any], number: int = CALLS) -> float:
    """Until a call returns, the mean of some."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(number):
        call()
    spent = time.perf_counter() - start
    torch.cuda.synchronize()
    return spent / number * 1e6


def medians(samples: dict[str, Callable[[], float]], runs: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(runs):
        for name, sample in samples.items():
            times[name].append(sample())
    return {name: statistics.median(values) for name, values in times.items()}


def measure_calls(calls: Calls) -> Row:
    """Each contender in each mode: `name (mode)`."""
    figures = {}
    for mode, entered in MODES.items():
        with entered():
            end = time.perf_counter() + WARMUP_SECONDS
            while time.perf_counter() < end:
                for call in calls.values():
                    call()
            samples = {n: functools.partial(microseconds, call) for n, call in calls.items()}
            found = medians(samples, RUNS)
        figures |= {f"{name} ({mode})": value for name, value in found.items()}
    return {"unit": "us", "figures": figures}


def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    error = relative_error(got, want)
    assert error < 0.01, f"{name}: relative error {error}"


def metadata(fa3: Any, batch: int, max_q: int, max_k: int, used: Any, cu: Any, page: Any) -> Any:
    """What FA3's scheduler wants to know beforehand."""
    sizes = batch, max_q, max_k, HEADS, KV_HEADS, DIM
    return fa3.metadata(*sizes, used, BF16, cu_q=cu, page_size=page, causal=True)


class DecodeBatch:
    """One query a sequence over `context` keys in pages."""

    def __init__(self, batch: int, context: int) -> None:
        self.k, self.v, self.table, self.used = paged((context,) * batch, PAGE, KV_HEADS, DIM, BF16)
        self.q, self.cu = randn(batch, HEADS, DIM), bounds(batch)
        self.context = context

    def part(self, batch: int) -> tuple[torch.Tensor, ...]:
        return self.q[:batch], self.cu[: batch + 1], self.table[:batch], self.used[:batch]

    def ours(self, k=None, v=None, part=None) -> torch.Tensor:
        q, cu, table, used = part or (self.q, self.cu, self.table, self.used)
        k, v = (self.k, self.v) if k is None else (k, v)
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        return flash_varlen(
            q, k, v, cu, None, 1, self.context, seqused_k=used, block_table=table, causal=True
        )[0]

    def fa3(self, fa3: Any, made: Any, k=None, v=None, part=None) -> torch.Tensor:
        q, cu, table, used = part or (self.q, self.cu, self.table, self.used)
        k, v = (self.k, self.v) if k is None else (k, v)
        return fa3.fwd(
            q, k, v, cu_q=cu, seqused_k=used, max_q=1, max_k=self.context, page_table=table,
            causal=True, meta=made,
        )[0]  # fmt: skip

    def metadata(self, fa3: Any, part=None) -> Any:
        _, cu, _, used = part or (self.q, self.cu, self.table, self.used)
        return metadata(fa3, used.shape[0], 1, self.context, used, cu, PAGE)

    def want(self) -> torch.Tensor:
        """The formula's result for the first sequence."""
        row = self.table[0].long()
        k, v = (x[row].flatten(0, 1)[: self.context] for x in (self.k, self.v))
        return formula(self.q[:1], k, v)


def decode_calls(batch: int, context: int, fa3: Any) -> Calls:
    b = DecodeBatch(batch, context)
    k, v = b.k.transpose(1, 2), b.v.transpose(1, 2)
    lengths = {"seqused_k": b.used, "block_table": b.table, "causal": True}
    calls: Calls = {"ours": lambda: flash_varlen(b.q, k, v, b.cu, None, 1, context, **lengths)[0]}
    if fa3:
        made = b.metadata(fa3)
        calls["FA3"] = lambda: b.fa3(fa3, made)
        calls["FA3 alone"] = lambda: b.fa3(fa3, None)
    for name, call in calls.items():
        expect(name, call()[:1], b.want())
    return calls


def prefill_calls(batch: int, length: int, fa3: Any) -> Calls:
    q, cu = randn(batch * length, HEADS, DIM), bounds(batch, length)
    k, v = (randn(batch * length, KV_HEADS, DIM) for _ in range(2))
    calls: Calls = {"ours": lambda: flash_varlen(q, k, v, cu, None, length, length, causal=True)[0]}
    if fa3:
        made = metadata(fa3, batch, length, length, cu.diff(), cu, None)
        lengths = {"cu_q": cu, "cu_k": cu, "max_q": length, "max_k": length, "causal": True}
        calls["FA3"] = lambda: fa3.fwd(q, k, v, **lengths, meta=made)[0]
        calls["FA3 alone"] = lambda: fa3.fwd(q, k, v, **lengths)[0]
    want = formula(q[:length], k[:length], v[:length])
    for name, call in calls.items():
        expect(name, call()[:length], want)
    return calls


def write_calls(tokens: int) -> Calls:
    key, value = randn(tokens, KV_HEADS, DIM), randn(tokens, KV_HEADS, DIM)
    cache = torch.zeros(2, 1024, PAGE, KV_HEADS, DIM, device=DEVICE, dtype=BF16).transpose(2, 3)
    slots = torch.randperm(1024 * PAGE, device=DEVICE)[:tokens]
    calls: Calls = {
        "ours": lambda: reshape_and_cache(key, value, cache, slots),
        "ours, a pair": lambda pair=tuple(cache): reshape_and_cache(key, value, pair, slots),
    }
    for name, call in calls.items():
        cache.zero_()
        call()
        for half, new in zip(cache, (key, value), strict=True):
            expect(name, half.transpose(1, 2).flatten(0, 1)[slots], new)
    return calls


def kvcache_calls(batch: int, context: int) -> Calls:
    """A decode step's call in flash-attn's words: with and without new tokens, ragged, and with a
    rotary embedding; and the calls of ours that it stands for.
    """
    b = DecodeBatch(batch, context)
    new = [randn(batch, 1, KV_HEADS, DIM) for _ in range(2)]
    q, before = b.q[:, None], b.used - 1
    slots = (b.table[:, -1].long() * PAGE) + before.long() % PAGE
    pair = b.k.transpose(1, 2), b.v.transpose(1, 2)
    rows = [x[:, 0] for x in new]
    # an angle of 0: nothing turns, so that results are those without it
    still = [torch.full((context, DIM // 2), x, device=DEVICE, dtype=BF16) for x in (1.0, 0.0)]
    options = {"block_table": b.table, "causal": True}
    ragged = {"cu_seqlens_q": b.cu, "max_seqlen_q": 1, "cache_seqlens": b.used, **options}
    calls: Calls = {
        "with_kvcache": lambda: flash_attn_with_kvcache(
            q, b.k, b.v, *new, cache_seqlens=before, **options
        ),
        "with_kvcache, ragged": lambda: flash_attn_with_kvcache(
            b.q, b.k, b.v, *rows, cu_seqlens_k_new=b.cu, **ragged | {"cache_seqlens": before}
        ),
        "with_kvcache, rotary": lambda: flash_attn_with_kvcache(
            q, b.k, b.v, *new, *still, cache_seqlens=before, **options
        ),
        "no new tokens": lambda: flash_attn_with_kvcache(
            q, b.k, b.v, cache_seqlens=b.used, **options
        ),
        "no new tokens, ragged": lambda: flash_attn_with_kvcache(b.q, b.k, b.v, **ragged),
        "our write": lambda: reshape_and_cache(*rows, pair, slots),
        "our decode": lambda: flash_varlen(
            b.q, *pair, b.cu, None, 1, context, seqused_k=b.used, block_table=b.table, causal=True
        )[0],
    }
    for name, call in calls.items():
        if name != "our write":
            expect(name, call().flatten(0, -3)[:1], b.want())
    return calls


def merge_calls(tokens: int) -> Calls:
    outs = [randn(tokens, HEADS, DIM) for _ in range(2)]
    lses = torch.randn(2, HEADS, tokens, device=DEVICE)
    weights = lses.softmax(0).transpose(1, 2)[..., None]
    states = outs[0], lses[0], outs[1], lses[1]
    expect("merge", merge_states(*states)[0], weights[0] * outs[0] + weights[1] * outs[1])
    return {"ours": lambda: merge_states(*states)}


def blocksparse_calls(length: int) -> Calls:
    q, cu = randn(length, HEADS, DIM), bounds(1, length)
    k, v = (randn(length, KV_HEADS, DIM) for _ in range(2))
    layout = local_strided(HEADS, length, 64, 16, 8, device=DEVICE).arguments()
    columns = layout.pop("crow_indices"), layout.pop("col_indices")
    call = functools.partial(blocksparse, q, k, v, *columns, cu, None, length, length, **layout)
    # queries of the first block see no block but their own
    expect("blocksparse", call()[0][:64], formula(q[:64], k[:64], v[:64]))
    return {"ours": call}


def measure_steps(step: Callable[[int, bool], Calls], sizes: Any) -> Row:
    """`step(size)` makes a step's calls; each size is new to all of them."""
    figures = {}
    for mode, entered in MODES.items():
        new: dict[str, list[float]] = {}
        again: dict[str, list[float]] = {}
        with entered():
            for number, size in enumerate(itertools.islice(sizes, STEPS)):
                for name, call in step(size).items():
                    first = microseconds(call, 1)
                    second = microseconds(call, 1)
                    if number > 1:  # kernels are compiled, and the clock has risen
                        new.setdefault(name, []).append(first)
                        again.setdefault(name, []).append(second)
        figures |= {f"{n}, new ({mode})": statistics.median(t) for n, t in new.items()}
        figures |= {f"{n}, again ({mode})": statistics.median(t) for n, t in again.items()}
    return {"unit": "us", "figures": figures}


def decode_steps(most: int, writes: bool, fa3: Any) -> Row:
    """Of up to `most` sequences: of as many pages no other row has had a call."""
    b = DecodeBatch(most, 256)
    layers = [(torch.randn_like(b.k), torch.randn_like(b.v)) for _ in range(LAYERS)]
    new, slots = [randn(most, KV_HEADS, DIM) for _ in range(2)], b.table[:, -1].long() * PAGE

    def step(batch: int) -> Calls:
        part = b.part(batch)
        key, value, where = new[0][:batch], new[1][:batch], slots[:batch]

        def ours() -> None:
            for k, v in layers:
                if writes:
                    pair = k.transpose(1, 2), v.transpose(1, 2)
                    reshape_and_cache(key, value, pair, where)
                b.ours(k, v, part)

        def theirs() -> None:
            made = b.metadata(fa3, part)
            for k, v in layers:
                b.fa3(fa3, made, k, v, part)

        return {"ours": ours, "FA3": theirs} if fa3 else {"ours": ours}

    return measure_steps(step, iter(range(70, 128)))


def prefill_steps(fa3: Any) -> Row:
    most = 2048
    q = randn(most, HEADS, DIM)
    layers = [(randn(most, KV_HEADS, DIM), randn(most, KV_HEADS, DIM)) for _ in range(LAYERS)]

    def step(tokens: int) -> Calls:
        cu = torch.tensor([0, tokens // 3, tokens], device=DEVICE, dtype=torch.int32)
        part = q[:tokens]
        kv = [(k[:tokens], v[:tokens]) for k, v in layers]

        def ours() -> None:
            for k, v in kv:
                flash_varlen(part, k, v, cu, None, tokens, tokens, causal=True)

        def theirs() -> None:
            made = metadata(fa3, 2, tokens, tokens, cu.diff(), cu, None)
            for k, v in kv:
                fa3.fwd(
                    part, k, v, cu_q=cu, cu_k=cu, max_q=tokens, max_k=tokens, causal=True, meta=made
                )

        return {"ours": ours, "FA3": theirs} if fa3 else {"ours": ours}

    return measure_steps(step, iter(range(1500, 2048, 7)))


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], Row]]:
    fa3 = peers.get("FA3")
    rows: dict[str, Callable[[], Calls]] = {}
    for batch, context in ((1, 1024), (8, 1024), (64, 1024)):
        name = f"decode b{batch} ctx{context} {HEADS}/{KV_HEADS} p{PAGE}"
        rows[name] = functools.partial(decode_calls, batch, context, fa3)
    for batch, length in ((4, 512), (1, 2048)):
        name = f"prefill {batch}x{length} {HEADS}/{KV_HEADS} d{DIM} causal"
        rows[name] = functools.partial(prefill_calls, batch, length, fa3)
    for tokens in (8, 4096):
        name = f"reshape_and_cache {tokens}x{KV_HEADS}x{DIM}"
        rows[name] = functools.partial(write_calls, tokens)
    rows["flash_attn_with_kvcache b8 ctx1024"] = functools.partial(kvcache_calls, 8, 1024)
    rows[f"merge_states 64x{HEADS}x{DIM}"] = functools.partial(merge_calls, 64)
    rows["blocksparse 1x2048 block 64"] = functools.partial(blocksparse_calls, 2048)
    measured = {
        name: functools.partial(lambda make: measure_calls(make()), make)
        for name, make in rows.items()
    }
    steps = functools.partial(decode_steps, fa3=fa3)
    measured[f"step decode {LAYERS} layers"] = functools.partial(steps, 128, False)
    measured[f"step decode and write {LAYERS} layers"] = functools.partial(steps, 136, True)
    measured[f"step prefill {LAYERS} layers"] = functools.partial(prefill_steps, fa3)
    return measured


def show(name: str, figures: dict[str, float]) -> None:
    print(name)
    for contender in dict.fromkeys(key.rpartition(" (")[0] for key in figures):
        times = "".join(f"{figures[f'{contender} ({mode})']:12.1f}" for mode in MODES)
        print(f"    {contender:20}{times}", flush=True)


def main() -> None:
    from run import describe_machine, git_commit, load

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fa3", type=Path, metavar="SO", help="its library")
    parser.add_argument("--wrapper", type=Path, metavar="PY", help="else fa3_peer.py beside it")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results")
    parser.add_argument("--rows", nargs="+", default=[""], metavar="WORD", help="that names have")
    options = parser.parse_args()
    torch.manual_seed(0)
    peers = {}
    if options.fa3:
        peers["FA3"] = load(options.wrapper or options.fa3.with_name("fa3_peer.py"))
        peers["FA3"].load(str(options.fa3))
    rows: dict[str, Any] = {}
    document = {"machine": describe_machine(git_commit()), "rows": rows}
    print(document["machine"], " " * 24 + "".join(f"{mode:>12}" for mode in MODES), sep="\n")
    failed = False
    for name, measure in problems(peers).items():
        if not any(word in name for word in options.rows):
            continue
        try:
            rows[name] = measure()["figures"]
        except Exception as error:  # the other rows have their figures all the same
            traceback.print_exc()
            rows[name], failed = {"refused": f"{type(error).__name__}: {error}"}, True
        else:
            show(name, rows[name])
        if options.json:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(document, indent=1) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
