"""Conformance: the named problems on one device, each judged by the accuracy rule, in one report.

    python -m torch_paged_attn conformance --device cuda --out report.json

It needs the installed package alone: no source tree, no test runner. docs/hardware.md says how to
send the report of a chip on which the kernels have not run.
"""

import fnmatch
import importlib
import json
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import __version__, reference
from torch_paged_attn.integrations import _versions
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.testing.accuracy import Truth, assert_accurate
from torch_paged_attn.testing.gradients import assert_accurate_gradients
from torch_paged_attn.testing.inputs import Call, build, hostile_gradients
from torch_paged_attn.testing.problem import Problem
from torch_paged_attn.testing.problems import EXTENDED, PROBLEMS
from torch_paged_attn.testing.selected_problems import SELECTED, SELECTED_DIFFERENTIABLE
from torch_paged_attn.testing.training_problems import (
    DIFFERENTIABLE,
    EXTENDED_DIFFERENTIABLE,
    TRAINING,
)

# device type -> the module that brings the device to torch
BROUGHT_BY = {"xla": "torch_xla", "tpu": "torch_tpu", "neuron": "torch_neuronx"}
RESULTS = ("right", "wrong", "refused", "error")
# of a failure's text
MOST_CHARACTERS = 2000


def agrees(problem: Problem, device: torch.device) -> None:
    """The results of a call fulfil the accuracy rule, and a second run has the same bits."""
    call, moved = build(problem), build(problem).to(device)
    first, second = ([x.cpu() for x in moved.run()] for _ in range(2))
    assert_accurate(first[0], first[1], _truth(call, device))
    _assert_same_bits(first, second)


def gradients_agree(problem: Problem, device: torch.device) -> None:
    """The same for the gradients of a call."""
    call = build(problem)
    exact = getattr(reference, call.op)(**call.args)
    truth = call.gradients(*hostile_gradients(call, *exact))
    out, lse = (x.cpu() for x in call.to(device).run())
    backward = call.backward(*hostile_gradients(call, out, lse), out, lse).to(device)
    first, second = ([x.cpu() for x in backward.run()] for _ in range(2))
    assert_accurate_gradients(first, truth)
    _assert_same_bits(first, second)


def writes(problem: Problem, device: torch.device) -> None:
    """New tokens for every second slot of a problem's cache, in an order that no page has, have the
    bits of the reference; a slot of -1 is skipped.
    """
    import torch_paged_attn

    args = build(problem).args
    caches = args["k"].clone(), args["v"].clone()
    num_pages, heads, page_size = caches[0].shape[:3]
    slots = torch.arange(0, num_pages * page_size, 2, dtype=torch.int64).flip(0)
    slots[1] = -1
    g = torch.Generator().manual_seed(0)
    key, value = (
        torch.randn(len(slots), heads, cache.shape[3], generator=g).to(problem.dtype)
        for cache in caches
    )
    scales = (torch.tensor(0.25),) * 2 if caches[0].dtype.itemsize == 1 else (None, None)
    found = caches[0].to(device, copy=True), caches[1].to(device, copy=True)
    k_scale, v_scale = (None if x is None else x.to(device) for x in scales)
    new_keys, new_values, to = (x.to(device) for x in (key, value, slots))
    torch_paged_attn.reshape_and_cache(new_keys, new_values, found, to, k_scale, v_scale)
    reference.reshape_and_cache_split(key, value, *caches, slots, *scales)
    _assert_same_bits([x.cpu() for x in found], caches)


def is_written(problem: Problem) -> bool:
    """Whether `writes` takes a problem's cache: keys and values are tensors of their own."""
    is_plain = problem.dtype.itemsize > 1 and problem.v_dtype is None and not problem.latent
    return problem.page_size is not None and is_plain


ATTENTION = PROBLEMS | EXTENDED | TRAINING
# name of a test -> the problems that it takes, and the function
TESTS: dict[str, tuple[dict[str, Problem], Callable[[Problem, torch.device], None]]] = {
    "attention": (ATTENTION, agrees),
    "gradients": (DIFFERENTIABLE | EXTENDED_DIFFERENTIABLE, gradients_agree),
    "selected_attention": (SELECTED, agrees),
    "selected_gradients": (SELECTED_DIFFERENTIABLE, gradients_agree),
    "write": ({n: p for n, p in PROBLEMS.items() if is_written(p)}, writes),
}


