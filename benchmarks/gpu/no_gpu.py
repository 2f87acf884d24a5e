"""A Hopper GPU as far as the host can tell, on a machine that has none: for timing the host's part.

Kernels are compiled for sm_90, Triton's own launcher is built and called, and the CUDA driver under
it is a library of empty functions. Tensors lie in the CPU's memory, and nothing computes: results
are whatever memory held. Everything between the operator and the driver is the package's own.

`Launches` has the driver note what it is handed: tests compare the ways to a launch by it.
"""

import contextlib
import ctypes
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

# what Triton asks of the driver; `most` is the shared memory that a program may have
DRIVER = """
#include "cuda.h"
#include <string.h>
static const int most = 232448;
CUresult cuInit(unsigned flags) { return 0; }
CUresult cuDriverGetVersion(int *version) { *version = 13020; return 0; }
CUresult cuDeviceGetCount(int *count) { *count = 1; return 0; }
CUresult cuGetErrorString(CUresult r, const char **s) { *s = "no GPU"; return 0; }
CUresult cuDeviceGet(CUdevice *d, int i) { *d = 0; return 0; }
CUresult cuDeviceGetAttribute(int *x, CUdevice_attribute a, CUdevice d) { *x = most; return 0; }
CUresult cuCtxGetCurrent(CUcontext *c) { *c = (CUcontext)1; return 0; }
CUresult cuCtxSetCurrent(CUcontext c) { return 0; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { *c = (CUcontext)1; return 0; }
CUresult cuCtxGetLimit(size_t *x, CUlimit l) { *x = 0; return 0; }
CUresult cuCtxSetLimit(CUlimit l, size_t x) { return 0; }
CUresult cuCtxGetDevice(CUdevice *d) { *d = 0; return 0; }
CUresult cuModuleLoadData(CUmodule *m, const void *image) { *m = (CUmodule)1; return 0; }
CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *is) { *is = 0; return 0; }
CUresult cuModuleUnload(CUmodule m) { return 0; }
static size_t functions = 0;
CUresult cuModuleGetFunction(CUfunction *f, CUmodule m, const char *n)
{ *f = (CUfunction)++functions; return 0; }
CUresult cuFuncGetAttribute(int *x, CUfunction_attribute a, CUfunction f)
{ *x = a == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0; return 0; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int x) { return 0; }
CUresult cuFuncSetCacheConfig(CUfunction f, CUfunc_cache c) { return 0; }
CUresult cuPointerGetAttribute(void *x, CUpointer_attribute a, CUdeviceptr p)
{ memcpy(x, &p, sizeof p); return 0; }
CUresult cuOccupancyMaxActiveClusters(int *n, CUfunction f, const CUlaunchConfig *c)
{ *n = 1; return 0; }
typedef struct {
  void *pointer;
  unsigned type, rank, box[5], swizzle, fill;
  cuuint64_t sizes[5], strides[4];
} Map;
CUresult cuTensorMapEncodeTiled(CUtensorMap *m, CUtensorMapDataType t, cuuint32_t rank, void *p,
    const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
    const cuuint32_t *steps, CUtensorMapInterleave i, CUtensorMapSwizzle s,
    CUtensorMapL2promotion l, CUtensorMapFloatOOBfill f)
{
  Map map = {.pointer = p, .type = t, .rank = rank, .swizzle = s, .fill = f};
  memcpy(map.box, box, rank * sizeof *box);
  memcpy(map.sizes, sizes, rank * sizeof *sizes);
  memcpy(map.strides, strides, (rank - 1) * sizeof *strides);
  memcpy(m, &map, sizeof map);
  return 0;
}
enum { FUNCTIONS = 1024, PARAMETERS = 256 };
static int counts[FUNCTIONS], bytes[FUNCTIONS][PARAMETERS];
unsigned char noted[1 << 20];
size_t noted_bytes = 0;
void describe(size_t f, int count, const int *sizes)
{ counts[f] = count; memcpy(bytes[f], sizes, count * sizeof *sizes); }
static void note(const void *from, size_t size)
{ memcpy(noted + noted_bytes, from, size); noted_bytes += size; }
CUresult cuLaunchKernelEx(const CUlaunchConfig *c, CUfunction f, void **args, void **more)
{
  if (!functions || !counts[(size_t)f]) return 0;
  long long head[] = {(size_t)f, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX,
    c->sharedMemBytes, (size_t)c->hStream, c->numAttrs ? c->attrs[0].id : -1};
  note(head, sizeof head);
  for (int i = 0; i < counts[(size_t)f]; i++) note(args[i], bytes[(size_t)f][i]);
  return 0;
}
"""

