"""Processes in which Triton does not interpret, whatever the tests' own process does.

They are forked by one that has imported torch and Triton, which takes seconds. This module imports
neither: a process takes the environment that its tests have set before it imports what reads it.
"""

import concurrent.futures
import gc
import multiprocessing
import os
from multiprocessing import forkserver
from unittest import mock


def _begin(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment, TRITON_INTERPRET="0")
    import torch

    torch.set_num_threads(1)
    # compilers make objects without end, of which few are garbage that has to be looked for
    gc.freeze()
    gc.set_threshold(50_000)


def workers(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes in which `cross_compile.compile_call` works: for one chip, for those of NVIDIA or
    for those of gfx9. LLVM crashes on float8 for gfx1201 in a process that has compiled for others
    of AMD's.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "triton.experimental.gluon"])
    with mock.patch.dict(os.environ, TRITON_INTERPRET="0"):
        forkserver.ensure_running()
    environment = (dict(os.environ),)
    return concurrent.futures.ProcessPoolExecutor(processes, context, _begin, environment)
