"""Fit the costs by which the fastest way to run a call is chosen (`dispatch/cost_model.py` of the
Triton backend).

    python benchmarks/gpu/fit_ways.py                fit, say how well choices do, write nothing
    python benchmarks/gpu/fit_ways.py --write        the same, and write the table of costs
    python benchmarks/gpu/fit_ways.py --add FILE     add rows that forms_sweep.py has measured
    python benchmarks/gpu/fit_ways.py --only PATTERN fit some ways, and keep the table's other costs
    python benchmarks/gpu/fit_ways.py --tune KIND    fit nothing: change the table's costs of a kind
                                                     a little, so that choices get better

No GPU is needed: the measurements are in `tests/triton/data`. Each row is a serving step
with the microseconds of each way and of FA3. Choices are judged on rows that were left out of the
fit, a fifth at a time, and know what the operator knows: sizes, and a rounded bound of keys.
"""

import argparse
import itertools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy.optimize import least_squares

from torch_paged_attn.backends.triton.dispatch import cost_model as ways
from torch_paged_attn.backends.triton.dispatch.cost_model import Costs, Lengths, Shape
from torch_paged_attn.backends.triton.runtime.target import Target, assume

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
from measured import Row, guess_of, rows_of, shape_of, write

# bytes of memory that a GPU reads in a microsecond
BANDWIDTH = {"NVIDIA H200": 4.3e6, "NVIDIA H100 80GB HBM3": 2.95e6}
# how much a row counts: estimates are those of the first
CHIP_WEIGHT = {"NVIDIA H200": 1.0, "NVIDIA H100 80GB HBM3": 0.6}

# of the ways that were measured, those without which choices were worse
WAYS = {
    "few/d64/b2": ["portable 64/1/5/4", "portable 128/4/5/1", "portable 64/4/5/2", "cut divided",
                   "numbered low", "numbered divided"],
    "few/d128/b2": ["portable 32/1/5/4", "portable 128/4/3/2", "portable 128/8/5/1",
                    "portable 128/4/3/2 all", "dealt low", "numbered low", "cut divided",
                    "numbered divided"],
    "few/d256/b2": ["portable 32/4/5/2", "portable 64/4/3/2", "cut low", "numbered low"],
    "few/d64/b1": ["portable 64/2/5/4", "portable 64/4/5/2", "portable 128/8/5/1", "cut low",
                   "numbered low"],
    "few/d128/b1": ["portable 64/1/5/4", "portable 64/4/5/2", "portable 128/4/3/2",
                    "portable 256/8/1/1", "portable 64/4/5/2 all", "cut low", "dealt low large",
                    "numbered low"],
    "few/d256/b1": ["portable 64/4/5/2", "portable 128/4/3/2", "portable 128/8/5/1", "cut low"],
    "many/d64/b2": ["portable whole", "numbered low", "numbered divided", "numbered small",
                    "listed tall", "cut divided", "cut tall", "dealt three", "numbered three"],
    "many/d128/b2": ["portable whole", "numbered low small", "numbered small", "numbered low",
                     "numbered divided", "numbered tall", "numbered three", "cut divided",
                     "dealt tall", "dealt three"],
    "many/d256/b2": ["numbered low", "numbered tall", "cut low", "cut tall", "dealt tall"],
    "many/d64/b1": ["portable whole", "numbered low", "numbered tall", "cut tall", "unpacked"],
    "many/d128/b1": ["portable whole", "numbered low", "numbered tall", "cut low",
                     "cut low large", "cut tall", "unpacked"],
    "many/d256/b1": ["portable whole", "numbered low", "cut low"],
}  # fmt: skip

