"""The report of `python -m torch_paged_attn`: verdict, packages, the backend of each device."""

import contextlib
import importlib
import importlib.util
import os
import platform
import sys
import time
from typing import Any

import torch
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls

from torch_paged_attn import __version__, _processor
from torch_paged_attn.integrations import _versions
from torch_paged_attn.ops import _library
from torch_paged_attn.ops.backend import dispatch_keys, serving

# dispatch key -> the devices whose tensors carry it
DEVICES = {
    "CPU": "cpu",
    "CUDA": "cuda / rocm",
    "XLA": "tpu / neuron (torch_xla)",
    "PrivateUse1": "tpu / neuron (native)",
}
# Neuron's packages -> the module that each installs
NEURON = {"nki": "nki", "neuronx-cc": "neuronxcc", "torch-neuronx": "torch_neuronx"}
PACKAGES = (*_versions.TESTED, *NEURON, "sentence-transformers", "flash-attn", "rich", "matplotlib")


def missing(key: str) -> str | None:
    """Why torch finds no device for a dispatch key. None if it finds one, and for every key but
    CUDA, whose backends look for the device themselves.
    """
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
    return {
        "backend": backend.name,
        "experimental": backend.untested(),
        "ops": ops,
        "reason": None,
        "notes": backend.notes(),
    }


def self_test(device: str) -> dict[str, Any]:
    """Run a small mixed batch (one decode, one prompt chunk) and compare it with the reference.

    Returns:
        `milliseconds`, of the call without the comparison, and `error`; one of the two is None. On
        a GPU most of the time is spent in Triton's compiler.
    """
    from torch_paged_attn.testing import Problem, assert_accurate, build

    problem = Problem("self_test", ((1, 20), (6, 3)), 2, 1, 16, dtype=torch.bfloat16, page_size=16)
    call = build(problem)
    try:
        moved = call.to(torch.device(device))
        start = time.perf_counter()
        out, lse = (x.cpu() for x in moved.run())
        milliseconds = round(1e3 * (time.perf_counter() - start), 1)
        assert_accurate(out, lse, call.truth())
    except Exception as error:  # the report shows any error and continues
        return {"milliseconds": None, "error": f"{type(error).__name__}: {error}"}
    return {"milliseconds": milliseconds, "error": None}


def why_no_amx(
    flags: set[str], isa: str, missing: dict[str, str], forced: str | None
) -> str | None:
    """Why the kernels do not use the processor's AMX; None if they do, or if it has none.

    flags: the processor's features; isa: the instruction set in use; missing: for each instruction
    set that cannot be used, the reason; forced: the value of PAGED_ATTN_CPU_ISA.
    """
    if isa == "amx" or not {"amx_tile", "amx_bf16"} <= flags:
        return None
    if "amx" in missing:
        return f"the processor has AMX, which is not used: {missing['amx']}"
    return f"the processor has AMX, and PAGED_ATTN_CPU_ISA={forced} asks for {isa}"


def neuron_stubs() -> list[str]:
    """A message for each of Neuron's packages that is installed and cannot be imported."""
    found = []
    for package, module in NEURON.items():
        version = _versions.installed(package)
        if version is None:
            continue
        try:
            importlib.import_module(module)
        except Exception as error:  # a stub raises ImportError, a broken package whatever it likes
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            found.append(
                f"{package} {version} does not import ({reason}): PyPI has stubs under the names of"
                " Neuron's packages, the packages themselves are in Neuron's own repository"
            )
    return found


