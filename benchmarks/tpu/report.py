"""The table of whole programs in docs/tpu.md, from what `run.py --write` has counted.

    python benchmarks/tpu/report.py

A program's figure is its kernels' bundles plus XLA's estimate, in cycles, of what is around them.
"""

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"

MLA = "mla_decode_b16_kv4096_page16"

# problem: what is served
CALLS = {
    "decode_b64_kv4096_page16": "decode 64 x 4096, page 16",
    "decode_b64_kv4096_page32": "the same, page 32",
    "decode_b64_kv4096_page128": "the same, page 128",
    "decode_ragged16_page32": "decode of 16, ragged up to 3000, 64/8 heads, page 32",
    "mixed_63_and_512_page16": "63 decodes at 2048 and a chunk of 512, page 16",
    "chunk_512_kv8192_page16": "chunk of 512 at 8192, page 16",
    "prefill_b2_2048_page16": "prefill 2 x 2048, page 16",
    "prefill_b2_2048_page128": "the same, page 128",
    "gpt_oss_decode_b64_kv4096_page16": (
        "gpt-oss decode 64 x 4096, 64/8 heads of 64, window 128, sinks, page 16"
    ),
    MLA: "latent decode 16 x 4096, 128 heads, 576/512",
}
# attention alone; no peer takes a bias or a layout as it comes, or drops probabilities
ALONE = {
    "mixed_63_and_512_page16": "63 decodes at 2048 and a chunk of 512",
    "dropout_mixed_63_and_512_page16": "the same, dropout",
    "bias_mixed_63_and_512_page16": "63 decodes and a chunk of 512, bias of one head",
    "bias_prefill_b2_2048_page16": "prefill 2 x 2048, bias of one head",
    "bias_of_heads_chunk_512_kv2048_page16": "chunk of 512 at 2048, bias of 32 heads",
    "layout_mixed_63_and_512_block64": "63 decodes and a chunk of 512, layout of blocks of 64",
    "layout_prefill_b2_2048_block128": "prefill 2 x 2048, layout of blocks of 128",
    "layouts_mixed_63_and_512_block64": "63 decodes and a chunk of 512, 32 layouts of blocks of 64",
    "layouts_chunk_512_kv2048_block64": "chunk of 512 at 2048, 32 layouts of blocks of 64",
    "speculative_b64_of4_kv4096_page16": "64 sequences of 4 tokens at 4096",
    "decode_of_4_heads_b64_kv4096_page16": "decode 64 x 4096, 4 heads and one KV head",
}
CHIPS = ("v5e", "v6e", "tpu7x")


def _shown(counts: dict[str, Any] | None) -> str:
    if counts is None:
        return "not counted"
    around = f"{counts['around_cycles'] / 1e3:.0f}" if "around_cycles" in counts else "not counted"
    return f"{counts['bundles'] / 1e3:.0f} + {around}"


def _compared(ours: dict[str, Any] | None, peer: dict[str, Any] | None) -> str:
    """Ours over the peer's. Of a peer whose kernels alone were counted, the whole takes more."""
    if ours is None or peer is None:
        return ""
    ratio = ours["program_cycles"] / peer.get("program_cycles", peer["bundles"])
    return f"{ratio:.2f}" if "program_cycles" in peer else f"less than {ratio:.2f}"


def _counted() -> dict[str, dict[str, Any]]:
    """What was counted of each problem, by chips."""
    rows = {}
    for chip in CHIPS:
        document = json.loads((RESULTS / f"tpu-{chip}" / "schedules.json").read_text())
        rows[chip] = {row["problem"]: row for row in document["results"]}
    return rows


def alone() -> tuple[list[str], set[str]]:
    """The lines of the table of calls without a peer, and the commits that they were counted at."""
    rows = _counted()
    shown = [f"| call, page 16 | {' | '.join(CHIPS)} |", "|---" * (1 + len(CHIPS)) + "|"]
    commits = set()
    for problem, call in ALONE.items():
        counts = [rows[chip].get(problem, {}).get("ours") for chip in CHIPS]
        commits |= {x["commit"] if x else "none" for x in counts}
        shown.append(f"| {call} | {' | '.join(map(_shown, counts))} |")
    return shown, commits


def table() -> tuple[list[str], dict[str, set[str]]]:
    """The table's lines, and the commits that ours and the peers' programs were counted at."""
    rows = _counted()
    shown = [
        "| call | chip | ours: kernels + around | peer: kernels + around | ours / peer |",
        "|---|---|---|---|---|",
    ]
    with_write, wide = "ours, with the write", "ours, queries of whole lanes"
    # the write of latent keys is not part of ours
    lines = [
        (problem, call, *(("ours", "MLA") if problem == MLA else (with_write, "RPA v3")))
        for problem, call in CALLS.items()
    ]
    lines.append((MLA, "the same, queries in rows of 640", wide, "MLA"))
    commits: dict[str, set[str]] = {"ours": set(), "peers": set()}
    for problem, call, mine, other in lines:
        for chip in CHIPS:
            row = rows[chip].get(problem, {})
            ours, peer = row.get(mine), row.get(other)
            for who, counts in zip(commits, (ours, peer), strict=True):
                commits[who].add(counts["commit"] if counts else "none")
            cells = call, chip, _shown(ours), _shown(peer), _compared(ours, peer)
            shown.append(f"| {' | '.join(map(str, cells))} |")
    return shown, commits


def main() -> None:
    shown, commits = table()
    print(*shown, "", sep="\n")
    without_peer, counted_at = alone()
    print(*without_peer, "", sep="\n")
    commits["those without a peer"] = counted_at
    for who, counted_at in commits.items():
        print(f"{who}: counted at {', '.join(sorted(counted_at))}")


if __name__ == "__main__":
    main()
