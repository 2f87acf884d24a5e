"""What a call costs on the host, beside FlashAttention-3's: microseconds in inference mode.

Medians over runs of calls that the GPU is given time to finish in between; those of a row take
turns, because a host is not equally fast all the time. `call` is the public function for a call
like one before, `operator` the way through the dispatcher, `first` one of a description never seen
whose kernels are compiled.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, Decode, Prefill, decode_calls, paged, prefill_calls

import torch_paged_attn
from torch_paged_attn.backends.triton.runtime import recipes
from torch_paged_attn.layouts import local_strided

CALLS = 200
RUNS = 25
# until the host's clock has risen
WARMUP_SECONDS = 0.2


def host_time(call: Callable, before: Callable | None = None) -> float:
    """Microseconds until a call returns, the mean of some."""
    number = CALLS if before is None else 10
    torch.cuda.synchronize()
    spent = 0.0
    for _ in range(number):
        if before is not None:
            before()
        start = time.perf_counter()
        call()
        spent += time.perf_counter() - start
    return spent / number * 1e6


def ways(op: str, *args, **options) -> dict[str, Callable]:
    """The same call by the public function and through the dispatcher."""
    operator = getattr(torch.ops.paged_attn, op).default
    return {
        "call": functools.partial(getattr(torch_paged_attn, op), *args, **options),
        "operator": functools.partial(operator, *args, **options),
    }


def decode_inputs(batch: int, context: int) -> tuple[torch.Tensor, ...]:
    k, v, table, used = paged((context,) * batch, 16, 8, 128, torch.bfloat16)
    q = torch.randn(batch, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32)
    return q, k.transpose(1, 2), v.transpose(1, 2), cu, None, 1, context, used, table


def prefill_inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch * length, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch * length, 8, 128, device=DEVICE, dtype=q.dtype)
    cu = torch.arange(0, batch * length + 1, length, device=DEVICE, dtype=torch.int32)
    return q, k, v, cu, None, length, length


def write_inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    new = torch.randn(2, tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    cache = torch.zeros(2, 1024, 16, 8, 128, device=DEVICE, dtype=new.dtype).transpose(2, 3)
    return *new, cache, torch.randperm(1024 * 16, device=DEVICE)[:tokens]


def merge_inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    out = torch.randn(2, tokens, 32, 128, device=DEVICE, dtype=torch.bfloat16)
    lse = torch.randn(2, 32, tokens, device=DEVICE)
    return out[0], lse[0], out[1], lse[1]


def blocksparse_ways(length: int) -> dict[str, Callable]:
    q, k, v, *rest = prefill_inputs(1, length)
    layout = local_strided(32, length, 64, 16, 8, device=DEVICE).arguments()
    columns = layout.pop("crow_indices"), layout.pop("col_indices")
    return ways("blocksparse", q, k, v, *columns, *rest, **layout)


@torch.inference_mode()
def measure(calls: dict[str, Callable]) -> dict[str, Any]:
    samples = {name: functools.partial(host_time, call) for name, call in calls.items()}
    samples["first"] = functools.partial(host_time, calls["call"], recipes.forget)
    end = time.perf_counter() + WARMUP_SECONDS
    while time.perf_counter() < end:
        samples["call"]()
    times: dict[str, list[float]] = {name: [] for name in samples}
    for _ in range(RUNS):
        for name, sample in samples.items():
            sample()  # the call before was another one
            times[name].append(sample())
    return {"unit": "us", "figures": {name: statistics.median(t) for name, t in times.items()}}


@torch.inference_mode()
def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    fa3 = peers.get("FA3")
    rows: dict[str, dict[str, Callable]] = {}
    for d in (Decode((1024,), 32, 8), Decode((4096,) * 64, 32, 8)):
        inputs = decode_inputs(len(d.contexts), d.contexts[0])
        rows[str(d)] = ways("flash_varlen", *inputs, causal=True)
        if fa3:
            rows[str(d)]["FA3"] = decode_calls(d, fa3)[0]["FA3"]
    for p in (Prefill((512,) * 4, 32, 8, 128), Prefill((4096,), 32, 8, 128)):
        inputs = prefill_inputs(len(p.lengths), p.lengths[0])
        rows[str(p)] = ways("flash_varlen", *inputs, causal=True)
        if fa3:
            rows[str(p)]["FA3"] = prefill_calls(p, fa3)[0]["FA3"]
    for tokens in (8, 4096):
        rows[f"reshape_and_cache {tokens}x8x128"] = ways("reshape_and_cache", *write_inputs(tokens))
    rows["merge_states 64x32x128"] = ways("merge_states", *merge_inputs(64))
    rows["blocksparse 1x2048 block 64"] = blocksparse_ways(2048)
    # other problems' recipes are not looked through
    recipes.forget()
    return {name: functools.partial(measure, calls) for name, calls in rows.items()}