def vllm_custom() -> dict[str, Any] | None:
    """The class that is registered as vLLM's attention backend CUSTOM once vLLM has loaded its
    plugins (`owner`), and what is wrong with that (`error`). None if vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        return None
    from torch_paged_attn.integrations.vllm import BACKEND

    try:
        # vLLM logs to stdout, where `--json` prints the report
        with contextlib.redirect_stdout(sys.stderr):
            from vllm.plugins import load_general_plugins
            from vllm.v1.attention.backends.registry import AttentionBackendEnum

            load_general_plugins()
            custom = AttentionBackendEnum.CUSTOM
            owner = custom.get_path() if custom.is_overridden() else None
    except Exception as error:  # the report has to work in a broken environment
        return {"owner": None, "error": f"vllm does not import: {type(error).__name__}: {error}"}
    problem = None
    if owner is None:
        problem = (
            "no plugin has registered vLLM's CUSTOM: torch-paged-attn is not installed where vLLM"
            " looks for plugins, or VLLM_PLUGINS leaves torch_paged_attn out"
        )
    elif owner != BACKEND:
        problem = f"vLLM's CUSTOM belongs to {owner}, so torch_paged_attn leaves it alone"
    return {"owner": owner, "error": problem}


def report() -> dict[str, Any]:
    """The report as a dictionary that `json` can print."""
    keys = dict.fromkeys([*DEVICES, *dispatch_keys()])
    devices = {DEVICES.get(key, key.lower()): answer(key) for key in keys}
    cpu = devices["cpu"]
    problems, notes = [], []
    try:
        isa, isas = _library.instruction_sets() if cpu["backend"] == "cpu" else ("", [])
    except RuntimeError as error:  # PAGED_ATTN_CPU_ISA names one that is not here
        cpu |= {"backend": None, "ops": [], "reason": str(error).partition("\n")[0], "notes": []}
    if cpu["backend"] == "cpu":
        cpu["instruction_set"] = isa
        cpu["instruction_sets"] = isas
        lines = torch.ops.paged_attn.cpu_isas_missing().splitlines()
        missing = dict(line.split(": ", 1) for line in lines)
        cpu["threads"] = torch.get_num_threads()
        forced = os.environ.get("PAGED_ATTN_CPU_ISA")
        if (reason := why_no_amx(_processor.flags(), isa, missing, forced)) is not None:
            notes.append(reason)
    else:
        problems.append(cpu["reason"])
    for device, name in (("cpu", "cpu"), ("cuda / rocm", "cuda")):
        if devices[device]["backend"] is not None:
            devices[device]["self_test"] = tested = self_test(name)
            if tested["error"]:
                problems.append(f"the self-test of {device} failed: {tested['error']}")
    packages = {package: _versions.installed(package) for package in PACKAGES}
    for package in _versions.TESTED:
        version = packages[package]
        if version and (said := _versions.compared(package, version)) != "tested":
            (problems if _versions.is_too_old(package, version) else notes).append(said)
    notes += neuron_stubs()
    custom = vllm_custom()
    if custom and custom["error"]:
        problems.append(custom["error"])
    return {
        "torch_paged_attn": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": packages,
        "tested": {name: f"{x.oldest} to {x.newest}" for name, x in _versions.TESTED.items()},
        "devices": devices,
        "flash_attention_impl": current_flash_attention_impl(),
        "flash_attention_impls": list_flash_attention_impls(),
        "vllm_custom": custom,
        "notes": notes,
        "problems": problems,
    }


def verdict(known: dict[str, Any]) -> str:
    """One line: ready, and on which devices; or not ready, and why."""
    name = f"torch_paged_attn {known['torch_paged_attn']}"
    if problems := known["problems"]:
        more = f" (and {len(problems) - 1} more below)" * (len(problems) > 1)
        return f"{name} is not ready: {problems[0]}{more}"
    devices = known["devices"].items()
    ready = [
        f"{device} by {x['backend']}" + " (experimental)" * bool(x["experimental"])
        for device, x in devices
        if x["backend"]
    ]
    return f"{name} is ready: {', '.join(ready)}"


def printed(known: dict[str, Any]) -> str:
    """The report as text, the verdict first."""
    lines = [
        verdict(known),
        "",
        f"Python {known['python']}, {known['machine']}",
        "packages  " + "  ".join(f"{p} {v or '-'}" for p, v in known["packages"].items()),
        "tested with  " + ", ".join(f"{p} {v}" for p, v in known["tested"].items()),
        f"torch.nn.attention's flash attention: {known['flash_attention_impl'] or 'its own'}"
        f" (to choose from: {', '.join(known['flash_attention_impls'])})",
    ]
    if known["vllm_custom"]:
        lines.append(f"vLLM's CUSTOM: {known['vllm_custom']['owner'] or 'not registered'}")
    for device, found in known["devices"].items():
        isa = ""
        if "instruction_set" in found:
            has = ", ".join(found["instruction_sets"])
            isa = f" ({found['instruction_set']}; has {has}; {found['threads']} threads)"
        lines += ["", f"{device}: {found['backend'] or 'none'}{isa}"]
        lines += [f"  {found['reason']}"] * bool(found["reason"])
        if reason := found.get("experimental"):
            lines.append(f"  experimental: {reason}")
        lines += [f"  paged_attn::{op}" for op in found["ops"]]
        lines += [f"  {note}" for note in found.get("notes", ())]
        if (tested := found.get("self_test")) and tested["error"] is None:
            lines.append(f"  self-test: passed, its call took {tested['milliseconds']} ms")
    lines += ["", *(f"note: {note}" for note in known["notes"])] * bool(known["notes"])
    lines += ["", *(f"problem: {x}" for x in known["problems"])] * bool(known["problems"])
    return "\n".join(lines)
