"""Fit the costs by which the fastest way to run few queries is chosen (`backends/triton/ways.py`).

    python benchmarks/gpu/fit_ways.py                fit, say how well choices do, write nothing
    python benchmarks/gpu/fit_ways.py --write        the same, and write the table of costs
    python benchmarks/gpu/fit_ways.py --add FILE     add rows that forms_sweep.py has measured

No GPU is needed: the measurements are in `tests/triton/data`. Each row is a serving step
with the microseconds of each way and of FA3. Choices are judged on rows that were left out of the
fit, a fifth at a time, and know what the operator knows: sizes, and a rounded bound of keys.
"""

import argparse
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from torch_paged_attn.backends.triton import ways
from torch_paged_attn.backends.triton.flash_varlen import said_of_reach
from torch_paged_attn.backends.triton.hopper.support import GATHERED, width_of
from torch_paged_attn.backends.triton.ways import Costs, Lengths, Shape

DATA = Path(__file__).parents[2] / "tests" / "triton" / "data" / "ways_sweep.json.gz"

# bytes of memory that a GPU reads in a microsecond
BANDWIDTH = {"NVIDIA H200": 4.3e6, "NVIDIA H100 80GB HBM3": 2.95e6}

# of the ways that were measured, those without which choices were worse
WAYS = {
    "d64/b2": ["portable 128/4/5/1", "portable 128/4/5/2", "portable 64/4/5/2",
               "portable 64/4/5/2 all", "listed divided", "dealt", "numbered",
               "numbered divided"],
    "d128/b2": ["portable 32/1/5/4", "portable 64/4/5/1", "portable 128/4/3/2",
                "portable 128/8/5/1", "portable 256/8/1/1", "portable 128/4/3/2 all",
                "dealt", "numbered", "numbered divided"],
    "d256/b2": ["portable 32/4/5/2", "portable 64/4/3/2", "portable 64/4/3/2 all", "listed",
                "numbered"],
    "d64/b1": ["portable 64/2/5/4", "portable 64/4/5/2", "portable 128/8/5/1", "listed",
               "numbered"],
    "d128/b1": ["portable 64/1/5/4", "portable 64/4/5/2", "portable 128/4/3/2",
                "portable 256/8/1/1", "portable 64/4/5/2 all", "portable 128/4/3/2 all",
                "listed", "dealt tall", "numbered"],
    "d256/b1": ["portable 64/4/5/2", "portable 128/4/3/2", "portable 128/8/5/1", "listed"],
}  # fmt: skip

# what costs are before anything is measured, and by what factor they may differ (its logarithm)
PRIOR = {
    "portable": Costs(6.0, 0.02, 0.5, 0.5, 0.1, 0.3, 0.1, 1.15, 1.0, 0.15, 3.0, 1.0, 0.0),
    "hopper": Costs(5.0, 0.35, 0.9, 0.02, 0.02, 0.02, 0.3, 1.1, 2.0, 0.1, 2.0, 1.0, 0.0),
}
WIDTH = Costs(1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.15, 1.0, 1.0, 1.0, 1.5, 0.0)
PRIOR_WEIGHT, LIKE_WEIGHT, OUTLIER = 0.05, 0.2, 0.08
# rows that are left out at a time, of all; the quantile of errors that is called spread
PARTS, SPREAD = 5, 0.85

Row = dict[str, Any]


def kind_of(row: Row) -> str:
    return f"d{width_of(row['heads'][2])}/b{2 if row['kv_dtype'] == row['dtype'] else 1}"


def shape_of(row: Row, longest: int | None = None) -> Shape:
    """What the operator knows of a row; `longest`: instead of the bound that it would get."""
    num_heads, num_kv_heads, head_dim = row["heads"]
    bound = said_of_reach(row["keys"][2], False) if longest is None else longest
    return Shape(
        row["batch"], row["total_q"], num_kv_heads, num_heads // num_kv_heads, row["longest_q"],
        bound, row["window"], 2 * head_dim * int(kind_of(row)[-1]), row["page_size"] in GATHERED,
        head_dim,
    )  # fmt: skip


def lengths_of(row: Row) -> Lengths:
    """The keys that sequences really visit."""
    mean, longest = row["keys"][1] / row["batch"], row["keys"][2]
    if row["window"] >= 0:
        mean, longest = (min(x, row["window"] + row["longest_q"]) for x in (mean, longest))
    return Lengths(mean, longest)


def ways_of(row: Row) -> list[str]:
    """The ways that the operator may choose for a row, of those that were measured."""
    is_low = shape_of(row).rows <= 16
    known = [x for x in WAYS[kind_of(row)] if x in row["figures"]]
    return [x for x in known if is_low or not ways.is_portable(x)]


def fit(way: str, rows: list[Row], like: Costs | None = None) -> Costs:
    """The costs of a way, from rows of its kind. `like`: those of a way that differs little."""
    prior = like or PRIOR["portable" if ways.is_portable(way) else "hopper"]
    weight = PRIOR_WEIGHT if like is None else LIKE_WEIGHT
    start, width = np.log(prior[:-1]), np.array(WIDTH[:-1])
    known = [(shape_of(r, r["keys"][2]), lengths_of(r), BANDWIDTH[r["chip"]]) for r in rows]
    measured = np.log([row["figures"][way] for row in rows])

    def errors(logs: np.ndarray) -> np.ndarray:
        costs = Costs(*np.exp(logs), 0.0)
        found = [ways.estimate(way, costs, *x) for x in known]
        return np.log(found) - measured

    def residuals(logs: np.ndarray) -> np.ndarray:
        off = errors(logs) / OUTLIER
        # an outlier counts by its size, not by its square
        robust = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) * OUTLIER
        return np.concatenate([robust, weight * (logs - start) / width])

    found = least_squares(residuals, start).x
    spread = float(np.quantile(np.abs(errors(found)), SPREAD))
    return Costs(*(round(float(x), 4) for x in np.exp(found)), round(spread, 3))


