"""The table of sizes in CONTRIBUTING.md: files and lines of each backend, blank ones included.

    python tools/sizes.py            write it
    python tools/sizes.py --print    print it

A test allows a few per cent between the table and the tree, so that small changes leave it alone.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- generated: sizes -->\n", "<!-- end -->"

FOLDERS = {
    "CPU kernels": "csrc",
    "CPU": "torch_paged_attn/backends/cpu",
    "Triton and Gluon": "torch_paged_attn/backends/triton",
    "TPU": "torch_paged_attn/backends/tpu",
    "Neuron": "torch_paged_attn/backends/neuron",
}
SOURCES = {".py", ".cpp", ".h"}


def sizes() -> dict[str, tuple[int, int]]:
    """Files and lines of each backend."""
    found = {}
    for name, folder in FOLDERS.items():
        files = [x for x in (ROOT / folder).rglob("*") if x.suffix in SOURCES]
        found[name] = len(files), sum(x.read_bytes().count(b"\n") for x in files)
    return found


def table() -> str:
    """As Markdown."""
    lines = ["| backend | folder | files | lines |", "|---|---|---|---|"]
    for name, (files, count) in sizes().items():
        lines.append(f"| {name} | `{FOLDERS[name]}` | {files} | {count:,} |")
    return "\n".join(lines)


def written() -> dict[str, tuple[int, int]]:
    """`sizes` as the page has them."""
    rows = PAGE.read_text().split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name: (int(files), int(count.replace(",", ""))) for name, _, files, count in cells}


def main() -> None:
    if "--print" in sys.argv:
        print(table())
        return
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table()}\n\n{END}{rest.split(END, 1)[1]}")


if __name__ == "__main__":
    main()
