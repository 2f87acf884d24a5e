"""Attention over several GPUs beside one, all in one run: accuracy first, then time.

    torchrun --nproc-per-node 2 benchmarks/gpu/distributed.py [--json OUT] [--only PART ...]

One process a GPU. Each scheme is held to the accuracy rule, with gradients, before anything is
timed. Each figure is the slowest rank's, beside one GPU's at the whole work in the same run, taking
turns; efficiency is one GPU's time over the ranks' time and their number. `links` times collectives
themselves. With `--dry-run` everything is tiny and runs on CPUs (gloo), to see that it runs.
"""

import argparse
import functools
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed_checks import (
    SCHEMES,
    DealtCache,
    bounds_of,
    check_decode,
    check_schemes,
    contenders,
    shared_keys,
)
from rank_timer import Machine
from torch import Tensor

import torch_paged_attn as tpa
from torch_paged_attn.distributed import combine, decode
from torch_paged_attn.distributed.context_parallel import (
    Shards,
    SharedKeys,
    all_gather_attention,
    exchange_of,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def example(m: Machine) -> dict[str, Any]:
    import long_context

    arguments = argparse.Namespace(tokens=512 if m.dry else 8192, steps=3)
    return {
        "examples/long_context.py": "right"
        if not long_context.run(arguments, m.device)
        else "WRONG"
    }


def links(m: Machine) -> dict[str, Any]:
    """Microseconds of a collective, ten in a graph, for so many bytes a rank."""
    found = {}
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    for size in (512 << 10, 32 << 20, 64 << 20):
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=m.device)
        one, many = torch.empty_like(x), x.new_empty(m.size * len(x))
        calls = {
            "all_to_all": functools.partial(dist.all_to_all_single, one, x),
            "all_gather": functools.partial(all_gather, many, x),
        }
        seconds = m.times({name: m.captured(call, 10) for name, call in calls.items()}, 2)
        for name, s in seconds.items():
            found[f"{name} {size >> 10} KB"] = f"{s / 10 * 1e6:.1f} us"
    return found


def prefill(m: Machine) -> dict[str, Any]:
    """One causal document of 8k tokens a GPU, 64/8 heads of 128."""
    return _prefill(m, [(64 if m.dry else 8192) * m.size], ("head_tail",), SCHEMES)


def ragged(m: Machine) -> dict[str, Any]:
    """A pack of 8k tokens a GPU, of documents up to a quarter of it."""
    total = (64 if m.dry else 8192) * m.size
    g = torch.Generator().manual_seed(1)
    lengths: list[int] = []
    while sum(lengths) < total:
        longest = min(total // 4, total - sum(lengths))
        lengths.append(int(torch.randint(min(256, longest), longest + 1, (), generator=g)))
    m.say("  documents", lengths)
    return _prefill(m, lengths, ("documents", "head_tail"), SCHEMES[:1])


def _prefill(m: Machine, lengths: list[int], cuts: tuple[str, ...], schemes: Any) -> dict[str, Any]:
    heads, kv_heads, dim = (8, 8, 16) if m.dry else (64, 8, 128)
    cu = bounds_of(lengths)
    tokens, device_cu = int(cu[-1]), cu.to(m.device)
    whole = [m.randn(tokens, h, dim, seed=i) for i, h in enumerate((heads, kv_heads, kv_heads))]
    hints = {"max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    calls: dict[str, Callable[[], Any]] = {
        "one GPU": lambda: tpa.flash_varlen(*whole, device_cu, None, **hints, causal=True)
    }
    wanted, _ = calls["one GPU"]()
    off = {}
    memory = shared_keys(m, whole[1], m.dtype)
    for cut in cuts:
        shards = Shards(cu, load_balance=cut, device=m.device)
        own = [shards.shard(x) for x in whole]
        ways: list[tuple[str, Callable[..., Any]]] = [(f"{x.__name__} {cut}", x) for x in schemes]
        if memory is not None:
            by_memory = functools.partial(all_gather_attention, memory=memory)
            ways.insert(1, (f"all_gather_attention {cut}, shared memory", by_memory))
        for name, scheme in ways:
            calls[name] = functools.partial(scheme, *own, shards, causal=True)
            found = shards.unshard(calls[name]()[0])
            off[name] = float((found.float() - wanted.float()).abs().max())
        if memory is not None:
            check_graph(m, calls[ways[1][0]])
        placement = exchange_of(shards, {"causal": True}).placement
        if placement is None or memory is None:
            continue
        calls[f"  its exchange {cut}"] = functools.partial(placement.fetch, *own[1:])
        calls[f"  ... shared memory {cut}"] = functools.partial(
            bring, memory, placement, *own[1:], heads
        )
        calls[f"  its attention {cut}"] = attention_alone(own, shards)
    seconds = m.times(calls, 5)
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    work = 4 * pairs * heads * dim
    one = seconds["one GPU"]
    found = {"one GPU": f"{one * 1e3:.3f} ms, {work / one / 1e12:.0f} TFLOP/s"}
    for name, s in list(seconds.items())[1:]:
        found[name] = f"{s * 1e3:.3f} ms"
        if name in off:
            rate = work / s / m.size / 1e12
            found[name] += (
                f", {rate:.0f} TFLOP/s a GPU, {one / s / m.size:.1%} of one GPU's, off by"
                f" {off[name]:.1e}"
            )
    return found


def bring(memory: SharedKeys, *args: Any) -> None:
    """Bring keys, and wait for them."""
    for part in memory.bring(*args):
        torch.cuda.current_stream().wait_stream(part.stream)


def check_graph(m: Machine, call: Callable[[], Any]) -> None:
    """Raise unless replays of a captured call have its bits."""
    kept: list[Tensor] = []

    def keep() -> None:
        kept[:] = call()

    keep()
    wanted = list(kept)
    replay = m.captured(keep)
    for _ in range(3):
        kept[0].zero_()
        replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, kept, wanted)), "other bits in a graph"


