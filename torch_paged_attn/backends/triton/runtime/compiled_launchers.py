"""Launchers of Triton 3.6, built at once for all kernels that were compiled elsewhere.

Triton 3.6 has the host's C compiler build a launcher for each signature of a kernel, 0.3 s each,
when a kernel is loaded; later versions have one for all. A launcher is code for the host, which a
folder of kernels does not hold: it holds the signatures, and Triton's own function writes the C.
"""

import os
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from triton.runtime.driver import driver

from torch_paged_attn.backends.triton.runtime.launcher import VERSION

# one launcher: a type for each argument, or a list of types; and whether tensor maps are described
Signature = list[Any]
IS_NEEDED = VERSION < (3, 7)


def signature_of(compiled: Any) -> Signature:
    """What Triton builds the launcher of a compiled kernel for."""
    is_described = bool(getattr(compiled.metadata, "tensordesc_meta", None))
    return [list(compiled.src.signature.values()), is_described]


def are_signatures(given: Any) -> bool:
    """Whether it is a list of signatures. Triton looks types up in tables of its own."""

    def are_types(x: Any) -> bool:
        return isinstance(x, str) or (isinstance(x, list) and all(map(are_types, x)))

    return isinstance(given, list) and all(
        isinstance(x, list)
        and len(x) == 2
        and isinstance(x[0], list)
        and are_types(x[0])
        and isinstance(x[1], bool)
        for x in given
    )


def build(signatures: list[Signature]) -> list[Future[None]]:
    """Have threads build the launchers that Triton's cache lacks, by as many compilers as there are
    cores, while the first kernels are loaded. One that is missing when a kernel needs it, Triton
    builds as ever, and raises if it cannot.
    """
    if not IS_NEEDED or not signatures:
        return []
    from triton.backends.nvidia.driver import CudaDriver

    if not isinstance(driver.active, CudaDriver):
        return []
    pool = ThreadPoolExecutor(min(len(signatures), os.cpu_count() or 1))
    building = [pool.submit(_build, x) for x in signatures]
    pool.shutdown(wait=False)
    return building


def _build(signature: Signature) -> None:
    from triton.backends.nvidia import driver as nvidia

    types, is_described = signature
    maps = sum(isinstance(x, str) and x.startswith("tensordesc") for x in types)
    described: list[Any] | None = [{}] * maps if is_described else None
    source = nvidia.make_launcher({}, dict(enumerate(map(_tuples, types))), described)
    nvidia.compile_module_from_src(
        src=source,
        name="__triton_launcher",
        library_dirs=nvidia.library_dirs(),
        include_dirs=nvidia.include_dirs,
        libraries=nvidia.libraries,
    )


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list) else x
