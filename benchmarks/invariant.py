"""What `batch_invariant` costs on a GPU: speed as a fraction of the default mode's, as JSON.

    python benchmarks/invariant.py > benchmarks/results/cuda/invariant.json

bfloat16, 32 query heads and 8 KV heads of 128; prompts are packed and causal, decodes read pages of
16 tokens. Launches are captured in CUDA graphs, over as many copies of the cache as the chip's own
cache does not hold, and the modes take turns in random order. `portable` is the kernel that other
GPUs run, with `batch_invariant`.
"""

import itertools
import json
import random
import statistics
from collections.abc import Callable
from datetime import date

import torch
import triton

import torch_paged_attn
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.forward.plan import plan_attention

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 32, 8, 128, 16
PREFILLS = ((1, 16384), (4, 4096), (16, 1024))
DECODES = tuple((batch, keys) for keys in (4096, 32768) for batch in (1, 8, 32))
# bytes of keys and values that a graph reads at least, the most copies, and turns of each mode
COLD, MOST_COPIES, TURNS = 200 * 2**20, 8, 15


def random_tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def bounds(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], device="cuda", dtype=torch.int32)


def prefill(batch: int, tokens: int) -> list[dict]:
    """The arguments of calls that a graph captures."""
    total = batch * tokens
    q = random_tensor(total, HEADS, HEAD_DIM)
    k, v = random_tensor(2, total, KV_HEADS, HEAD_DIM)
    lengths = bounds([tokens] * batch)
    said = {"max_seqlen_q": tokens, "max_seqlen_k": tokens, "causal": True}
    return [{"q": q, "k": k, "v": v, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths, **said}]


def decode(batch: int, keys: int) -> list[dict]:
    pages = batch * keys // PAGE_SIZE
    num_bytes = 4 * batch * keys * KV_HEADS * HEAD_DIM
    calls = []
    for _ in range(min(-(-COLD // num_bytes), MOST_COPIES)):
        k, v = random_tensor(2, pages, PAGE_SIZE, KV_HEADS, HEAD_DIM).transpose(2, 3)
        table = torch.randperm(pages, device="cuda").int().view(batch, -1)
        used = torch.full((batch,), keys, device="cuda", dtype=torch.int32)
        said = {"max_seqlen_q": 1, "max_seqlen_k": keys, "causal": True}
        given = {"q": random_tensor(batch, HEADS, HEAD_DIM), "k": k, "v": v, "seqused_k": used}
        calls.append({**given, "cu_seqlens_q": bounds([1] * batch), "block_table": table, **said})
    return calls


def captured(calls: list[dict], run: Callable[[dict], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run(calls[0])
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):
            for given in calls:
                run(given)
    return graph


def portable(given: dict) -> object:
    call = AttentionCall.flash_varlen(**given, batch_invariant=True)
    tensors = tuple(call.given_tensors().values())
    return plan_attention(call)(tensors, [x.data_ptr() for x in tensors])


MODES: dict[str, Callable[[dict], object]] = {
    "default": lambda given: torch_paged_attn.flash_varlen(**given),
    "batch_invariant": lambda given: torch_paged_attn.flash_varlen(**given, batch_invariant=True),
    "portable": portable,
}


def microseconds(calls: list[dict]) -> dict[str, float]:
    """The median time of a call in each mode."""
    graphs = {mode: captured(calls, run) for mode, run in MODES.items()}
    found: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(TURNS):
        for mode in random.sample(list(MODES), len(MODES)):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            graphs[mode].replay()  # the clock and caches are this mode's
            before.record()
            graphs[mode].replay()
            after.record()
            after.synchronize()
            found[mode].append(before.elapsed_time(after) * 1e3 / (2 * len(calls)))
    return {mode: round(statistics.median(times), 2) for mode, times in found.items()}


def main() -> None:
    torch.manual_seed(0)
    random.seed(0)
    rows = []
    for kind, make, sizes in (("prefill", prefill, PREFILLS), ("decode", decode, DECODES)):
        for batch, tokens in sizes:
            problem = f"{kind} {batch} x {tokens:,}"
            figures = microseconds(make(batch, tokens))
            rows.append({"problem": problem, "unit": "us", "figures": figures})
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    machine = {"gpu": torch.cuda.get_device_name(), **versions, "date": str(date.today())}
    print(json.dumps({"machine": machine, "parts": {"batch_invariant": rows}}, indent=1))


if __name__ == "__main__":
    main()
