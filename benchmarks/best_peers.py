"""How fast we are beside the fastest peer of the same run: one ratio for each row of the results.

The pictures of README and docs/performance.md and the README's table (`headline.py`) are made from
these ratios. Needs no GPU.
"""

import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]


def load(name: str, path: Path) -> Any:
    """A module by path: benchmarks/report.py and benchmarks/gpu/report.py share a name."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cpu = load("report", ROOT / "benchmarks" / "report.py")
gpu = load("gpu_report", ROOT / "benchmarks" / "gpu" / "report.py")
serving = load("serving_report", ROOT / "benchmarks" / "gpu" / "serving_report.py")

# contenders of the GPU tables that are kernels of ours
OURS = ("packed", "dense", "portable", "ours bf16")
# contender -> the project that it is of
PROJECTS = {
    "FA3 fp8": "FA3",
    "SDPA folded": "SDPA",
    "vLLM p16": "vLLM",
    "vLLM p128": "vLLM",
    "flex": "FlexAttention",
}


class Compared(NamedTuple):
    """A row: our speed divided by that of the fastest peer, and the peers that took part."""

    problem: str
    ratio: float
    peers: tuple[str, ...]


def is_gpu(document: dict[str, Any]) -> bool:
    return "results" not in document


def is_drawn(document: dict[str, Any]) -> bool:
    """Whether its rows are randomly drawn serving steps."""
    return "seed" in document


def compared(document: dict[str, Any]) -> dict[str, list[Compared]]:
    """Kind of problem -> its rows that have a peer."""
    if is_drawn(document):
        return _of_serving(document)
    return _of_gpu(document) if is_gpu(document) else _of_cpu(document)


def _of_serving(document: dict[str, Any]) -> dict[str, list[Compared]]:
    kinds: dict[str, list[Compared]] = {}
    for row in document["rows"]:
        if (ratio := serving.ratio(row)) is not None:
            peers = tuple(name for name in row["figures"] if name != "ours")
            found = Compared(row["problem"], ratio, peers)
            kinds.setdefault(f"serving: {row['kind']}", []).append(found)
    return {f"serving: {kind}": kinds[f"serving: {kind}"] for kind in serving.COLOURS
            if f"serving: {kind}" in kinds}  # fmt: skip


def _of_gpu(document: dict[str, Any]) -> dict[str, list[Compared]]:
    kinds: dict[str, list[Compared]] = {}
    for table in gpu.tables(gpu.read_ceiling(document)):
        peers = [peer for peer in table.peers if peer not in OURS]
        for problem, row in table.rows(document).items():
            ratios = {peer: gpu.speedup(row, peer, table.ours) for peer in peers}
            ratios = {peer: ratio for peer, ratio in ratios.items() if ratio}
            if ratios:
                found = Compared(problem, min(ratios.values()), tuple(ratios))
                kinds.setdefault(table.title.split(",")[0], []).append(found)
    return kinds


def _of_cpu(document: dict[str, Any]) -> dict[str, list[Compared]]:
    """Rows at the largest number of threads that were not disturbed."""
    kinds: dict[str, list[Compared]] = {}
    most = max(row.get("threads", 0) for row in document["results"])
    for row in document["results"]:
        timings = row.get("timings", {})
        if row.get("threads") != most or not timings or timings["ours"]["busy"]:
            continue
        names = [name for name in cpu.peers(row) if "(ours)" not in name]
        peers = tuple(name for name in names if not timings[name]["busy"])
        if peers:
            ratio = min(cpu.speedup(row, name) for name in peers)
            kind = row["problem"].removeprefix("llama3_8b/").replace("_", " ").split()[0]
            kind = {"blocksparse": "block-sparse", "reshape": "cache write"}.get(kind, kind)
            found = Compared(row["problem"], ratio, peers)
            kinds.setdefault(kind.split("/")[0], []).append(found)
    return kinds


def projects(rows: list[Compared]) -> list[str]:
    """The projects that the rows' peers are of."""
    names = [PROJECTS.get(peer, peer) for row in rows for peer in row.peers]
    return list(dict.fromkeys(names))


def geometric_mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))
