"""A folder of compiled kernels that travels from one machine to another.

It holds data alone. `manifest.json` says with what the kernels were compiled, and lists the files
of each with their SHA-256: Triton's binary and its description, `KEY/NAME.cubin` and
`KEY/NAME.json`. KEY is Triton's own key, a hash of the kernel's source, constants and options, of
Triton's files, of the assembler and of the environment, so a kernel that is found is the one that
Triton would compile. What is said of these beside the key names the reason if none is found.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime.cache import triton_key

import torch_paged_attn
from torch_paged_attn.backends.triton.runtime.compiled_launchers import are_signatures

MANIFEST, FORMAT = "manifest.json", 1

_KEY = re.compile(r"[A-Z2-7]{32,128}")
_NAME = re.compile(r"\w[\w.-]{0,200}")
_SHA256 = re.compile(r"[0-9a-f]{64}")

# what has to agree, and its name in a warning
_TITLES = {
    "architecture": "the GPU",
    "triton": "Triton",
    "python": "Python",
    "triton_build": "the files of Triton",
    "compiler": "the assembler",
    "options": "Triton's options",
    "environment": "the environment",
    "package": "torch_paged_attn",
    "sources": "the sources of the kernels",
}


class Unfit(ValueError):
    """A folder, or a kernel in it, cannot be used; the message says why."""


@functools.cache
def sources() -> str:
    """A hash of the Triton backend's files."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parents[1].rglob("*.[pj]*[yn]")):  # Python and JSON
        code.update(file.read_bytes())
    return code.hexdigest()


def architecture_of(gpu: GPUTarget) -> str:
    """`sm_90`, `gfx942`."""
    return f"sm_{gpu.arch}" if gpu.backend == "cuda" else str(gpu.arch)


@functools.cache
def made_with(gpu: GPUTarget) -> dict[str, Any]:
    """All that Triton's keys depend on but for a kernel's arguments."""
    backend = make_backend(gpu)
    given = {"debug": knobs.runtime.debug}
    options = dict(vars(backend.parse_options(given)))
    libraries = options.pop("extern_libs", None) or ()
    options["extern_libs"] = {name: _hash(Path(path).read_bytes()) for name, path in libraries}
    return {
        "architecture": architecture_of(gpu),
        "triton": triton.__version__,
        "python": f"{platform.python_version_tuple()[0]}.{platform.python_version_tuple()[1]}",
        "triton_build": _hash(triton_key().encode()),
        "compiler": " ".join(backend.hash().split()),
        "options": {name: str(x) for name, x in sorted(options.items())},
        "environment": dict(sorted(get_cache_invalidating_env_vars().items())),
        "package": torch_paged_attn.__version__,
        "sources": sources(),
    }


def difference(made: dict[str, Any], here: dict[str, Any]) -> str | None:
    """The first of `made_with` that differs, in words; None if all agree."""
    for name, title in _TITLES.items():
        was, now = made.get(name), here[name]
        if was == now:
            continue
        if isinstance(was, dict) and isinstance(now, dict):
            changed = [x for x in sorted({*was, *now}) if was.get(x) != now.get(x)]
            return f"{title} differs in {', '.join(changed)}"
        if _SHA256.fullmatch(str(now)):
            return f"{title} differ from those that it was compiled with"
        return f"{title} was {was} when it was compiled and is {now} here"
    return None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclasses.dataclass(frozen=True)
class Folder:
    """The contents of a manifest."""

    root: Path
    made_with: dict[str, Any]
    # key -> name of a file -> SHA-256
    kernels: dict[str, dict[str, str]]
    # a hash of what a warm-up is for -> those of its calls that take all kernels
    calls: dict[str, list[int]]
    # what the kernels' launchers are built for: see compiled_launchers.py
    launchers: list[Any]

    @classmethod
    def read(cls, root: Path) -> Folder:
        """Raises Unfit if there is no manifest, or one that is damaged or of another format."""
        try:
            data = json.loads((root / MANIFEST).read_bytes())
        except (OSError, ValueError) as error:
            raise Unfit(f"no {MANIFEST} can be read there ({error})") from None
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise Unfit(f"{MANIFEST} is not of format {FORMAT}")
        given: list[Any] = [data.get(x) for x in _PARTS]
        for part, is_right in zip(given, _PARTS.values(), strict=True):
            if not is_right(part):
                raise Unfit(f"{MANIFEST} is damaged")
        return cls(root, *given)

    def write(self) -> None:
        """Write the manifest, in one step for whoever reads it meanwhile."""
        data = {"format": FORMAT, **{name: getattr(self, name) for name in _PARTS}}
        self.root.mkdir(parents=True, exist_ok=True)
        beside = self.root / f".{MANIFEST}.{os.getpid()}"
        beside.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n")
        beside.replace(self.root / MANIFEST)

    def add(self, key: str, files: Iterable[Path]) -> None:
        """Copy a kernel's files into the folder."""
        self.kernels[key] = {}
        (self.root / key).mkdir(parents=True, exist_ok=True)
        for file in files:
            data = file.read_bytes()
            beside = self.root / key / f".{file.name}.{os.getpid()}"
            beside.write_bytes(data)
            beside.replace(self.root / key / file.name)
            self.kernels[key][file.name] = _hash(data)

    def find(self, key: str) -> dict[str, str] | None:
        """The paths of a kernel's files by their names, or None if it is not here. Raises Unfit if
        a file is missing, damaged, or outside the folder.
        """
        if key not in self.kernels:
            return None
        found, root = {}, self.root.resolve()
        for name, expected in self.kernels[key].items():
            path = (root / key / name).resolve()
            if not path.is_relative_to(root):
                raise Unfit(f"{key}/{name} is a link to a file outside the folder")
            try:
                data = path.read_bytes()
            except OSError as error:
                raise Unfit(f"{key}/{name} cannot be read ({error.strerror})") from None
            if _hash(data) != expected:
                raise Unfit(f"{key}/{name} is damaged: its SHA-256 is not the manifest's")
            found[name] = str(path)
        return found


def _are_kernels(given: Any) -> bool:
    return isinstance(given, dict) and all(
        _KEY.fullmatch(key)
        and isinstance(files, dict)
        and all(_NAME.fullmatch(n) and _SHA256.fullmatch(str(x)) for n, x in files.items())
        for key, files in given.items()
    )


def _are_calls(given: Any) -> bool:
    return isinstance(given, dict) and all(
        _SHA256.fullmatch(key)
        and isinstance(calls, list)
        and all(type(i) is int and i >= 0 for i in calls)
        for key, calls in given.items()
    )


def _is_dict(given: Any) -> bool:
    return isinstance(given, dict)


# the parts of a manifest, in the order of `Folder`'s fields
_PARTS = {
    "made_with": _is_dict,
    "kernels": _are_kernels,
    "calls": _are_calls,
    "launchers": are_signatures,
}
