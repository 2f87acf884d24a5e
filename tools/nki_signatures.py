"""Writes what NKI's documentation publishes as signatures, for tests/neuron/test_published.py.

    python tools/nki_signatures.py CHECKOUT RELEASE

CHECKOUT is one of github.com/aws-neuron/aws-neuron-sdk, whose nki/api/nki holds the stubs that
AWS makes the pages from. Names that the emulator's tables have are written, an optional parameter
with a question mark. Other releases in the file stay: those whose stubs are not public, whose pages
were read one by one, name these pages.
"""

import ast
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "neuron" / "published_signatures.json"
STUBS = {"nisa": "isa/__init__.py", "nl": "language/__init__.py"}


def parameters(function: ast.FunctionDef) -> str:
    """Names in order, with a question mark where there is a default."""
    names = [a.arg for a in function.args.args if a.arg != "self"]
    required = len(names) - len(function.args.defaults)
    return ", ".join(name + "?" * (i >= required) for i, name in enumerate(names))


def main(checkout: str, release: str) -> None:
    sys.path.insert(0, str(ROOT / "tools"))
    from nki_emulator.signatures import ISA, LANGUAGE, METHODS

    tables = {"nisa": ISA, "nl": LANGUAGE}
    found = {}
    for module, file in STUBS.items():
        tree = ast.parse((Path(checkout) / "nki" / "api" / "nki" / file).read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in tables[module]:
                found[f"{module}.{node.name}"] = parameters(node)
            if isinstance(node, ast.ClassDef) and node.name == "NkiTensor":
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name in METHODS:
                        found[f"NkiTensor.{method.name}"] = parameters(method)
    published = json.loads(FILE.read_text()) if FILE.exists() else {}
    published[release] = {"source": "aws-neuron/aws-neuron-sdk, nki/api/nki", "signatures": found}
    text = json.dumps(dict(sorted(published.items())), indent=1, sort_keys=True)
    FILE.write_text(text + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
