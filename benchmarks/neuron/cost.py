"""What the Neuron kernels cost, counted on the emulator and not measured: nothing here has run on
hardware.

`python benchmarks/neuron/cost.py [--generation 3]` runs Llama-3-8B's shapes and counts instructions
by engine, bytes by DMA, how long DMAs' descriptors are, and the peaks of the memories; beside them
stands what the same calls cost in the design of vLLM's paged NKI kernel, by arithmetic.
"""

import argparse
import collections
import dataclasses
import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["PAGED_ATTN_NEURON_EMULATE"] = "1"  # before the backend is imported
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # the emulator

import torch
from nki_emulator import emulated

from torch_paged_attn.backends.neuron import BACKEND
from torch_paged_attn.testing import Layout, Problem, build

LONG = 512  # bytes of a descriptor from which a DMA is efficient
P = 128

LLAMA = Problem("llama3_8b", (), 32, 8, 128, dtype=torch.bfloat16, page_size=16, cache_layout="hnd")
CASES = tuple(
    dataclasses.replace(LLAMA, name=f"llama3_8b/{name}", **options)
    for name, options in (
        ("prefill_1024", {"seqs": ((1024, 0),)}),
        ("prefill_4096", {"seqs": ((4096, 0),)}),
        ("chunk_128_of_2048", {"seqs": ((128, 1920),)}),
        ("decode_b8_ctx1k", {"seqs": ((1, 1023),) * 8}),
        ("mixed", {"seqs": ((256, 0), *(((1, 1023),) * 4))}),
        (
            "blocksparse_4096_quarter",
            {"seqs": ((4096, 0),), "layout": Layout(64, 64, density=0.25)},
        ),
    )
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one call on one core."""

    instructions: dict[str, int]  # by engine
    matmuls: int  # products and transpositions on TensorE
    dma_bytes: int
    long_share: float  # of the bytes, those in descriptors of LONG bytes or more
    peak: dict[str, int]  # bytes of a partition, by memory
    kv_bytes: int  # every key and value of every sequence once
    least_bytes: int  # that, the queries and the results


def cost_of(problem: Problem, generation: int = 3) -> Cost:
    """Run a problem on the emulator and count."""
    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    with emulated(generation) as machine:
        BACKEND.function(call.op)(**args)
    engines: collections.Counter[str] = collections.Counter()
    matmuls = 0
    for (engine, instruction), count in machine.instructions.items():
        engines[engine] += count
        matmuls += count if instruction in ("nc_matmul", "nc_transpose") else 0
    total = sum(t.num_bytes for t in machine.transfers)
    long = sum(t.num_bytes for t in machine.transfers if t.descriptor_bytes >= LONG)
    row = 2 * problem.head_dim * problem.dtype.itemsize
    kv_bytes = sum(problem.key_lens) * problem.num_kv_heads * row
    return Cost(
        instructions=dict(engines),
        matmuls=matmuls,
        dma_bytes=total,
        long_share=long / total,
        peak=dict(machine.peak),
        kv_bytes=kv_bytes,
        least_bytes=kv_bytes + sum(problem.query_lens) * problem.num_heads * row,
    )


def vllm_design(problem: Problem, large_tile: int = 2048) -> tuple[int, int]:
    """DMA bytes and TensorE instructions of vLLM's `flash_paged_attention` on the same batch.

    Every program serves one KV head. Contexts of all sequences are laid end to end and padded to
    `large_tile` keys; all queries, padded to whole tiles of P (beyond 2048 to a multiple of that),
    meet all of it under a mask from the host, one byte an element here. A context tile is read
    once; the mask, and the queries of each head, once for every context tile and once more for the
    new keys, whose part above the diagonal is skipped by tiles of 512.
    """
    item, dim = problem.dtype.itemsize, problem.head_dim
    group = problem.num_heads // problem.num_kv_heads
    tokens = sum(problem.query_lens)
    step = P if tokens <= 512 else 512 if tokens <= 4096 else 2048
    tokens = -(-tokens // step) * step
    context = sum(context for _, context in problem.seqs)
    tiles = -(-context // large_tile)
    query_tiles = tokens // P

    # keys and values; masks; queries for each context tile and for the new keys; results
    per_head = tiles * large_tile * 2 * dim * item
    per_head += query_tiles * P * (tiles * large_tile + tokens)
    per_head += (tiles + 1) * group * tokens * dim * item
    per_head += tokens * 2 * dim * item + group * tokens * dim * item

    def products(keys: int, score_tiles: int) -> int:
        """Scores by 512 keys, then a transposition and a product for each 128."""
        return score_tiles + 2 * (keys // P)

    matmuls = tiles * (large_tile // P)  # keys are turned
    matmuls += tiles * query_tiles * group * products(large_tile, large_tile // 512)
    width = min(tokens, 512)
    for tile in range(query_tiles):
        live = min(-(-tokens // width), tile * P // width + 1)
        matmuls += group * products(tokens, live)
    return per_head * problem.num_kv_heads, matmuls * problem.num_kv_heads


def table(generation: int) -> list[str]:
    """A Markdown table, one row for each case."""
    lines = [
        "| call | DMA, MiB | least | in descriptors of 512 bytes or more | TensorE | VectorE |"
        " ScalarE | SBUF peak, KiB | DMA, vLLM's design | TensorE, vLLM's design |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for problem in CASES:
        cost = cost_of(problem, generation)
        dense = "", ""
        if problem.layout is None:
            num_bytes, matmuls = vllm_design(problem)
            dense = f"{num_bytes / 2**20:.0f}", f"{matmuls:,}"
        engines = (cost.instructions.get(e, 0) for e in ("vector", "scalar"))
        lines.append(
            f"| {problem.name.partition('/')[2]} | {cost.dma_bytes / 2**20:.1f} |"
            f" {cost.least_bytes / 2**20:.1f} | {cost.long_share:.1%} | {cost.matmuls:,} |"
            f" {' | '.join(f'{n:,}' for n in engines)} | {cost.peak['sbuf'] / 1024:.0f} |"
            f" {' | '.join(dense)} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", type=int, default=3, choices=(2, 3, 4))
    generation = parser.parse_args().generation
    print(f"Counted on an emulator of generation {generation}, never measured on hardware.\n")
    print("\n".join(table(generation)))


if __name__ == "__main__":
    main()
