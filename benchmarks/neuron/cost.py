"""What the Neuron kernels cost, counted on the emulator and not measured: nothing here has run on
hardware.

`python benchmarks/neuron/cost.py [--generation 3]` runs Llama-3-8B's shapes and counts instructions
by engine, bytes by DMA, how long DMAs' descriptors are, and the peaks of the memories; beside them
stands what the same calls cost in the design of vLLM's paged NKI kernel, by arithmetic. A second
table is of the backward at shapes that `nki.kernels.flash_attn_bwd` took, beside its design.
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
from torch_paged_attn.testing.problem import Selected

SHORT, LONG = 512, 2048  # bytes of a descriptor: what a DMA needs at least, and is efficient from
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

# a step over caches of 8 bits with a scale for each token and head
BY_TOKEN = tuple(
    dataclasses.replace(
        LLAMA,
        name=f"llama3_8b/{name}_by_token",
        seqs=((1, 1023),) * 2,
        kv_dtype=kv_dtype,
        descale="tokens",
    )
    for name, kv_dtype in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn))
)

# a step whose lists name a quarter of its pages
SELECTED_UNITS = 16
SELECTED = dataclasses.replace(
    LLAMA,
    name="llama3_8b/selected_16_of_64_pages",
    seqs=((1, 4095),) * 2,
    page_size=64,
    selected=Selected(SELECTED_UNITS, 64),
)


@dataclasses.dataclass(frozen=True)
class Cost:
    """Counts of one call on one core."""

    instructions: dict[str, int]  # by engine
    matmuls: int  # products and transpositions on TensorE
    columns: int  # that move through it
    dma_bytes: int  # to or from HBM
    turned_bytes: int  # transposed by DMA, from SBUF to SBUF
    descriptors: int
    short_share: float  # of the bytes, those in descriptors of less than SHORT bytes
    long_share: float  # and those in descriptors of LONG bytes or more
    peak: dict[str, int]  # bytes of a partition, by memory
    kv_bytes: int  # every key and value of every sequence once
    least_bytes: int  # that, the queries and the results


def cost_of(problem: Problem, generation: int = 3, backward: bool = False) -> Cost:
    """Run a problem, or its backward, on the emulator and count."""
    call = build(problem)
    if backward:
        shape = call.args["q"].shape
        out, lse = call.args["q"].new_zeros(shape), torch.zeros(shape[1], shape[0])
        call = call.backward(out, None, out, lse)
    with emulated(generation) as machine:
        BACKEND.function(call.op)(**call.args)
    engines: collections.Counter[str] = collections.Counter()
    matmuls = 0
    for (engine, instruction), count in machine.instructions.items():
        engines[engine] += count
        matmuls += count if instruction in ("nc_matmul", "nc_transpose") else 0
    hbm = [t for t in machine.transfers if not t.on_chip]
    total = sum(t.num_bytes for t in hbm)
    short = sum(t.num_bytes for t in hbm if t.descriptor_bytes < SHORT)
    long = sum(t.num_bytes for t in hbm if t.descriptor_bytes >= LONG)
    row = 2 * problem.head_dim * problem.dtype.itemsize
    kv_bytes = sum(problem.key_lens) * problem.num_kv_heads * row
    return Cost(
        instructions=dict(engines),
        matmuls=matmuls,
        columns=machine.tensor_columns,
        dma_bytes=total,
        turned_bytes=sum(t.num_bytes for t in machine.transfers if t.on_chip),
        descriptors=sum(-(-t.num_bytes // t.descriptor_bytes) for t in hbm),
        short_share=short / total,
        long_share=long / total,
        peak=dict(machine.peak),
        kv_bytes=kv_bytes,
        least_bytes=kv_bytes + sum(problem.query_lens) * problem.num_heads * row,
    )


@dataclasses.dataclass(frozen=True)
class Design:
    """Arithmetic on the source of another kernel, for one call."""

    dma_bytes: int
    long_share: float  # of the bytes, those in descriptors of LONG bytes or more
    matmuls: int


def vllm_design(problem: Problem, generation: int = 3, large_tile: int = 2048) -> Design:
    """What vLLM's `flash_paged_attention` needs for the same batch.

    Every program serves one KV head. Contexts of all sequences are laid end to end and padded to
    `large_tile` keys; all queries, padded to whole tiles of P (beyond 2048 to a multiple of that),
    meet all of it under a mask from the host, one byte an element here. A context tile is read
    once; the mask, and the queries of each head, once for every context tile and once more for the
    new keys, whose part above the diagonal is skipped by tiles of 512. Probabilities are turned by
    TensorE on the second generation, by DMA after it. Pages are gathered whole, a descriptor each.
    """
    item, dim = problem.dtype.itemsize, problem.head_dim
    group = problem.num_heads // problem.num_kv_heads
    tokens = sum(problem.query_lens)
    step = P if tokens <= 512 else 512 if tokens <= 4096 else 2048
    tokens = -(-tokens // step) * step
    context = sum(context for _, context in problem.seqs)
    tiles = -(-context // large_tile)
    query_tiles = tokens // P

    pages = problem.page_size or 1
    # by how long their pieces are: pages; masks of the context; masks of what is new; the queries
    # of a head along tokens, for each context tile and for the new keys; new keys, results
    pieces = [
        (tiles * large_tile * 2 * dim * item, pages * dim * item),
        (query_tiles * P * tiles * large_tile, large_tile),
        (query_tiles * P * tokens, tokens),
        ((tiles + 1) * group * tokens * dim * item, step * item),
        (tokens * 2 * dim * item + group * tokens * dim * item, dim * item),
    ]
    per_head = sum(num_bytes for num_bytes, _ in pieces)
    long = sum(num_bytes for num_bytes, piece in pieces if piece >= LONG)
    turned = 1 if generation < 3 else 0

    def products(keys: int, score_tiles: int) -> int:
        """Scores by 512 keys, then a product, and maybe a transposition, for each 128."""
        return score_tiles + (1 + turned) * (keys // P)

    matmuls = tiles * (large_tile // P)  # keys are turned
    matmuls += tiles * query_tiles * group * products(large_tile, large_tile // 512)
    width = min(tokens, 512)
    for tile in range(query_tiles):
        live = min(-(-tokens // width), tile * P // width + 1)
        matmuls += group * products(tokens, live)
    kv_heads = problem.num_kv_heads
    return Design(per_head * kv_heads, long / per_head, matmuls * kv_heads)


def flash_attn_bwd_design(problem: Problem) -> Cost:
    """What `nki.kernels.flash_attn_bwd` needed for one sequence and equal heads, counted on its
    published source: as many queries as keys, tiles of 128 queries by 512 keys.

    Its tensors come as (head_dim, tokens), and so q, k, v and dout need no transposition before the
    products over head_dim. A pair of tiles takes 14 instructions of TensorE: q and dout are turned,
    scores, dP, dV and dK are a product each, dX is turned in 4 steps, and multiplied with keys in
    4. Pairs above the diagonal are skipped, their loads are not: q and dout come once for each tile
    of keys.
    """
    (tokens, _), *_ = problem.seqs
    query_tiles, key_tiles = tokens // P, max(1, tokens // 512)
    width = tokens // key_tiles
    pairs = sum(
        not problem.causal or i * P >= j * width
        for i in range(query_tiles)
        for j in range(key_tiles)
    )
    steps = width // P
    row = tokens * problem.head_dim * problem.dtype.itemsize
    # dout and out for the row sums, k and v, the three results; q and dout
    num_bytes = tokens * 4 + (2 + 2 + 3 + 2 * key_tiles) * row
    # elementwise: mask, exponential, dP, dX, what was turned, dq twice, q's scale
    elementwise = pairs * (4 + 2 + steps + 2 + 1)
    return Cost(
        instructions={"vector and scalar": problem.num_heads * elementwise},
        matmuls=problem.num_heads * (key_tiles * steps + pairs * (6 + 2 * steps)),
        columns=problem.num_heads * (key_tiles * width + pairs * (2 * P + 6 * width)),
        dma_bytes=problem.num_heads * num_bytes,
        turned_bytes=0,
        descriptors=0,
        short_share=0.0,
        long_share=0.0,
        peak={},
        kv_bytes=0,
        least_bytes=0,
    )


# a head of Llama's, and the four that share keys there, which flash_attn_bwd did not have
TRAINED = dataclasses.replace(LLAMA, page_size=None, num_heads=1, num_kv_heads=1, lengths="none")
BACKWARD_CASES = tuple(
    dataclasses.replace(
        TRAINED, name=f"{n}{', causal' if causal else ''}", seqs=((n, 0),), causal=causal
    )
    for n in (256, 384, 512, 2048, 4096, 8192)
    for causal in (True, False)
    if causal or n <= 4096
)


def surroundings(problem: Problem) -> int:
    """Bytes that PyTorch's part of a backward moves: lse is read, and the three numbers that the
    kernel takes for each row are written.
    """
    return sum(problem.query_lens) * problem.num_heads * 4 * 4


def backward_table(generation: int) -> list[str]:
    """A Markdown table of the backward, one row for each case."""
    lines = [
        "| tokens, one head | DMA, MiB | of flash_attn_bwd's | TensorE | of its | columns |"
        " of its | VectorE and ScalarE | of its | turned by DMA, MiB | SBUF peak, KiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for problem in BACKWARD_CASES:
        cost, old = cost_of(problem, generation, backward=True), flash_attn_bwd_design(problem)
        num_bytes = cost.dma_bytes + surroundings(problem)
        elementwise = cost.instructions["vector"] + cost.instructions["scalar"]
        of_old = old.instructions["vector and scalar"]
        lines.append(
            f"| {problem.name} | {num_bytes / 2**20:.1f} | {num_bytes / old.dma_bytes:.2f} |"
            f" {cost.matmuls:,} | {cost.matmuls / old.matmuls:.2f} |"
            f" {cost.columns:,} | {cost.columns / old.columns:.2f} |"
            f" {elementwise:,} | {elementwise / of_old:.2f} |"
            f" {cost.turned_bytes / 2**20:.1f} | {cost.peak['sbuf'] / 1024:.0f} |"
        )
    return lines


def table(generation: int) -> list[str]:
    """A Markdown table, one row for each case."""
    lines = [
        "| call | DMA, MiB | least | descriptors | bytes in those of 512 B or more |"
        " of 2 KiB or more | turned by DMA, MiB | TensorE | VectorE | ScalarE | SBUF peak, KiB |"
        " vLLM's design: DMA | of 2 KiB or more | TensorE |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for problem in CASES:
        cost = cost_of(problem, generation)
        dense = "", "", ""
        if problem.layout is None:
            design = vllm_design(problem, generation)
            dense = (
                f"{design.dma_bytes / 2**20:.0f}",
                f"{design.long_share:.0%}",
                f"{design.matmuls:,}",
            )
        engines = (cost.instructions.get(e, 0) for e in ("vector", "scalar"))
        lines.append(
            f"| {problem.name.partition('/')[2]} | {cost.dma_bytes / 2**20:.1f} |"
            f" {cost.least_bytes / 2**20:.1f} | {cost.descriptors:,} |"
            f" {1 - cost.short_share:.1%} | {cost.long_share:.0%} |"
            f" {cost.turned_bytes / 2**20:.0f} | {cost.matmuls:,} |"
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
    print("\n".join(["", *backward_table(generation)]))


if __name__ == "__main__":
    main()
