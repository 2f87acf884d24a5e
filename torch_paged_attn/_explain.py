"""`explain`: which kernel a call would use, why, and what it allocates, without running it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from torch_paged_attn.ops import _library, paths
from torch_paged_attn.ops.backend import Backend, backends, serving_device
from torch_paged_attn.ops.paths import Path


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`."""

    op: str
    device: torch.device
    """The device of the tensors."""

    backend: str | None
    """The backend that runs the call on this device, or None."""

    reason: str
    """Why no backend runs the call; empty if one does."""

    paths: dict[str, Path]
    """Backend name -> what it would do with the call if the tensors were on its device."""

    result_bytes: int
    """Size in bytes of the result tensors, which every call allocates."""

    @property
    def path(self) -> Path | None:
        """What the backend that runs the call does with it; None if there is no such backend."""
        return None if self.backend is None else self.paths[self.backend]

    def __str__(self) -> str:
        answers = self.backend or f"no backend, because {self.reason}"
        lines = [f"paged_attn::{self.op} on {self.device}: {answers};"]
        lines[0] += f" results of {self.result_bytes:,} bytes"
        for path in self.paths.values():
            lines.append(f"  {path.backend}: {path.kernel or 'none'}, because {path.reason}")
            lines += [f"    {name}: {value}" for name, value in path.details.items()]
            if path.workspace is not None:
                lines.append(f"    workspace: {path.workspace:,} bytes")
        return "\n".join(lines)


def explain(
    op: str | Callable[..., Any], *args: Any, target: str | None = None, **kwargs: Any
) -> Explanation:
    """Which kernel each backend would use for a call, and why.

    >>> print(torch_paged_attn.explain("flash_varlen", q, k, v, cu_seqlens_q, causal=True))

    Nothing is computed and no result is allocated. Tensors may be fake or on the meta device:
    sequence lengths are then unknown, and all sequences are assumed to be equally long.

    Args:
        op: `"flash_varlen"` or another public op, or its function.
        args, kwargs: its arguments.
        target: a GPU, as its architecture and number of multiprocessors, such as `"sm90:132"`;
            None is the GPU of this machine.

    Raises:
        The errors that the op itself raises for wrong arguments, ValueError among them.
    """
    name = op if isinstance(op, str) else getattr(op, "__name__", repr(op))
    given = paths.bound(name, args, kwargs)
    device = paths.tensors_of(given)[0].device
    with torch.no_grad(), unset_fake_temporarily():
        _check(name, given)
        results = paths.function_of(name)(**_on_meta(given))
        call = paths.call_of(name, given)
        found = {x.name: _path(x, name, call, target) for x in reversed(backends())}
    backend, reason = serving_device(device)
    if device.type == "cuda" and not torch.cuda.is_available():
        backend, reason = None, f"torch {torch.__version__} finds no GPU here"
    if device.type == "meta":
        backend, reason = None, "tensors on the meta device have none"
    if not isinstance(results, tuple):  # one tensor, or None
        results = () if results is None else (results,)
    nbytes = sum(x.numel() * x.itemsize for x in results)
    answers = None if backend is None else backend.name
    return Explanation(name, device, answers, reason, found, nbytes)


def _path(backend: Backend, op: str, call: Any, target: str | None) -> Path:
    """`path_of`, with a backend's reason to be experimental among its details."""
    path = backend.path_of(op, call, target)
    if path.kernel is None or (reason := backend.untested(target)) is None:
        return path
    return dataclasses.replace(path, details=path.details | {"experimental": reason})


def _check(op: str, given: dict[str, Any]) -> None:
    """Raise for metadata that the contract forbids."""
    if op == "reshape_and_cache" and isinstance(given["kv_cache"], tuple | list):
        return  # of both overloads: the public function checks a pair of caches itself
    if op == "merge_states" and isinstance(given["out_a"], tuple | list):
        op, given = "merge_states.list", {"outs": given["out_a"], "lses": given["lse_a"]}
    check, _ = _library.OPS[op]
    names = inspect.signature(check).parameters
    has_all = any(x.kind == x.VAR_KEYWORD for x in names.values())
    check(**{name: x for name, x in given.items() if has_all or name in names})


def _on_meta(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with every tensor replaced by a meta tensor of its shape, strides and dtype."""

    def moved(x: Any) -> Any:
        if isinstance(x, tuple | list):
            return type(x)(map(moved, x))
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return {name: moved(x) for name, x in given.items()}
