"""Write compile_commands.json, by which editors (clangd) know how each C++ file is compiled.

python tools/compile_commands.py        in the environment that the kernels are built in
"""

import contextlib
import json
import runpy
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]


def commands() -> list[dict[str, Any]]:
    """An entry for each source file, with the flags that setup.py gives it on this machine."""
    given: dict[str, Any] = {}
    arguments = mock.patch.object(sys, "argv", ["setup.py", "build_ext"])
    with contextlib.chdir(ROOT), arguments, mock.patch("setuptools.setup", given.update):
        build = runpy.run_path("setup.py")
    extension, *_ = given["ext_modules"]
    flags = {
        f"csrc/isa/{isa}.cpp": [*build["KERNEL_FLAGS"], *own]
        for isa, own in build["ISA_FLAGS"].items()
    }
    headers = [f"-I{folder}" for folder in extension.include_dirs]
    flags |= {file: [*extension.extra_compile_args, *headers] for file in extension.sources}
    return [
        {"directory": str(ROOT), "file": file, "arguments": ["c++", *x, "-c", file]}
        for file, x in flags.items()
    ]


if __name__ == "__main__":
    (ROOT / "compile_commands.json").write_text(json.dumps(commands(), indent=1) + "\n")
