"""Kernels that were compiled elsewhere, which Triton finds before it would compile them.

Triton asks a cache manager for the files of a kernel by its key. While it looks up a kernel of
ours, that manager is `Compiled`, which looks into the folders of `environment.KERNELS` first, and
then asks the manager that was there before. A folder that does not fit, and a file that is
damaged, is named by one warning, and what it would have held is compiled as without it.
"""

import contextlib
import functools
import logging
import threading
import warnings
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.cache import CacheManager, FileCacheManager
from triton.runtime.driver import driver

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime import compiled_folder, compiled_launchers

logger = logging.getLogger(__name__)
_lock = threading.Lock()


def folders_for(gpu: GPUTarget) -> tuple[compiled_folder.Folder, ...]:
    """The folders whose kernels run on a GPU of this process."""
    with _lock:
        return _fitting(environment.KERNELS, gpu)


@functools.cache
def _fitting(paths: tuple[Path, ...], gpu: GPUTarget) -> tuple[compiled_folder.Folder, ...]:
    here, found, elsewhere = compiled_folder.made_with(gpu), [], []
    for path in paths:
        try:
            folder = compiled_folder.Folder.read(path)
            if (reason := compiled_folder.difference(folder.made_with, here)) is None:
                found.append(folder)
            elif folder.made_with.get("architecture") == compiled_folder.architecture_of(gpu):
                _warn(path, reason)
            else:
                elsewhere.append((path, reason))
        except compiled_folder.Unfit as unfit:
            _warn(path, str(unfit))
    if not found:  # several folders may be for several kinds of GPUs
        for path, reason in elsewhere:
            _warn(path, reason)
    return tuple(found)


@functools.cache
def _with_launchers(
    folders: tuple[Path, ...], gpu: GPUTarget
) -> tuple[compiled_folder.Folder, ...]:
    """The same, whose launchers are being built."""
    found = _fitting(folders, gpu)
    for folder in found:
        compiled_launchers.build(folder.launchers)
    return found


def _warn(path: Path, reason: str) -> None:
    warnings.warn(
        f"compiled kernels in {path} are not used: {reason}; Triton compiles them here",
        RuntimeWarning,
        stacklevel=2,
    )


@functools.cache
def _warn_of_kernel(path: Path, reason: str) -> None:
    warnings.warn(
        f"a compiled kernel in {path} is not used: {reason}; Triton compiles it here",
        RuntimeWarning,
        stacklevel=2,
    )


def _find(key: str, name: str) -> dict[str, str] | None:
    gpu = driver.active.get_current_target()
    with _lock:
        folders = _with_launchers(environment.KERNELS, gpu)
    for folder in folders:
        try:
            files = folder.find(key)
        except compiled_folder.Unfit as unfit:
            _warn_of_kernel(folder.root, str(unfit))
            continue
        if files is not None and name in files:
            return files
    if folders:
        logger.info("%s (%s) is in no folder of compiled kernels", name.removesuffix(".json"), key)
    return None


class Compiled(CacheManager):
    """The files of one key. What is written goes to the manager that Triton has otherwise."""

    # Triton's own; `_before` of the context that is entered
    otherwise: type[CacheManager] = FileCacheManager

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self.key, self._is_looked_up = key, not (override or dump)
        self._options = {"override": override, "dump": dump}

    @functools.cached_property
    def _other(self) -> CacheManager:
        return self.otherwise(self.key, **self._options)

    def get_file(self, filename: str) -> str | None:
        return self._other.get_file(filename)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        return self._other.put(data, filename, binary)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of a kernel's files by their names; `filename` is that of its description."""
        if self._is_looked_up and (found := _find(self.key, filename)) is not None:
            return found
        return self._other.get_group(filename)

    def put_group(self, filename: str, group: dict[str, str]) -> Any:
        return self._other.put_group(filename, group)


class _CompiledFirst:
    """A context in which Triton asks `Compiled`, in any number of threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._before: dict[str, Any] = {}

    def __enter__(self) -> None:
        with self._lock:
            if self._entered == 0:
                # what was set in Python, which the environment's TRITON_CACHE_MANAGER is not
                self._before = {n: x for n, x in vars(knobs.cache).items() if n == _NAME}
                Compiled.otherwise = knobs.cache.manager_class or FileCacheManager
                knobs.cache.manager_class = Compiled
            self._entered += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                vars(knobs.cache).pop(_NAME)
                vars(knobs.cache).update(self._before)


_NAME = "manager_class"
_compiled_first = _CompiledFirst()


def compiled_first() -> contextlib.AbstractContextManager[None]:
    """A context in which Triton looks for kernels in the folders first, if there are any."""
    return _compiled_first if environment.KERNELS else contextlib.nullcontext()
