"""`python -m torch_paged_attn [--json]`: what is installed, and which backend answers which op.

`python -m torch_paged_attn hub` prints what the environment variable LOCAL_KERNELS has to be for
Hugging Face programs to run on it (integrations/hub).
"""

import argparse
import importlib.metadata
import json
import platform
import sys
from typing import Any

import torch

from torch_paged_attn import __version__
from torch_paged_attn.integrations.hub import local_kernels
from torch_paged_attn.ops import _library
from torch_paged_attn.ops.backend import serving

# device -> the dispatch key its tensors carry
DEVICES = {
    "cpu": "CPU",
    "cuda / rocm": "CUDA",
    "tpu / neuron (torch_xla)": "XLA",
    "tpu / neuron (native)": "PrivateUse1",
}
PACKAGES = ("torch", "triton", "jax", "nki", "transformers", "rich", "matplotlib")


def installed(package: str) -> str | None:
    """Version of an installed package, without importing it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def missing(key: str) -> str | None:
    """Why no device of a dispatch key is here; None if one is, or if its backend has to say."""
    if key != "CUDA" or torch.cuda.is_available():
        return None
    build = torch.version.cuda or torch.version.hip
    return f"torch {torch.__version__} finds no GPU here" + (
        "" if build else ": it is built without CUDA and ROCm"
    )


def answer(key: str) -> dict[str, Any]:
    """Which backend answers on one dispatch key, or why none does."""
    backend, reason = serving(key)
    if (no_device := missing(key)) is not None:
        backend, reason = None, "; ".join(text for text in (no_device, reason) if text)
    if backend is None:
        return {"backend": None, "ops": [], "reason": reason}
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = [name for name in _library.OPS if has(f"paged_attn::{name}", key)]
    return {"backend": backend.name, "ops": ops, "reason": None, "notes": backend.notes()}


def report() -> dict[str, Any]:
    """The contents of the report."""
    devices = {device: answer(key) for device, key in DEVICES.items()}
    cpu = devices["cpu"]
    if cpu["backend"] == "cpu":
        cpu["instruction_set"] = torch.ops.paged_attn.cpu_isa()
        cpu["instruction_sets"] = torch.ops.paged_attn.cpu_isas().split()
    return {
        "torch_paged_attn": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {package: installed(package) for package in PACKAGES},
        "devices": devices,
    }


def main() -> None:
    summary = __doc__.splitlines()[0].partition(": ")[2]
    parser = argparse.ArgumentParser(prog="python -m torch_paged_attn", description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit status 1 without CPU kernels")
    verbs = parser.add_subparsers(dest="verb", metavar="")
    verbs.add_parser("hub", help="print LOCAL_KERNELS for Hugging Face programs")
    asked = parser.parse_args()
    if asked.verb == "hub":
        print(local_kernels())
        return
    known = report()
    without_kernels = known["devices"]["cpu"]["backend"] != "cpu"
    if asked.json:
        print(json.dumps(known, indent=2))
        sys.exit(asked.check and without_kernels)
    print(
        f"torch_paged_attn {known['torch_paged_attn']},"
        f" Python {known['python']}, {known['machine']}"
    )
    print("packages  " + "  ".join(f"{p} {v or '-'}" for p, v in known["packages"].items()))
    for device, found in known["devices"].items():
        isa = ""
        if "instruction_set" in found:
            isa = f" ({found['instruction_set']}; has {', '.join(found['instruction_sets'])})"
        print(f"\n{device}: {found['backend'] or 'none'}{isa}")
        if found["reason"]:
            print(f"  {found['reason']}")
        for op in found["ops"]:
            print(f"  paged_attn::{op}")
        for note in found.get("notes", ()):
            print(f"  {note}")
    sys.exit(asked.check and without_kernels)


if __name__ == "__main__":
    main()
