"""The package's kernels with two versions of Triton: which are chosen, and what each compiles.

    python tools/triton_versions.py .triton-3.9.0 --choices
    python tools/triton_versions.py .triton-3.9.0 --chips sm90 sm80 --only 'bf16' --out TABLE.md

The first version is the installed one, the second is in the folder (`make test-triton` makes it).
`--choices` compares the kernels, grids, constants and compiler options of each call of
tests/helpers/compiled_calls.py, and fails if any differs. Otherwise kernels are compiled for
the chips, which need not be here, and compared by registers, spills, shared memory and code.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HELPERS = ROOT / "tests" / "helpers"
CHIPS = ("sm90", "sm80", "gfx942")
# what a kernel's versions may differ in without a row of their own in the table
FEW_BYTES, CODE = 16, 0.25

Kernel = dict[str, Any]


def run(folder: Path | None, *command: str) -> str:
    """What a script prints with the Triton in a folder, or with the installed one."""
    paths = [
        *([str(folder.resolve())] if folder else []),
        str(ROOT),
        str(ROOT / "tools"),
        str(HELPERS),
    ]
    environ = {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, *command], env=os.environ | environ, capture_output=True, text=True
    )
    if done.returncode not in (0, 1) or not done.stdout:
        sys.exit(done.stderr)
    return done.stdout


def plain(x: Any) -> Any:
    """A kernel's argument without addresses: numbers, texts, and types of tensors."""
    if isinstance(x, tuple | list):
        return [*map(plain, x)]
    if (box := getattr(x, "block_shape", None)) is not None:
        return "map", *box, *getattr(x, "filled", ())
    return str(x.dtype) if hasattr(x, "dtype") else x


def print_choices(chips: list[str]) -> None:
    """Print, as JSON, the launches of each call on each chip."""
    import cross_compile
    import triton
    from compiled_calls import CALLS
    from triton.runtime.jit import JITFunction

    launches: list[str] = []

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | options
        numbers = {name: plain(x) for name, x in given.items()}
        launches.append(f"{kernel.__name__} {grid} {numbers}")

    JITFunction.run = note  # type: ignore[method-assign]
    found = {}
    for chip in chips:
        with cross_compile.elsewhere(chip):
            for name, make in CALLS.items():
                launches.clear()
                make()()
                found[f"{chip} {name}"] = [*launches]
    print(json.dumps({"triton": triton.__version__, "launches": found}))


def compare_choices(folder: Path, chips: list[str]) -> None:
    """Exit with the calls whose launches differ, if there are any."""
    first, second = (
        json.loads(run(which, __file__, ".", "--print-choices", "--chips", *chips))
        for which in (None, folder)
    )
    names = f"Triton {first['triton']} and {second['triton']}"
    others = [
        f"{call}: {launches} and {second['launches'][call]}"
        for call, launches in first["launches"].items()
        if launches != second["launches"][call]
    ]
    if others:
        sys.exit("\n".join([f"{names} take other kernels:", *others]))
    print(f"{names} take the same kernels for {len(first['launches'])} calls")


def compiled(folder: Path | None, chip: str, only: str, processes: int) -> dict[Any, Kernel]:
    """What a Triton makes of the kernels for a chip, by call, kernel and number."""
    with tempfile.TemporaryDirectory() as kept:
        out = Path(kept) / "kernels.json"
        arguments = ["--only", only, "--processes", str(processes), "--json", str(out)]
        run(folder, str(HELPERS / "cross_compile.py"), chip, *arguments)
        kernels = json.loads(out.read_text())
    return by_launch(kernels)


def by_launch(kernels: list[Kernel]) -> dict[Any, Kernel]:
    """Kernels by call, name and number among the call's of that name."""
    found: dict[Any, Kernel] = {}
    for kernel in kernels:
        number = 0
        while (key := (kernel["call"], kernel["name"], number)) in found:
            number += 1
        found[key] = kernel
    return found


def differs(a: Kernel, b: Kernel) -> bool:
    """Whether two versions of a kernel differ in more than how registers are numbered."""
    is_other_code = abs(b["code"] / a["code"] - 1) > CODE
    return is_other_code or any(
        abs(a[name] - b[name]) > FEW_BYTES for name in ("spills", "shared", "scratch")
    )


def table(
    chip: str, names: tuple[str, str], pairs: dict[Any, tuple[Kernel, Kernel]]
) -> Iterator[str]:
    """The lines of a chip's table: sums over all kernels, then those that differ."""

    def total(which: int, name: str) -> int:
        return sum(pair[which][name] for pair in pairs.values())

    kinds = ("registers", "spills", "shared", "code", "matrix_instructions")
    first, second = names
    yield f"### {chip}: {len(pairs)} kernels"
    yield ""
    yield f"| | {first} | {second} |"
    yield "|---|---|---|"
    for kind in kinds:
        sums = f"{total(0, kind):,} | {total(1, kind):,}"
        yield f"| {kind.replace('_', ' ')}, all together | {sums} |"
    spilled = [sum(pair[i]["spills"] > 0 for pair in pairs.values()) for i in (0, 1)]
    yield f"| kernels that spill | {spilled[0]} | {spilled[1]} |"
    scratch = [sum(pair[i]["scratch"] > 0 for pair in pairs.values()) for i in (0, 1)]
    yield f"| kernels that need scratch memory | {scratch[0]} | {scratch[1]} |"
    yield ""
    rows = {key: pair for key, pair in pairs.items() if differs(*pair)}
    if not rows:
        return
    yield f"Kernels that differ ({first}, {second}):"
    yield ""
    yield "| call | kernel | registers | spilled bytes | shared bytes | code bytes |"
    yield "|---|---|---|---|---|---|"
    for (call, name, _), (a, b) in rows.items():
        cells = [f"{a[x]:,}, {b[x]:,}" for x in ("registers", "spills", "shared", "code")]
        yield f"| {call} | `{name}` | " + " | ".join(cells) + " |"
    yield ""


def version_in(folder: Path | None) -> str:
    """The version of Triton in a folder, or of the installed one."""
    return run(folder, "-c", "import triton; print(triton.__version__)").strip()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where another Triton lies")
    parser.add_argument("--chips", nargs="+", default=[*CHIPS])
    parser.add_argument("--choices", action="store_true", help="compare the kernels chosen")
    parser.add_argument("--print-choices", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default=".", help="a pattern of the calls")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, help="a file for the table")
    options = parser.parse_args()
    if options.print_choices:
        print_choices(options.chips)
        return
    if options.choices:
        compare_choices(options.folder, options.chips)
        return
    names = version_in(None), version_in(options.folder)
    lines = []
    for chip in options.chips:
        first, second = (
            compiled(which, chip, options.only, options.processes)
            for which in (None, options.folder)
        )
        pairs = {key: (kernel, second[key]) for key, kernel in first.items()}
        lines += table(chip, names, pairs)
        print("\n".join(lines[-len(pairs) :]), flush=True)
    if options.out:
        options.out.write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main()
