"""The schemas of the operators, as the last release had them: `schemas.txt`.

    PYTHONPATH=. python tools/schemas.py            # write it; refuses what would break callers
    PYTHONPATH=. python tools/schemas.py --break    # write it all the same, for a new major version

An operator may get arguments, behind the last positional one or by name, with a default that keeps
old results. Nothing else may change: no name, type, default or result, and no order of positional
arguments.
"""

import argparse
import re
import sys
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).parents[1] / "schemas.txt"
HEADER = (
    "# Schemas of the operators, kept by tools/schemas.py; CHANGELOG says what a version covers."
)


def current() -> dict[str, str]:
    """The public operators by name."""
    from torch_paged_attn.ops import _library

    return dict(sorted(_library.SCHEMAS.items()))


def kept() -> dict[str, str]:
    """Those of the file."""
    lines = [x for x in FILE.read_text().splitlines() if x and not x.startswith("#")]
    return {x[: x.index("(")]: x for x in lines}


class Schema(NamedTuple):
    """A schema's arguments, as they are written, and the types of its results."""

    positional: list[str]
    keyword_only: list[str]
    results: list[str]

    @classmethod
    def of(cls, text: str) -> "Schema":
        """From its text."""
        arguments, results = text[text.index("(") :].split(" -> ")
        listed = _split(arguments)
        at = listed.index("*") if "*" in listed else len(listed)
        return cls(listed[:at], listed[at + 1 :], [x.split()[0] for x in _split(results)])


def _split(text: str) -> list[str]:
    """What stands between parentheses, at the commas that are in no list."""
    parts = re.split(r",\s*(?![^\[]*\])", text.strip()[1:-1])
    return [x.strip() for x in parts if x.strip()]


def _name(argument: str) -> str:
    return argument.split()[1].partition("=")[0]


def breaks(old: str, new: str) -> list[str]:
    """What a caller of `old` would not find in `new`."""
    before, after = Schema.of(old), Schema.of(new)
    was, now = before.positional, after.positional
    found = [f"{x} is now {y}" for x, y in zip(was, now, strict=False) if x != y]
    found += [f"{x} is gone" for x in was[len(now) :]]
    # callers by name do not depend on the order
    found += [f"{x} is gone" for x in before.keyword_only if x not in after.keyword_only]
    names = {_name(x) for x in (*was, *before.keyword_only)}
    added = [x for x in (*now[len(was) :], *after.keyword_only) if _name(x) not in names]
    found += [f"{x} is new and has no default" for x in added if "=" not in x]
    if before.results != after.results:
        found.append(f"it returned {before.results}, and returns {after.results}")
    return found


def all_breaks(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """What breaks, operator by operator."""
    gone = [f"{name} is gone" for name in old if name not in new]
    both = [name for name in old if name in new]
    return gone + [f"{name}: {x}" for name in both for x in breaks(old[name], new[name])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--break", action="store_true", dest="may_break")
    asked = parser.parse_args()
    new = current()
    found = all_breaks(kept(), new) if FILE.exists() else []
    if found and not asked.may_break:
        sys.exit("\n".join([f"{FILE.name} stays as it is:", *found]))
    FILE.write_text("\n".join([HEADER, *new.values()]) + "\n")


if __name__ == "__main__":
    main()