def attention_alone(own: list[Tensor], shards: Shards) -> Callable[[], Any]:
    """A rank's call, its keys fetched before."""
    exchange = exchange_of(shards, {"causal": True})
    assert exchange.placement is not None
    k, v = exchange.placement.fetch(*own[1:])
    start = exchange.placement.k_start
    return functools.partial(
        tpa.flash_varlen, own[0], k, v, **exchange.lengths, k_start=start, causal=True
    )


def decoding(m: Machine) -> dict[str, Any]:
    """32 sequences of 131072 keys, 32/8 heads of 128, pages of 16."""
    batch, context, heads, kv_heads = (4, 128, 8, 2) if m.dry else (32, 131072, 32, 8)
    cache = DealtCache(m, batch, context, heads, kv_heads)
    calls = {"one GPU": m.captured(cache.one)}
    alone = {}
    out, lse = tpa.flash_varlen(
        *(cache.q, *cache.own, cache.bounds, None, 1, None),
        decode.local_lengths(cache.lengths, interleave=cache.page),
        cache.own_table,
        out_dtype=torch.float32,
    )
    for name, by in contenders(m, cache):
        calls[name] = m.captured(functools.partial(cache.all, by))
        merge = combine.COMBINES.get(by, by) if isinstance(by, str) else by

        def merges(merge: Any = merge) -> None:
            for _ in range(10):
                merge(out, lse, m.ranks, m.dtype)

        alone[name] = m.captured(merges)
    seconds = m.times(calls, 3)
    each = m.times(alone, 3)
    one = seconds["one GPU"]
    found = {"one GPU": f"{one * 1e3:.3f} ms, {2 * cache.cache[0].nbytes / one / 1e9:.0f} GB/s"}
    for name in each:
        found[name] = (
            f"{seconds[name] * 1e3:.3f} ms, {one / seconds[name]:.2f}x; the combine alone"
            f" {each[name] / 10 * 1e6:.1f} us"
        )
    return found


def dispatch(m: Machine) -> dict[str, Any]:
    """Microseconds of the host for a call on DTensors, and for SDPA on them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.nn.functional import scaled_dot_product_attention

    from torch_paged_attn.distributed import sharding

    mesh = init_device_mesh(m.device.type, (m.size,))
    x = m.randn(64, 8, 64)
    bounds = torch.tensor([0, 64], dtype=torch.int32, device=m.device)
    own = distribute_tensor(x, mesh, [Shard(1)])
    lengths = distribute_tensor(bounds, mesh, [Replicate()])
    dense = x.transpose(0, 1)[None].contiguous()
    sharded = distribute_tensor(dense, mesh, [Shard(1)])
    local, dense_local = own.to_local(), sharded.to_local()
    hints = {"max_seqlen_q": 64, "max_seqlen_k": 64}
    sdpa = scaled_dot_product_attention
    calls: dict[str, Callable[[], Any]] = {
        "local": lambda: tpa.flash_varlen(local, local, local, bounds, None, **hints),
        "DTensor": lambda: tpa.flash_varlen(own, own, own, lengths, None, **hints),
        "DTensor, sharding.flash_varlen": lambda: sharding.flash_varlen(
            own, own, own, bounds, None, **hints
        ),
        "SDPA local": lambda: sdpa(dense_local, dense_local, dense_local),
        "SDPA DTensor": lambda: sdpa(sharded, sharded, sharded),
    }
    found: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            for _ in range(5):
                call()
        for _ in range(9):
            for name, call in calls.items():
                start = time.perf_counter()
                for _ in range(20):
                    call()
                found[name].append((time.perf_counter() - start) / 20)
                if not m.dry:
                    torch.cuda.synchronize()
    return {name: f"{statistics.median(s) * 1e6:.1f} us" for name, s in found.items()}


PARTS: dict[str, Callable[[Machine], dict[str, Any]]] = {
    "example": example,
    "schemes": check_schemes,
    "decode": check_decode,
    "prefill": prefill,
    "ragged": ragged,
    "decoding": decoding,
    "links": links,
    "dispatch": dispatch,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    m = Machine(arguments.dry_run)
    name = "CPU" if m.dry else torch.cuda.get_device_name()
    results: dict[str, Any] = {"machine": f"{m.size} x {name}", "torch": torch.__version__}
    m.say(results)
    failed = False
    for part in arguments.only:
        start = time.perf_counter()
        try:
            found = PARTS[part](m)
        except Exception:
            found = {"FAILED": traceback.format_exc()[-1500:]}
            failed = True
            print(f"rank {m.rank}, {part}:", found["FAILED"], flush=True)
        failed |= any(str(x).startswith("WRONG") for x in found.values())
        results[part] = found
        m.say(f"{part} ({time.perf_counter() - start:.0f} s)")
        for key, x in found.items():
            m.say(f"  {key}: {x}")
        if not m.dry:
            m.graphs = []
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        if arguments.json and m.rank == 0:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    dist.destroy_process_group()
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
