"""What run.py measured on a GPU, as markdown tables and as a plot; needs no GPU.

python benchmarks/gpu/report.py benchmarks/results/cuda/h200.json --plot OUT.png
python benchmarks/gpu/report.py benchmarks/results/cuda/h200.json --markdown
"""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
# how a number is written, and where it is from; None if a row does not have it
Column = tuple[str, Callable[[Row], float | None]]


# contenders of one row that are rows of their own in a table -> what the table calls them
OF_WITH_KVCACHE = {
    "with_kvcache": "",
    "no new tokens": "no new tokens",
    "our decode": "flash_varlen alone",
}


def by_variant(rows: dict[str, Row]) -> dict[str, Row]:
    """Rows of `contender, variant (mode)` as a row for each variant: a step that is new, and one
    that came again. Of a function beside its parts, the function is ours.
    """
    split: dict[str, Row] = {}
    for problem, row in rows.items():
        for name, value in row["figures"].items():
            contender, _, mode = name.partition(" (")
            contender, _, variant = contender.partition(", ")
            if contender in OF_WITH_KVCACHE:
                variant = ", ".join(filter(None, (OF_WITH_KVCACHE[contender], variant)))
                contender = "ours"
            title = f"{problem}, {variant}" if variant else problem
            split.setdefault(title, {"figures": {}})["figures"][f"{contender} ({mode}"] = value
    return split


def speedup(row: Row, peer: str, ours: str = "ours") -> float | None:
    """How many times as fast as a peer; None if that took no part."""
    figures = row["figures"]
    if peer not in figures:
        return None
    ratio = figures[ours] / figures[peer]
    return ratio if row["unit"] in ("TFLOP/s", "tokens/s") else 1 / ratio


@dataclasses.dataclass(frozen=True)
class Table:
    """The rows of a part whose names begin with `prefix`."""

    title: str
    part: str
    prefix: str
    columns: dict[str, Column]
    peers: tuple[str, ...] = ()  # in the plot
    ours: str = "ours"

    def rows(self, document: dict[str, Any]) -> dict[str, Row]:
        """By what is left of their names; what was refused is left out."""
        rows = {
            row["problem"].removeprefix(self.prefix): row
            for row in document["parts"].get(self.part, ())
            if row["problem"].startswith(self.prefix) and "figures" in row
        }
        return by_variant(rows) if self.part == "host" else rows