MULTIPROCESSORS = 132


def build_driver() -> ctypes.CDLL:
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
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    return ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def pretend() -> ctypes.CDLL:
    """Have this process believe in the GPU, and the operators take the Triton kernels on the CPU.
    Before anything else of the package's Triton backend is imported. Returns the driver.
    """
    if torch.cuda.is_available():
        sys.exit("this machine has a GPU: benchmarks/gpu/host.py times calls on it")
    driver = build_driver()
    _use_driver()
    _replace_runtime()
    _bind_operators()
    return driver


class TensorMap(NamedTuple):
    """What a tensor map says; Triton's numbers for types, swizzles and padding."""

    address: int
    dtype: int
    box: tuple[int, ...]
    swizzle: int
    fill: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def read(cls, data: bytes) -> "TensorMap":
        """From the driver's `Map`."""
        address, dtype, rank, *numbers = struct.unpack_from("<QII7I4x9Q", data)
        box, (swizzle, fill), sizes, strides = (
            *(numbers[:5], numbers[5:7], numbers[7:12]), numbers[12:],
        )  # fmt: skip
        shape = tuple(box[:rank]), swizzle, fill, tuple(sizes[:rank]), tuple(strides[: rank - 1])
        return cls(address, dtype, *shape)


class Launch(NamedTuple):
    """What the driver is handed for a launch. `parameters`: numbers and tensor maps."""

    kernel: str
    grid: tuple[int, ...]
    threads: int
    shared: int
    attribute: int  # the first one, such as a dependent launch; -1: none
    parameters: tuple[int | TensorMap, ...]


# the sizes of a kernel's parameters as PTX names them, and how many bytes an element has
_ENTRY = re.compile(r"\.entry \w+\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[bufs](\d+)[^,\[]*(?:\[(\d+)\])?")
MAP_BYTES = 128


class Launches:
    """The launches of a process, from `pretend` on: `take` returns those since the last `take`."""

    def __init__(self, driver: ctypes.CDLL) -> None:
        from triton.compiler.compiler import CompiledKernel

        self._driver = driver
        # the driver's number of a function -> its name, and the sizes of its parameters
        self._functions: dict[int, tuple[str, list[int]]] = {}
        load = CompiledKernel._init_handles

        def noted(kernel: Any) -> None:
            load(kernel)
            text = _ENTRY.search(kernel.asm["ptx"])[1]
            sizes = [int(n) // 8 * int(m or 1) for n, m in _PARAMETER.findall(text)]
            self._functions[kernel.function] = kernel.name, sizes
            given = (
                ctypes.c_size_t(kernel.function),
                len(sizes),
                (ctypes.c_int * len(sizes))(*sizes),
            )
            driver.describe(*given)

        CompiledKernel._init_handles = noted

    def take(self) -> list[Launch]:
        """What has been launched since the last time."""
        size = ctypes.c_size_t.in_dll(self._driver, "noted_bytes")
        data = ctypes.string_at(self._driver.noted, size.value)
        size.value, at, found = 0, 0, []
        while at < len(data):
            function, *grid, threads, shared, _, attribute = struct.unpack_from("<8q", data, at)
            at += 64
            name, sizes = self._functions[function]
            parameters = []
            for length in sizes:
                part = data[at : at + length]
                is_map = length == MAP_BYTES
                parameters.append(
                    TensorMap.read(part) if is_map else int.from_bytes(part, "little")
                )
                at += length
            found.append(Launch(name, tuple(grid), threads, shared, attribute, tuple(parameters)))
        return found


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
    launch_cache.refuse_host = lambda pointers: None
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