# what costs are before anything is measured, and by what factor they may differ (its logarithm)
NONE = 1e-4
PRIOR = {
    "few portable": Costs(6.0, 0.02, 0.5, 0.5, 0.1, 0.3, 0.1, 1.15, 1.0, 0.15, 3.0, 1.0, 0.0),
    "few hopper": Costs(5.0, 0.35, 0.9, 0.02, 0.02, 0.02, 0.3, 1.1, 2.0, 0.1, 2.0, 1.0, 0.0),
    "many portable": Costs(4.0, 0.1, 1.5, 0.5, NONE, 1.0, 0.3, 1.15, 2.0, 0.3, 1.0, 0.3, 0.0),
    "many unpacked": Costs(25.0, 0.3, 2.0, NONE, NONE, NONE, 1.5, 1.5, 2.0, 0.3, 1.0, NONE, 0.0),
    "many hopper": Costs(5.0, 0.3, 0.9, 0.05, NONE, NONE, 0.3, 1.1, 2.0, 0.3, 1.0, 0.3, 0.0),
}
WIDTH = Costs(1.0, 1.0, 2.0, 1.0, 1.0, 1.0, 1.0, 0.15, 1.0, 1.0, 1.0, 1.5, 0.0)
PRIOR_WEIGHT, OUTLIER = 0.05, 0.08
# costs of a tile of keys, whatever the schedule
OF_TILES = ("unit", "load", "odd", "tall", "copied", "memory", "window")
# by how much a logarithm is moved to see what it does
STEP = 1e-4
# by how much more a tile of keys may take than is assumed at first
STEEP = 4.0
# what `tune` changes; differences of logarithms of estimates that are no certain choice; what a
# change of a logarithm costs
TUNED = ("start", "per_doubling", "unit", "load", "odd", "tall", "copied", "memory", "first_part",
         "part", "tile")  # fmt: skip
SOFT, STAY = 0.035, 0.002
# rows that are left out at a time, of all; the quantile of errors that is called spread; what it is
# before anything is measured, and how many rows that counts for
PARTS, SPREAD = 5, 0.85
PRIOR_SPREAD, PRIOR_ROWS = 0.3, 30


class Case(NamedTuple):
    """A row as the estimate knows it."""

    row: Row
    shape: Shape  # as the operator knows it
    sizes: Shape  # the same with its sizes as they are
    guess: tuple[Lengths, ...]  # the lengths that it really has

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def figures(self) -> dict[str, float]:
        """Microseconds of the ways that may be chosen, of those that were measured."""
        return {way: self.row["figures"][way] for way, _ in self.shape.tiles}


def cases_of(rows: list[Row]) -> list[Case]:
    # ways that are in no table yet, too
    ways.ways().update((kind, dict.fromkeys(names)) for kind, names in WAYS.items())  # type: ignore[arg-type]
    with assume(Target.of_arch("sm90", ways.MULTIPROCESSORS)):
        return [Case(row, shape_of(row), shape_of(row, True), guess_of(row)) for row in rows]


def tiles_of(way: str) -> str:
    """The tiles of a way: ways that differ in their schedule alone have the same."""
    if ways.is_portable(way):
        return way.removesuffix(" all")
    return way.partition(" ")[2] or way


def fit(kind: str, names: list[str], cases: list[Case]) -> dict[str, Costs]:
    """The costs of ways with the same tiles, from cases of their kind: a tile of keys takes as long
    in each of them."""
    which = "portable" if ways.is_portable(names[0]) else "hopper"
    which = ways.UNPACKED if names == [ways.UNPACKED] else which
    prior = PRIOR[f"{kind.partition('/')[0]} {which}"]
    of_way = {x: [c for c in cases if x in c.figures] for x in names}
    names = [x for x in names if of_way[x]]
    known = {
        x: [
            (c.sizes._replace(longest=c.row["keys"][2]), c.guess, BANDWIDTH[c.row["chip"]])
            for c in of
        ]
        for x, of in of_way.items()
    }
    measured = {x: np.log([c.row["figures"][x] for c in of]) for x, of in of_way.items()}
    weights = [CHIP_WEIGHT[c.row["chip"]] for x in names for c in of_way[x]]
    # what is fitted: a field of all ways, or of one
    fields = [x for x in Costs._fields[:-1] if getattr(prior, x) > NONE]
    free = [
        (field, of)
        for field in fields
        for of in ([tuple(names)] if field in OF_TILES else [(x,) for x in names])
    ]
    start = np.log([getattr(prior, field) for field, _ in free])
    width = np.array([getattr(WIDTH, field) for field, _ in free])

    def costs_of(way: str, logs: np.ndarray) -> Costs:
        found = {x: math.exp(log) for (x, of), log in zip(free, logs, strict=True) if way in of}
        return Costs(*(found.get(x, 0.0) for x in Costs._fields))

    def errors(way: str, logs: np.ndarray) -> np.ndarray:
        costs = costs_of(way, logs)
        return np.log([ways.estimate(way, costs, *x) for x in known[way]]) - measured[way]

    def of_each(logs: np.ndarray) -> list[np.ndarray]:
        return [errors(x, logs) for x in names]

    def robust(each: list[np.ndarray]) -> np.ndarray:
        off = np.concatenate(each) / OUTLIER
        # an outlier counts by its size, not by its square
        return np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)) * OUTLIER * weights

    def residuals(logs: np.ndarray) -> np.ndarray:
        return np.concatenate([robust(of_each(logs)), PRIOR_WEIGHT * (logs - start) / width])

    def slopes(logs: np.ndarray) -> np.ndarray:
        each, found = of_each(logs), np.zeros((len(weights), len(free)))
        before = robust(each)
        for i, (_, of) in enumerate(free):
            moved = logs + STEP * (np.arange(len(free)) == i)
            changed = [
                errors(x, moved) if x in of else same for x, same in zip(names, each, strict=True)
            ]
            found[:, i] = (robust(changed) - before) / STEP
        return np.concatenate([found, np.diag(PRIOR_WEIGHT / width)])

    # where memory takes longer, nothing says how long products take: begin from above, too
    slower = start + math.log(STEEP) * np.array([field == "unit" for field, _ in free])
    fits = [least_squares(residuals, x, slopes) for x in (start, slower)]
    logs = min(fits, key=lambda x: x.cost).x
    found = {}
    for way in names:
        off = np.abs(errors(way, logs))
        spread = len(off) * float(np.quantile(off, SPREAD)) + PRIOR_ROWS * PRIOR_SPREAD
        spread /= len(off) + PRIOR_ROWS
        costs = costs_of(way, logs)[:-1]
        found[way] = Costs(*(round(x, 4) for x in costs), round(spread, 3))
    return found


