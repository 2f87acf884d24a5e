"""What a call costs on the host, beside FlashAttention-3's: microseconds in inference mode.

    python benchmarks/gpu/host.py [--fa3 LIBRARY] [--json OUT]

Medians over runs of calls that the GPU is given time to finish in between. `call` is the public
function for a call like one before, `operator` the way through the dispatcher, `first` one of a
description never seen whose kernels are compiled.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from attention import DEVICE, Decode, Prefill, decode_calls, load_fa3, paged, prefill_calls, show

import torch_paged_attn
from torch_paged_attn.backends.triton import recipes
from torch_paged_attn.layouts import local_strided

CALLS = 200
RUNS = 9

OPS = torch.ops.paged_attn


def host_time(run: Callable, before: Callable | None = None) -> float:
    """Microseconds until a call returns."""
    samples = []
    for _ in range(RUNS + 1):
        torch.cuda.synchronize()
        spent = 0.0
        for _ in range(CALLS if before is None else 10):
            if before is not None:
                before()
            start = time.perf_counter()
            run()
            spent += time.perf_counter() - start
        samples.append(spent / (CALLS if before is None else 10) * 1e6)
    return statistics.median(samples[1:])


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


def blocksparse_call(length: int, function: Callable) -> Callable:
    q, k, v, cu, _, *hints = prefill_inputs(1, length)
    layout = local_strided(32, length, 64, 16, 8, device=DEVICE).arguments()
    columns = layout.pop("crow_indices"), layout.pop("col_indices")
    return functools.partial(function, q, k, v, *columns, cu, None, *hints, **layout)


def calls(fa3) -> dict[str, dict[str, Callable]]:
    rows: dict[str, dict[str, Callable]] = {}
    for decode in (Decode((1024,), 32, 8), Decode((4096,) * 64, 32, 8)):
        args = decode_inputs(len(decode.contexts), decode.contexts[0])
        rows[str(decode)] = {
            "call": functools.partial(torch_paged_attn.flash_varlen, *args, causal=True),
            "operator": functools.partial(OPS.flash_varlen.default, *args, causal=True),
        }
        if fa3:
            rows[str(decode)]["FA3"] = decode_calls(decode, fa3)[0]["FA3"]
    for prefill in (Prefill((512,) * 4, 32, 8, 128), Prefill((4096,), 32, 8, 128)):
        args = prefill_inputs(len(prefill.lengths), prefill.lengths[0])
        rows[str(prefill)] = {
            "call": functools.partial(torch_paged_attn.flash_varlen, *args, causal=True),
            "operator": functools.partial(OPS.flash_varlen.default, *args, causal=True),
        }
        if fa3:
            rows[str(prefill)]["FA3"] = prefill_calls(prefill, fa3)[0]["FA3"]
    for tokens in (8, 4096):
        args = write_inputs(tokens)
        rows[f"reshape_and_cache {tokens}x8x128"] = {
            "call": functools.partial(torch_paged_attn.reshape_and_cache, *args),
            "operator": functools.partial(OPS.reshape_and_cache.default, *args),
        }
    args = merge_inputs(64)
    rows["merge_states 64x32x128"] = {
        "call": functools.partial(torch_paged_attn.merge_states, *args),
        "operator": functools.partial(OPS.merge_states.default, *args),
    }
    rows["blocksparse 1x2048 block 64"] = {
        "call": blocksparse_call(2048, torch_paged_attn.blocksparse),
        "operator": blocksparse_call(2048, OPS.blocksparse.default),
    }
    return rows


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fa3", metavar="SO", help="FA3's library, fa3_peer.py beside it")
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    torch.manual_seed(0)
    results = {}
    for name, functions in calls(load_fa3(options.fa3)).items():
        row = {kind: host_time(function) for kind, function in functions.items()}
        row["first"] = host_time(functions["call"], recipes.forget)
        results[f"host time, us: {name}"] = row
        show(name, "us", row)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