def tables(read_ceiling: float) -> list[Table]:
    def figure(name: str, form: str = "{:.0f}") -> Column:
        return form, lambda row: row["figures"].get(name)

    def over(peer: str, form: str = "{:.2f}x") -> Column:
        return form, lambda row: speedup(row, peer)

    def of_default(name: str) -> Column:
        return "{:.2f}", lambda row: speedup(row, "default", ours=name)

    def of_own_default(keys: int) -> Column:
        beside = f"default of {keys}"
        return "{:.2f}", lambda row: speedup(row, beside, ours=f"registers, {keys}")

    def over_best(row: Row) -> float | None:
        peers = (speedup(row, peer) for peer in ("FA3", "cuDNN", "FA2"))
        return min((ratio for ratio in peers if ratio is not None), default=None)

    def over_either(*peers: str) -> Callable[[Row], float | None]:
        """For rows that have one of these peers."""
        return lambda row: next((x for x in (speedup(row, p) for p in peers) if x), None)

    us = "{:.1f}"
    return [
        Table(
            "prefill, TFLOP/s, causal counted as half",
            "attention",
            "prefill ",
            {
                "ours": figure("ours"),
                "FA3": figure("FA3"),
                "cuDNN": figure("cuDNN"),
                "ours / best": ("{:.2f}", over_best),
                "of packed": over("packed", "{:.0%}"),
            },
            peers=("FA3", "cuDNN", "FA2", "packed"),
        ),
        Table(
            "decode, µs: batch, context, query/KV heads, page size",
            "attention",
            "decode ",
            {
                "ours": figure("ours", us),
                "FA3": figure("FA3", us),
                "ours is": over("FA3", "{:.2f}x as fast"),
                f"read, of {read_ceiling:.2f} TB/s": (
                    "{:.0%}",
                    lambda row: row["TB/s"] / read_ceiling,
                ),
            },
            peers=("FA3",),
        ),
        Table(
            "8-bit prefill, TFLOP/s: of q, k and v, or of k and v beside bfloat16 queries",
            "float8",
            "prefill ",
            {
                "ours": figure("ours"),
                "ours, bf16": figure("ours bf16"),
                "is": over("ours bf16"),
                "FA3 float8": figure("FA3"),
                "FA3 bf16": figure("FA3 bf16"),
                "our error": ("{:.2%}", lambda row: row["error"]),
                "FA3 float8's": ("{:.2%}", lambda row: row.get("error of FA3")),
            },
            peers=("ours bf16", "FA3", "FA3 bf16"),
        ),
        Table(
            "latent decode, µs: MLA, 576/512, batch, context, heads, page size",
            "latent",
            "latent ",
            {
                "ours": figure("ours", us),
                "FA3's q_v": figure("FA3", us),
                "ours is": over("FA3", "{:.2f}x as fast"),
                "portable": figure("portable", us),
                "TFLOP/s": ("{:.0f}", lambda row: row["TFLOP/s"]),
                "TB/s": ("{:.2f}", lambda row: row["TB/s"]),
            },
            peers=("FA3", "portable"),
        ),
        Table(
            "prefill by the portable kernel, TFLOP/s",
            "portable",
            "prefill ",
            {"ours": figure("portable"), "FlexAttention": figure("flex"), "FA2": figure("FA2")},
            peers=("flex", "FA2"),
            ours="portable",
        ),
        *(
            Table(
                f"{kind}, TFLOP/s of pairs that are seen",
                "backward",
                f"{kind} ",
                {
                    "ours": figure("ours"),
                    "not deterministic": figure("fast"),
                    "portable": figure("portable"),
                    "cuDNN": figure("cuDNN"),
                    "FA4": figure("FA4"),
                    "FA2": figure("FA2"),
                    "FlexAttention": figure("flex"),
                },
                peers=("cuDNN", "FA4", "FA2", "flex"),
            )
            for kind in ("backward", "forward+backward")
        ),
        Table(
            "training step, tokens/s: a Llama of a billion parameters, documents x length",
            "train_step",
            "",
            {
                "ours": figure("ours"),
                "not deterministic": figure("ours, any order"),
                "cuDNN": figure("cuDNN"),
                "FA2": figure("FA2"),
            },
            peers=("cuDNN", "FA2"),
        ),
        Table(
            "block-sparse, causal local + strided, heads of 128",
            "blocksparse",
            "",
            {
                "of causal": ("{:.1%}", lambda row: row["of causal"]),
                "useful TFLOP/s": figure("ours"),
                "of dense": over("dense", "{:.0%}"),
                "FlexAttention": over("flex"),
                "vLLM's kernel": over("vLLM"),
            },
            peers=("flex", "vLLM"),
        ),
        Table(
            "selected keys, ms",
            "selected",
            "",
            {
                "ours": figure("ours", "{:.4g}"),
                "portable kernel": figure("portable", "{:.4g}"),
                "FlashMLA": figure("FlashMLA", "{:.4g}"),
                "vLLM": figure("vLLM", "{:.4g}"),
                "torch": figure("torch", "{:.4g}"),
                "ours is": ("{:.2f}x as fast", over_either("FlashMLA", "vLLM", "torch")),
            },
            peers=("FlashMLA", "vLLM", "torch"),
        ),
        Table(
            "selected keys by family, ms",
            "selected_families",
            "",
            {
                "ours": figure("ours", "{:.4g}"),
                "portable kernel": figure("portable", "{:.4g}"),
                "both caches in one list": figure("one list", "{:.4g}"),
                "FlashMLA, one list": figure("FlashMLA", "{:.4g}"),
                "vLLM": figure("vLLM", "{:.4g}"),
                "the window alone": ("{:.4g}", lambda row: row.get("window, ms")),
                "the window as a list": ("{:.4g}", lambda row: row.get("window by list, ms")),
                "the selected alone": ("{:.4g}", lambda row: row.get("selected, ms")),
            },
            peers=("FlashMLA", "vLLM"),
        ),
        Table(
            "caches with a scale for each token and head, ms",
            "scaled_caches",
            "",
            {
                name: figure(name, "{:.4g}")
                for name in (
                    *("bfloat16", "int8", "e4m3", "int4"),
                    *("vLLM int8", "vLLM e4m3", "vLLM int4"),
                )
            },
        ),
        Table(
            "backward of selected keys, ms",
            "selected_gradients",
            "",
            {
                "ours": figure("ours", "{:.4g}"),
                "TFLOP/s": ("{:.0f}", lambda row: row.get("TFLOP/s")),
                "attention-gym": figure("attention-gym", "{:.4g}"),
                "ours is": over("attention-gym", "{:.2f}x as fast"),
                "dense": figure("dense", "{:.4g}"),
                "of dense": over("dense", "{:.0%}"),
            },
            peers=("attention-gym", "dense"),
        ),
        Table(
            "µs: sequences x tokens",
            "batch_invariant",
            "",
            {
                "default": figure("default", "{:.4g}"),
                "batch_invariant": figure("batch_invariant", "{:.4g}"),
                "of default": of_default("batch_invariant"),
                "portable kernel": figure("portable", "{:.4g}"),
                "portable, of default": of_default("portable"),
            },
        ),
        Table(
            "of the default's speed, sums in registers: sequences x tokens",
            "batch_invariant_attempts",
            "",
            {f"ranges of {keys:,} keys": of_own_default(keys) for keys in (2048, 256)},
        ),
        Table(
            "log-probabilities of sampler and trainer",
            "rollout",
            "",
            {
                "tokens": figure("tokens", "{:,.0f}"),
                "equal in every bit": figure("equal", "{:,.0f}"),
                "largest difference": figure("largest", "{:.1e}"),
                "sampling, s": figure("sampling", "{:.2f}"),
                "training, s": figure("training", "{:.2f}"),
            },
        ),
        Table(
            "cache write, µs: tokens x KV heads x head_dim",
            "cache_write",
            "",
            {
                "ours": figure("ours", "{:.3g}"),
                "index_put": figure("index_put", "{:.3g}"),
                "copy": figure("copy", "{:.3g}"),
                "of copy": over("copy", "{:.0%}"),
            },
        ),
        Table(
            "first call of a process with an empty cache",
            "first_call",
            "",
            {
                "first, s": figure("first", "{:.1f}"),
                "other steps, s": figure("others", "{:.1f}"),
                "again, s": figure("again", "{:.2f}"),
                "least, s": figure("least", "{:.2f}"),
                "kernels compiled": figure("kernels"),
                "SDPA: first, s": figure("SDPA first", "{:.1f}"),
                "again, s ": figure("SDPA again", "{:.2f}"),
                "least, s ": figure("SDPA least", "{:.2f}"),
                "tokens/s": figure("tokens/s"),
                "SDPA: tokens/s": figure("SDPA tokens/s"),
            },
        ),
        Table(
            "host time of a call, µs",
            "host",
            "",
            {
                "ours, inference": figure("ours (inference)", us),
                "no_grad": figure("ours (no_grad)", us),
                "grad": figure("ours (grad)", us),
                "FA3, inference": figure("FA3 (inference)", us),
            },
        ),
    ]


