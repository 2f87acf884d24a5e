"""Kernels are compiled without LLVM's flags on vectors, for which Triton makes wrong code.

LLVM computes two 32-bit numbers of a thread by one instruction where it can, also where only one
of the two is used: `shl nuw <2 x i32> %x, <i32 31, i32 1>` for `2 * x[1]`. The flag `nuw` (no bits
are lost) is true of the number that is used. NVPTX keeps the two in one 64-bit register, and takes
the flag as leave to shift the lower one in 64 bits: its upper bits reach the number that is used
(Triton 3.6; seen on Hopper as a tail mask that hid keys). Without flags each of the two is shifted
in 32 bits. Flags only permit: to drop them is always right.
"""

import hashlib
import re
import threading
from collections.abc import Callable
from typing import Any

from triton import knobs

_FLAGS = re.compile(r"( = \w+)(?: (?:nuw|nsw|exact|disjoint|nneg|samesign))+(?=(?: \w+)? <\d+ x )")

# Triton's hook that may replace the stages of a compilation; not in every version
_HOOK = "add_stages_inspection_hook"
_HAS_HOOK = hasattr(knobs.runtime, _HOOK)


def drop_vector_flags(llvm_ir: str) -> str:
    """LLVM's code without the flags of integer instructions on vectors."""
    return _FLAGS.sub(r"\1", llvm_ir)


class _WithoutVectorFlags:
    """A context in which Triton compiles without them, in any number of threads at once. A hook
    that was there before is called, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> None:
        with self._lock:
            if self._entered == 0 and _HAS_HOOK:
                self._before = getattr(knobs.runtime, _HOOK)
                setattr(knobs.runtime, _HOOK, self._hook)
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0 and _HAS_HOOK:
                setattr(knobs.runtime, _HOOK, self._before)

    def _hook(self, *arguments: Any) -> Any:
        """Called with (backend, stages, options, language, capability). From Triton 3.7 on, also
        without arguments, for the hook's part of a kernel's key.
        """
        before = self._before
        if not arguments:
            key = __name__ if before is None else f"{__name__} {before()}"
            return key, hashlib.sha256(key.encode()).hexdigest()
        if before is not None:
            before(*arguments)
        stages = arguments[1]
        if "ptx" in stages:
            make = stages["llir"]
            stages["llir"] = lambda source, metadata: drop_vector_flags(make(source, metadata))
        return None


without_vector_flags = _WithoutVectorFlags()