def conformance(device: str, only: str = "*") -> Iterator[dict[str, Any]]:
    """Run the named problems on a device. Yields the report after each of them, the same dictionary
    each time, so that a crash of the device loses one result.

    Args:
        device: such as "cpu", "cuda", "xla", "tpu" or "neuron".
        only: a pattern of shell for `test/problem`, such as "gradients/*".

    Returns:
        An iterator of the report: versions, device, `counts` of `right`, `wrong`, `refused` (the
        backend does not support the call and says so) and `error`, and `results` by problem.

    Raises:
        ValueError: no backend serves the device, or no problem has such a name.
    """
    place = _device(device)
    backend, reason = serving_device(place)
    if backend is None:
        raise ValueError(f"conformance(): device {device!r} has no backend: {reason}")
    cases = [
        (test, name, problem, check)
        for test, (problems, check) in TESTS.items()
        for name, problem in problems.items()
        if fnmatch.fnmatch(f"{test}/{name}", only)
    ]
    if not cases:
        raise ValueError(
            f"conformance(): expected only to match a test/problem, got {only!r};"
            f" tests are {', '.join(TESTS)}"
        )
    known: dict[str, Any] = {
        "torch_paged_attn": __version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "packages": {x: v for x in _versions.TESTED if (v := _versions.installed(x))},
        "device": described(place),
        "backend": backend.name,
        "experimental": backend.untested(),
        "cases": len(cases),
        "counts": dict.fromkeys(RESULTS, 0),
        "results": {},
    }
    for test, name, problem, check in cases:
        start = time.perf_counter()
        result, text = judged(check, problem, place)
        known["counts"][result] += 1
        known["results"][f"{test}/{name}"] = {
            "result": result,
            "text": text[:MOST_CHARACTERS],
            "seconds": round(time.perf_counter() - start, 3),
        }
        yield known


def judged(check: Callable[..., None], problem: Problem, device: torch.device) -> tuple[str, str]:
    """One of RESULTS, and the text of what was raised."""
    try:
        check(problem, device)
    except AssertionError as error:
        return "wrong", str(error)
    except NotImplementedError as error:
        return "refused", str(error)
    except Exception as error:  # the report is of any failure
        return "error", f"{type(error).__name__}: {error}"
    return "right", ""


def described(device: torch.device) -> dict[str, Any]:
    """A device's type, its name and the limits that its driver states."""
    found: dict[str, Any] = {"type": device.type}
    if device.type == "cpu":
        from torch_paged_attn.ops import _library

        try:
            isa, isas = _library.instruction_sets()
        except NotImplementedError:  # CPU tensors are an emulator's
            return found
        return found | {"instruction_set": isa, "instruction_sets": isas}
    if device.type == "cuda":
        of_device = torch.cuda.get_device_properties(device)
        names = [name for name in dir(of_device) if not name.startswith("_")]
        values = {name: getattr(of_device, name) for name in names}
        found |= {n: x for n, x in values.items() if isinstance(x, str | int | float)}
        return found | {"cuda": torch.version.cuda, "hip": torch.version.hip}
    if device.type in ("xla", "tpu"):
        import jax

        found["kinds"] = [x.device_kind for x in jax.devices()]
    return found


def write_report(known: dict[str, Any], file: Path) -> None:
    """Replace a file by the report. At any time the file holds a whole report."""
    draft = file.with_name(f"{file.name}.part")
    draft.write_text(json.dumps(known, indent=1) + "\n")
    draft.replace(file)


def run(device: str, only: str, file: Path) -> bool:
    """Write the report to a file and a line for each problem to the terminal. Returns whether
    something is right and nothing is wrong or failed.
    """
    known: dict[str, Any] = {}
    for known in conformance(device, only):
        write_report(known, file)
        name, last = next(reversed(known["results"].items()))
        text = last["text"].partition("\n")[0]
        print(f"{len(known['results'])}/{known['cases']} {name}: {last['result']} {text}".rstrip())
    counts = known["counts"]
    print(f"{file}: " + ", ".join(f"{count} {result}" for result, count in counts.items()))
    return counts["right"] > 0 and counts["wrong"] + counts["error"] == 0


def _device(name: str) -> torch.device:
    kind = name.partition(":")[0]
    if kind in BROUGHT_BY:
        importlib.import_module(BROUGHT_BY[kind])
    return torch.device(name)


def _truth(call: Call, device: torch.device) -> Truth:
    """Hopper's products of 8-bit numbers are added up in fewer bits than float32 has."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return call.truth(cuts_off=is_hopper)


def _assert_same_bits(found: list[Tensor], wanted: list[Tensor] | tuple[Tensor, ...]) -> None:
    for i, (x, y) in enumerate(zip(found, wanted, strict=True)):
        bits_x, bits_y = (t.contiguous().view(torch.uint8) for t in (x, y))
        assert torch.equal(bits_x, bits_y), f"tensor {i} has other bits than before"