def read_ceiling(document: dict[str, Any]) -> float:
    """TB/s of the run's fastest read; NaN for runs without tables that compare with it."""
    return document.get("ceilings", {}).get("read TB/s", math.nan)


def describe(machine: dict[str, Any]) -> str:
    gpu, triton = machine.get("gpu"), machine.get("triton")
    named = [gpu, f"torch {machine['torch']}", triton and f"Triton {triton}", machine["date"]]
    return ", ".join(filter(None, named))


def markdown(document: dict[str, Any]) -> str:
    """The tables as they stand on the page beside the results."""
    lines = [describe(document["machine"])]
    for table in tables(read_ceiling(document)):
        if not (rows := table.rows(document)):
            continue
        # without a contender that took no part in the run
        columns = {
            title: (form, number)
            for title, (form, number) in table.columns.items()
            if any(number(row) is not None for row in rows.values())
        }
        lines += ["", "| " + " | ".join([table.title, *columns]) + " |"]
        lines += ["|---" + "|---:" * len(columns) + "|"]
        for name, row in rows.items():
            numbers = ((form, number(row)) for form, number in columns.values())
            texts = ["" if number is None else form.format(number) for form, number in numbers]
            lines.append("| " + " | ".join([name, *texts]) + " |")
    return "\n".join(lines)


def draw(document: dict[str, Any], path: Path) -> None:
    """How many times as fast as each peer, in a panel for each table that names some."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import panels

    drawn = []
    for table in tables(read_ceiling(document)):
        rows = {
            name: {peer: ratio for peer in table.peers if (ratio := speedup(row, peer, table.ours))}
            for name, row in table.rows(document).items()
        }
        rows = {name: ratios for name, ratios in rows.items() if ratios}
        if rows:
            title = table.title.split(", ")[0].capitalize()
            drawn.append(panels.Panel(title, "times as fast as the peer", rows))
    panels.draw(drawn, describe(document["machine"]), path, ticks="{x:g}x", start=0.8)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what run.py wrote")
    parser.add_argument("--plot", metavar="OUT", type=Path, help="draw them")
    parser.add_argument("--markdown", action="store_true", help="print them as markdown")
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    if options.plot:
        draw(document, options.plot)
    if options.markdown or not options.plot:
        print(markdown(document))


if __name__ == "__main__":
    main()