def fit_kind(kind: str, names: list[str], cases: list[Case]) -> dict[str, Costs]:
    """The costs of ways of a kind."""
    cases, found = [x for x in cases if x.kind == kind], dict[str, Costs]()
    for tiles in dict.fromkeys(map(tiles_of, names)):
        found |= fit(kind, [x for x in names if tiles_of(x) == tiles], cases)
    return {way: found[way] for way in names if way in found}


def fit_all(cases: list[Case]) -> dict[str, dict[str, Costs]]:
    return {kind: fit_kind(kind, names, cases) for kind, names in WAYS.items()}


def choose(table: dict[str, dict[str, Costs]], case: Case) -> str:
    """The way that a table chooses, of those of which it has costs."""
    known = tuple(x for x in case.shape.tiles if x[0] in table[case.kind])
    scores = ways.scores(case.shape._replace(tiles=known), table)
    return min(scores, key=scores.__getitem__)


def judged(cases: list[Case]) -> list[tuple[Case, str]]:
    """Cases whose choice is in question, each with the way that is chosen by the others' costs."""
    order = np.random.default_rng(0).permutation(len(cases))
    found = []
    for part in range(PARTS):
        left_out = {int(i) for i in order[part::PARTS]}
        table = fit_all([x for i, x in enumerate(cases) if i not in left_out])
        for i in sorted(left_out):
            if len(cases[i].figures) > 2:
                found.append((cases[i], choose(table, cases[i])))
    return found


def tune(cases: list[Case], costs: dict[str, Costs]) -> dict[str, Costs]:
    """Costs near the given ones by which choices of the cases, all of one kind, are better: each
    way is fitted by itself, and two ways that are off in different directions are confused."""
    cases = [x for x in cases if len(x.figures) > 1]
    names, found = [*costs], dict(costs)
    figures = np.array([[x.figures.get(way, math.nan) for way in names] for x in cases])
    lost = np.nan_to_num(np.log(figures / np.nanmin(figures, 1, keepdims=True)))
    scores = np.full(lost.shape, np.inf)

    def scores_of(at: int, of_way: Costs) -> np.ndarray:
        table = {cases[0].kind: {names[at]: of_way}}
        return np.array([
            ways.scores(x.shape._replace(tiles=tiles), table)[names[at]] if tiles else np.inf
            for x in cases
            for tiles in [tuple(tile for tile in x.shape.tiles if tile[0] == names[at])]
        ])  # fmt: skip

    def loss(scores: np.ndarray) -> float:
        chances = np.exp(-(scores - scores.min(1, keepdims=True)) / SOFT)
        return float(((chances * lost).sum(1) / chances.sum(1)).mean())

    for at, way in enumerate(names):
        scores[:, at] = scores_of(at, found[way])
    least, moved, step = loss(scores), dict.fromkeys(itertools.product(names, TUNED), 0.0), 0.16
    while step > 0.03:
        before = least
        for (way, name), sign in itertools.product(moved, (1, -1)):
            by, at = moved[way, name] + sign * step, names.index(way)
            tried = found[way]._replace(**{name: getattr(costs[way], name) * math.exp(by)})
            column = scores_of(at, tried)
            changed = np.concatenate([scores[:, :at], column[:, None], scores[:, at + 1 :]], 1)
            paid = STAY * (by**2 - moved[way, name] ** 2)
            if (reached := loss(changed)) + paid < least - 2e-5:
                least, scores, found[way], moved[way, name] = reached, changed, tried, by
        step /= 1 if least < before else 2
    return {way: Costs(*(round(x, 4) for x in of)) for way, of in found.items()}