def fit_all(rows: list[Row]) -> dict[str, dict[str, Costs]]:
    found: dict[str, dict[str, Costs]] = {}
    for kind, names in WAYS.items():
        of_kind = [row for row in rows if kind_of(row) == kind]
        found[kind] = {}
        for way in names:
            like = found[kind].get(way.removesuffix(" all")) if way.endswith(" all") else None
            found[kind][way] = fit(way, [row for row in of_kind if way in ways_of(row)], like)
    return found


def choose(table: dict[str, dict[str, Costs]], row: Row) -> str:
    of_kind, shape = table[kind_of(row)], shape_of(row)
    return min(ways_of(row), key=lambda way: ways.score(way, of_kind[way], shape))


def judged(rows: list[Row]) -> list[tuple[Row, str]]:
    """Rows whose choice is in question, each with the way that is chosen by the others' costs."""
    order = np.random.default_rng(0).permutation(len(rows))
    found = []
    for part in range(PARTS):
        left_out = {int(i) for i in order[part::PARTS]}
        table = fit_all([row for i, row in enumerate(rows) if i not in left_out])
        for i in sorted(left_out):
            if len(ways_of(rows[i])) > 2:
                found.append((rows[i], choose(table, rows[i])))
    return found


def report(found: list[tuple[Row, str]]) -> Table:
    """How choices do, by kind of heads and steps: of the best way that was measured, and of FA3."""
    lines = []
    kinds = [(k, s) for k in WAYS for s in ("decode", "speculation")]
    for kind, step in [*kinds, ("all", "all")]:
        of_kind = [
            (r, w) for r, w in found if kind == "all" or (kind_of(r), r["kind"]) == (kind, step)
        ]
        beside = [
            (peer / row["figures"][way], peer / row["figures"]["ours"])
            for row, way in of_kind
            if (peer := min((v for k, v in row["figures"].items() if k[:3] == "FA3"), default=0))
        ]
        if not beside:
            continue
        best = [
            row["figures"][way] / min(row["figures"][x] for x in ways_of(row))
            for row, way in of_kind
        ]
        chosen, before = (np.array(x) for x in zip(*beside, strict=True))
        lines.append([
            kind, step, len(of_kind), _mean(best), _mean(chosen), np.mean(chosen >= 0.95),
            int(sum(chosen < 0.85)), _mean(before), np.mean(before >= 0.95),
        ])  # fmt: skip
    names = ["heads", "steps", "draws", "of the best", "FA3 / chosen", ">= 0.95", "< 0.85",
             "FA3 / as it was", ">= 0.95"]  # fmt: skip
    return _table(names, lines)


def _table(names: list[str], lines: list[list[Any]]) -> Table:
    found = Table(*names)
    for line in lines:
        found.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in line))
    return found


def _mean(ratios: Any) -> float:
    return math.exp(np.mean(np.log(ratios)))


def rows_of_sweep(path: Path) -> list[Row]:
    """Rows of few queries that `forms_sweep.py` has measured."""
    document = json.loads(path.read_text())
    kept = ("problem", "kind", "heads", "batch", "total_q", "longest_q", "keys", "page_size",
            "dtype", "kv_dtype", "window")  # fmt: skip
    found = []
    for row in document["rows"]:
        if row["kind"] in ("decode", "speculation"):
            figures = {_way(name): x for name, x in row["figures"].items()}
            chip = document["machine"]["gpu"]
            found.append({k: row[k] for k in kept} | {"chip": chip, "figures": figures})
    return found


def _way(name: str) -> str:
    """The name of a way: `forms_sweep.py` says the fewest keys of a piece, too."""
    return re.sub(r"/\d+( all)?$", r"\1", name) if name.startswith("portable") else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--write", action="store_true", help="write the table of costs")
    options = parser.parse_args()
    rows = json.loads(gzip.decompress(DATA.read_bytes()))
    rows += [row for path in options.add for row in rows_of_sweep(path)]
    if options.add:
        text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
        DATA.write_bytes(gzip.compress(text.encode(), mtime=0))
    console = Console()
    console.print(report(judged(rows)))
    table = fit_all(rows)
    chosen: dict[str, int] = {}
    for row in rows:
        way = f"{kind_of(row)} {choose(table, row)}" if ways_of(row) else "none"
        chosen[way] = chosen.get(way, 0) + 1
    lines = [
        [kind, way, costs.spread, chosen.get(f"{kind} {way}", 0)]
        for kind, of_kind in table.items()
        for way, costs in of_kind.items()
    ]
    console.print(_table(["heads", "way", "spread", "chosen"], lines))
    if options.write:
        text = ",\n".join(
            f'  "{kind}": {{\n'
            + ",\n".join(f'   "{way}": {json.dumps(list(costs))}' for way, costs in of.items())
            + "\n  }"
            for kind, of in table.items()
        )
        names = json.dumps(list(Costs._fields))
        ways.TABLE.write_text(f'{{\n "names": {names},\n "costs": {{\n{text}\n }}\n}}\n')


if __name__ == "__main__":
    main()
