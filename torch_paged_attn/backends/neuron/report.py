"""What the engine kernel costs, counted and not measured.

`PAGED_ATTN_NEURON_EMULATE=1 python -m torch_paged_attn.backends.neuron.report` runs named problems
on the emulator and counts instructions by engine, bytes by DMA and the peak of the memories.
"""

import argparse
import collections
import dataclasses

import torch

from torch_paged_attn.backends.neuron.attention import flash_varlen
from torch_paged_attn.testing import Problem, build
from torch_paged_attn.testing.nki_emulator import emulated

LONG = 512  # bytes of a descriptor from which a DMA is efficient

LLAMA = Problem("llama3_8b", (), 32, 8, 128, dtype=torch.bfloat16, page_size=16, cache_layout="hnd")
CASES = (
    dataclasses.replace(LLAMA, name="llama3_8b/prefill_1024", seqs=((1024, 0),)),
    dataclasses.replace(LLAMA, name="llama3_8b/chunk_128_of_2048", seqs=((128, 1920),)),
    dataclasses.replace(LLAMA, name="llama3_8b/decode_b8_ctx1k", seqs=((1, 1023),) * 8),
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one call on one core."""

    instructions: dict[str, int]  # by engine
    matmuls: int
    dma_bytes: int
    long_share: float  # of the bytes, those in descriptors of LONG bytes or more
    peak: dict[str, int]  # bytes of a partition, by memory
    fewest_bytes: int  # every visible key and value of every sequence read once


def cost_of(problem: Problem, generation: int = 3) -> Cost:
    """Run a problem on the emulator and count."""
    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    with emulated(generation) as machine:
        flash_varlen(**args)
    engines: collections.Counter[str] = collections.Counter()
    for (engine, _), count in machine.instructions.items():
        engines[engine] += count
    total = sum(t.num_bytes for t in machine.transfers)
    long = sum(t.num_bytes for t in machine.transfers if t.descriptor_bytes >= LONG)
    dims = problem.head_dim + (problem.head_dim_v or problem.head_dim)
    return Cost(
        instructions=dict(engines),
        matmuls=machine.instructions["tensor", "nc_matmul"],
        dma_bytes=total,
        long_share=long / total,
        peak=dict(machine.peak),
        fewest_bytes=sum(problem.key_lens) * problem.num_kv_heads * dims * problem.dtype.itemsize,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--generation", type=int, default=3, choices=(2, 3, 4))
    generation = parser.parse_args().generation
    print(f"An estimate from counting on an emulator of generation {generation}: nothing here was")
    print("ever measured on hardware.")
    for problem in CASES:
        cost = cost_of(problem, generation)
        print(f"\n{problem.name}")
        print("  instructions  " + ", ".join(f"{e} {n}" for e, n in cost.instructions.items()))
        print(f"  products      {cost.matmuls}")
        print(
            f"  DMA           {cost.dma_bytes / 2**20:.1f} MiB, {cost.long_share:.1%} of it in"
            f" descriptors of {LONG} bytes or more; keys and values once are"
            f" {cost.fewest_bytes / 2**20:.1f} MiB"
        )
        print("  peak          " + ", ".join(f"{m} {n} bytes" for m, n in cost.peak.items()))


if __name__ == "__main__":
    main()
