"""A Hopper GPU as far as the host can tell, on a machine that has none: for timing the host's part.

Kernels are compiled for sm_90, Triton's own launcher is built and called, and the CUDA driver under
it is a library of empty functions. Tensors lie in the CPU's memory, and nothing computes: results
are whatever memory held. Everything between the operator and the driver is the package's own.
"""

import contextlib
import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# what Triton asks of the driver; `most` is the shared memory that a program may have
DRIVER = """
#include "cuda.h"
#include <string.h>
static const int most = 232448;
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "no GPU"; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return 0; }
CUresult cuDeviceGetAttribute(int *x, CUdevice_attribute a, CUdevice d) { *x = most; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuCtxGetLimit(size_t *x, CUlimit l) { *x = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t x) { return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)1; return 0; }
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n)
{ *f = (CUfunction)1; return 0; }
CUresult cuFuncGetAttribute(int *x, CUfunction_attribute a, CUfunction f)
{ *x = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int x) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CUresult cuPointerGetAttribute(void *x, CUpointer_attribute a, CUdeviceptr p)
{ memcpy(x, &p, sizeof p); return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c)
{ *n = 1; return 0; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t rank, void *p,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle s,
    CUtensorMapL2promotion l, CUtensorMapFloatOOBfill f)
{ return 0; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **more)
{ return 0; }
"""

MULTIPROCESSORS = 132


def build_driver() -> None:
    """Compile the empty driver, and load it before Triton asks the system for one."""
    import triton.backends.nvidia as nvidia

    folder = Path(tempfile.gettempdir()) / "paged_attn_no_gpu"
    folder.mkdir(exist_ok=True)
    library = folder / "libcuda.so.1"
    source = folder / "driver.c"
    source.write_text(DRIVER)
    include = Path(nvidia.__file__).with_name("include")
    command = [os.environ.get("CC", "gcc"), "-shared", "-fPIC", "-O2", "-w", f"-I{include}"]
    named = f"-Wl,-soname,{library.name}"
    subprocess.run([*command, named, str(source), "-o", str(library)], check=True)
    # a library of this name that is loaded already is what dlopen finds
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)


def pretend() -> None:
    """Have this process believe in the GPU, and the operators take the Triton kernels on the CPU.
    Before anything else of the package's Triton backend is imported.
    """
    if torch.cuda.is_available():
        sys.exit("this machine has a GPU: benchmarks/gpu/host.py times calls on it")
    build_driver()
    _use_driver()
    _replace_runtime()
    _bind_operators()


def _use_driver() -> None:
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime.driver import driver

    torch.cuda.current_device = lambda: 0

    class NoGPU(CudaDriver):
        def __init__(self) -> None:
            super().__init__()
            self.get_current_device = lambda: 0
            self.get_current_stream = lambda device: 0

        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

    driver.set_active(NoGPU())


def _replace_runtime() -> None:
    from torch_paged_attn.backends.triton.runtime import launch_cache, target, workspace

    chip = target.Target.of_arch("sm90", MULTIPROCESSORS)
    target._of_gpu = lambda index: chip
    launch_cache.IS_KNOWN = launch_cache.HAS_KNOWN_MAPS
    launch_cache.current_device = lambda: 0
    launch_cache.current_stream = workspace.current_stream = lambda device: 0
    workspace._is_capturing = lambda: False
    workspace._empty_on_current_device = torch._C._dynamo.guards._empty_strided_cpu

    def quick(make: Callable[..., None], flag: str) -> Callable[..., None]:
        def init(self: Any, *args: Any) -> None:
            make(self, *args)
            setattr(self, flag, True)

        return init

    allocation, scratch = workspace.Allocation, workspace.ScratchOf
    allocation.__init__ = quick(allocation.__init__, "_is_quick")
    scratch.__init__ = quick(scratch.__init__, "_is_kept")

    def grown(self: Any) -> Any:
        counters = torch.zeros(max(self._num_counters, workspace.LEAST), dtype=torch.int32)
        parts = torch.empty(max(self._num_parts, workspace.LEAST_PARTS))
        held = workspace.Scratch(parts, counters)
        workspace._scratch.put((None, 0), held)
        return held

    scratch._grown = grown


def _bind_operators() -> None:
    from torch_paged_attn.backends.triton import Triton
    from torch_paged_attn.ops import _library

    Triton.dispatch_keys = "CUDA", "CPU"
    for name in _library.OPS:
        _library.LIBRARY.impl(name, _library._lazy("CPU", name), "CPU", allow_override=True)


@contextlib.contextmanager
def replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Within it, a module's name stands for something else."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
