"""`Path`: the kernel on which a backend would run a call, and why; and the log of its first run."""

import dataclasses
import logging
from typing import Any

logger = logging.getLogger("torch_paged_attn")


@dataclasses.dataclass(frozen=True)
class Path:
    """What one backend would do with a call."""

    backend: str
    kernel: str | None
    """The kernel, or the two that run parts of the call; None if the backend has none."""

    reason: str
    """Why the backend chooses this kernel, or why it has none."""

    details: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further choices, under names that the backend gives them: instruction set, tiles, splits."""

    workspace: int | None = None
    """Bytes of memory besides arguments and results, all threads together; None if unknown."""


_announced: set[tuple[str, ...]] = set()


def announce(op: str, backend: str, kernel: str, reason: str = "") -> None:
    """Log which kernel runs calls of an op: one INFO line, when it does so for the first time."""
    key = op, backend, kernel
    if key in _announced:
        return
    _announced.add(key)
    why = f", because {reason}" if reason else ""
    logger.info("paged_attn::%s: %s, %s%s", op, backend, kernel, why)


def announce_experimental(backend: str, reason: str | None) -> None:
    """Log at a backend's first use that it is experimental on this machine's chip: an INFO line."""
    if reason is None or (backend,) in _announced:
        return
    _announced.add((backend,))
    logger.info(
        "the %s backend is experimental on this device: %s. `python -m torch_paged_attn conformance"
        " --device ...` tests it here",
        backend,
        reason,
    )
