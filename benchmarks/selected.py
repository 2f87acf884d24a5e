"""Time attention to selected keys beside dense decode, on the CPU.

    python benchmarks/selected.py                      every case, on one thread
    python benchmarks/selected.py --cases 'mla*' --threads 2 --seconds 5

Dense decode reads as many keys of the same cache, which lie one behind the other in their pages.
*Gather* is `torch.index_select` of the selected rows and a sum, *gather + SDPA* attends to these
rows. Of latents, *vLLM dense* is vLLM's `mla_decode_kvcache` over as many keys (`get_peers.sh`);
its kernels for selected latents, `flash_mla_with_kvcache_cpu` and `topk_transform_512_cpu`, are in
its library for AVX-512 alone. Contenders take turns (see measure.py); a case whose first token is
not accurate is not timed.
"""

import argparse
import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Any

import torch
import vllm_peer
from measure import interleave, sampler
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention

import torch_paged_attn
from torch_paged_attn.testing import Call, Problem, assert_accurate, build
from torch_paged_attn.testing.problem import Selected

BF16 = torch.bfloat16
BATCH, CONTEXT = 8, 16384

MLA: dict[str, Any] = {
    **{"num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "cache_layout": "mla"},
    **{"page_size": 64, "softmax_scale": 192**-0.5},
}
GQA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16}
M3: dict[str, Any] = {"num_heads": 64, "num_kv_heads": 4, "head_dim": 128, "page_size": 128}


def case(name: str, units: int, size: int, heads: str, **options: Any) -> Problem:
    """Decode of BATCH sequences of CONTEXT keys in pages in random order."""
    selected = Selected(units, size, heads)
    seqs = ((1, CONTEXT - 1),) * BATCH
    return Problem(name, seqs, dtype=BF16, selected=selected, **options)


CASES = {
    p.name: p
    for p in (
        case("mla_8_heads/2048x1", 2048, 1, "one", num_heads=8, **MLA),
        case("mla_16_heads/2048x1", 2048, 1, "one", num_heads=16, **MLA),
        case("mla_128_heads/2048x1", 2048, 1, "one", num_heads=128, **MLA),
        case("gqa_shared/2048x1", 2048, 1, "one", cache_layout="nhd", **GQA),
        case("gqa_shared/128x16", 128, 16, "one", **GQA),
        case("gqa/2048x1", 2048, 1, "kv", **GQA),
        case("gqa/128x16", 128, 16, "kv", **GQA),
        case("gqa/16x128", 16, 128, "kv", **GQA | {"page_size": 128}),
        case("minimax_m3/16x128", 16, 128, "kv", **M3),
    )
}


@dataclasses.dataclass(frozen=True)
class Contenders:
    """What takes turns, and the bytes of keys and values that each of them reads."""

    runs: dict[str, Callable[[], Any]]
    num_bytes: int


def contenders(problem: Problem, call: Call) -> Contenders:
    args, selected = call.args, problem.selected
    assert selected is not None
    q, k, v = args["q"], args["k"], args["v"]
    keys = int(selected.units) * selected.size
    lengths = torch.full((BATCH,), keys, dtype=torch.int32)
    dense = {name: args[name] for name in ("q", "k", "v", "cu_seqlens_q", "block_table")}
    dense |= {"causal": True, "seqused_k": lengths, "softmax_scale": args["softmax_scale"]}
    rows, row_bytes = gathered_rows(problem, call), k.shape[-1] * k.itemsize
    stores = [rows_of(k)] if v.data_ptr() == k.data_ptr() else [rows_of(k), rows_of(v)]
    group = problem.num_heads // problem.num_kv_heads

    def gather() -> list[torch.Tensor]:
        found = [x.index_select(0, rows) for x in stores]
        return [x.view(BATCH, problem.num_kv_heads, keys, -1) for x in found]

    def gather_and_attend() -> torch.Tensor:
        found = gather()
        folded = q.view(BATCH, problem.num_kv_heads, group, -1)
        values = found[-1][..., : v.shape[-1]]
        return scaled_dot_product_attention(folded, found[0], values, scale=args["softmax_scale"])

    runs = {
        "selected": call.run,
        "dense": lambda: torch_paged_attn.flash_varlen(**dense),
        "gather": lambda: [x.sum() for x in gather()],
        "gather + SDPA": gather_and_attend,
    }
    if k.shape[-1] == 576 and vllm_peer.missing_latents() is None:
        runs["vLLM dense"] = vllm_peer.latent_decode(
            q, BATCH, keys, args["softmax_scale"], k.shape[-1], v.shape[-1]
        )
    return Contenders(runs, rows.numel() * row_bytes * len(stores))


def rows_of(cache: torch.Tensor) -> torch.Tensor:
    """A matrix whose rows are those of single keys under single heads, whatever the layout."""
    return cache.new_empty(0).set_(cache.untyped_storage()).view(-1, cache.shape[-1])


def gathered_rows(problem: Problem, call: Call) -> torch.Tensor:
    """The selected rows of the cache, all sequences and KV heads one behind the other."""
    args, selected = call.args, problem.selected
    assert selected is not None
    k, units = args["k"], args["key_indices"].long()
    keys = (units[..., None] * selected.size + torch.arange(selected.size)).flatten(-2)
    keys = keys.expand(-1, problem.num_kv_heads, -1)
    page = args["block_table"].long().gather(1, (keys // k.shape[2]).flatten(1)).view_as(keys)
    head = torch.arange(problem.num_kv_heads)[:, None]
    place = page * k.stride(0) + head * k.stride(1) + keys % k.shape[2] * k.stride(2)
    return (place // k.shape[-1]).flatten()


def check(call: Call) -> None:
    """Raise AssertionError unless the first sequence's result is accurate."""
    first = call.alone(0)
    assert_accurate(*first.run(), first.truth())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="*", help="a pattern of names")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each contender")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    contestants = "selected", "dense", "gather", "gather + SDPA", "vLLM dense"
    table = Table("case", "selected, ms", "GB/s", *contestants[1:], "of dense")
    for name in fnmatch.filter(CASES, options.cases):
        call = build(CASES[name])
        check(call)
        racing = contenders(CASES[name], call)
        samplers = {who: sampler(run) for who, run in racing.runs.items()}
        found = interleave(samplers, options.seconds, options.threads)
        seconds = {who: timing.seconds for who, timing in found.items()}
        rates = {who: racing.num_bytes / x / 1e9 for who, x in seconds.items()}
        others = (f"{rates[who]:.2f}" if who in rates else "" for who in contestants)
        ratio = f"{seconds['dense'] / seconds['selected']:.2f}"
        busy = "~" if found["selected"].busy else ""
        table.add_row(name, f"{busy}{seconds['selected'] * 1e3:.2f}", *others, ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