def report(found: list[tuple[Case, str]]) -> Table:
    """How choices do, by kind: of the best way that was measured, and of what was chosen then."""
    lines = []
    for kind in [*WAYS, "all"]:
        of_kind = [(x, way) for x, way in found if kind in ("all", x.kind)]
        best = [x.figures[way] / min(x.figures.values()) for x, way in of_kind]
        before = [
            x.row["figures"]["ours"] / min(x.figures.values())
            for x, _ in of_kind
            if "ours" in x.row["figures"]
        ]
        if best and before:
            lines.append([
                kind, len(best), _mean(best), max(best), sum(x > 1.15 for x in best),
                _mean(before), max(before), sum(x > 1.15 for x in before),
            ])  # fmt: skip
    names = ["kind", "steps", "of the best", "worst", "> 1.15", "as it was", "worst", "> 1.15"]
    return _table(names, lines)


def _table(names: list[str], lines: list[list[Any]]) -> Table:
    found = Table(*names)
    for line in lines:
        found.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in line))
    return found


def _mean(ratios: Any) -> float:
    return math.exp(np.mean(np.log(ratios)))


def rows_of_sweep(path: Path) -> list[Row]:
    """Rows that `forms_sweep.py` has measured."""
    document = json.loads(path.read_text())
    kept = ("problem", "kind", "heads", "batch", "total_q", "longest_q", "keys", "page_size",
            "dtype", "kv_dtype", "window", "width", "lengths")  # fmt: skip
    found = []
    for row in document["rows"]:
        figures = {_way(name): x for name, x in row["figures"].items()}
        chip = document["machine"]["gpu"]
        found.append({k: row[k] for k in kept if k in row} | {"chip": chip, "figures": figures})
    return found


def _way(name: str) -> str:
    """The name of a way: `forms_sweep.py` says the fewest keys of a piece, too."""
    return re.sub(r"/\d+( all)?$", r"\1", name) if name.startswith("portable") else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--add", type=Path, nargs="*", default=[], metavar="FILE")
    parser.add_argument("--tune", nargs="*", default=[], metavar="KIND", help="such as few/d128/b1")
    parser.add_argument("--only", default="", help="a pattern of kind and way: fit these alone")
    parser.add_argument("--write", action="store_true", help="write the table of costs")
    options = parser.parse_args()
    rows = rows_of() + [row for path in options.add for row in rows_of_sweep(path)]
    if options.add:
        write(rows)
    cases = cases_of(rows)
    console = Console()
    costs = json.loads(ways.TABLE.read_text())["costs"]
    table = {kind: {x: Costs(*y) for x, y in of.items()} for kind, of in costs.items()}
    if options.tune or options.only:
        for kind, of_kind in WAYS.items():
            asked = [x for x in of_kind if re.fullmatch(options.only, f"{kind} {x}")]
            table[kind] = table.get(kind, {}) | fit_kind(kind, asked, cases)
        for kind in options.tune:
            table[kind] = tune([x for x in cases if x.kind == kind], table[kind])
        console.print(report([(x, choose(table, x)) for x in cases if len(x.figures) > 2]))
    else:
        console.print(report(judged(cases)))
        table = fit_all(cases)
    chosen: dict[str, int] = {}
    for case in cases:
        if case.figures:
            way = f"{case.kind} {choose(table, case)}"
            chosen[way] = chosen.get(way, 0) + 1
    lines = [
        [kind, way, of_way.spread, chosen.get(f"{kind} {way}", 0)]
        for kind, found in table.items()
        for way, of_way in found.items()
    ]
    console.print(_table(["heads", "way", "spread", "chosen"], lines))
    if options.write:
        text = ",\n".join(
            f'  "{kind}": {{\n'
            + ",\n".join(f'   "{way}": {json.dumps(list(costs))}' for way, costs in of.items())
            + "\n  }"
            for kind, of in table.items()
            if of
        )
        names = json.dumps(list(Costs._fields))
        ways.TABLE.write_text(f'{{\n "names": {names},\n "costs": {{\n{text}\n }}\n}}\n')


if __name__ == "__main__":
    main()
