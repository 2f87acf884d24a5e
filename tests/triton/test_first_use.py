"""How many kernels a process compiles whose lengths grow with each call. Without a GPU nothing is
compiled; on one, Triton's own hook counts.
"""

import gc

import cross_compile
import growing_calls
import pytest
import torch
from kernel_counts import counted
from triton import knobs
from triton.runtime.jit import JITFunction

from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.runtime import launch_cache

STEPS, STEPS_ON_GPU, MOST = 200, 24, 6
# chips with Hopper's kernels, with the portable ones alone, and AMD's
ARCHES = ("sm90", "sm80", "gfx942")
# a step is two calls, a forward and a backward, each of which may take as many
TRAINING = [name for name in growing_calls.LOOPS if "training" in name]
# TODO: fewer forms. The portable kernel walks through up to five while a batch grows to 200
# sequences
MORE = {
    ("sm80", "paged_kv_cache"): 7,
    ("gfx942", "paged_kv_cache"): 8,
}
# Kernels that differ in more than a size. Under a layout a step takes all nine: three of a forward,
# six of its backward. A dense forward takes the portable kernel, or a list and one of Hopper's:
# with all heads of a group in a tile or, where one head fills it, with one (sharing takes 1 to 15 %
# longer). Its backward takes statistics, a list and two kernels, or one and its sums
MOST_OF_TRAINING = {
    "flash_attn_func/training": 10,
    "blocksparse/training": 9,
    "flash_varlen/training": 7,
    "flash_varlen/training_dense": 7,
}

# numbers of groups that follow no length: work that a program takes at least, of two tunings
CHOSEN = {"_attention_fwd_kernel: scalars.min_units"}


def most_kernels(arch, name):
    if arch == "sm90" and name in MOST_OF_TRAINING:
        return MOST_OF_TRAINING[name]
    return MORE.get((arch, name), 2 * MOST if name in TRAINING else MOST)


def count(arch, name, stride):
    with counted(arch) as kernels:
        growing_calls.run(name, STEPS, stride=stride)
    return len(kernels), kernels.report(), kernels.specialised()


@pytest.fixture(scope="module")
def process():
    """One that compiles nothing, so that it does for all chips."""
    with cross_compile.workers(1) as found:
        yield found


def pairs():
    """With `--sample`, the other chips than Hopper have every fourth loop, and those of `MORE`."""
    for i, name in enumerate(growing_calls.LOOPS):
        for j, arch in enumerate(ARCHES):
            is_few = arch == "sm90" or (i + j) % 4 == 0 or (arch, name) in MORE
            yield pytest.param(arch, name, marks=() if is_few else pytest.mark.device_suite)


@pytest.mark.parametrize(("arch", "name"), pairs())
def test_growing_calls_compile_few_kernels(arch, name, process, request):
    # with `--sample`, every seventh step: all remainders of 16 are among them
    stride = 7 if request.config.getoption("--sample") else 1
    found, report, specialised = process.submit(count, arch, name, stride).result()
    print(f"{arch} {name}: {found} kernels")
    assert 0 < found <= most_kernels(arch, name), report
    assert specialised.keys() <= CHOSEN, specialised


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that Triton compiles or finds on the disk, by its own hook, in a process that has
    none yet."""
    launch_cache.clear()
    for x in gc.get_objects():
        if issubclass(type(x), JITFunction):
            x.device_caches.clear()
    found = set()
    note = lambda *, key, fn, **_: found.add((fn.name, key))  # noqa: E731
    monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", note)
    return found


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", growing_calls.LOOPS)
def test_growing_calls_compile_few_kernels_on_this_gpu(name, compiled):
    growing_calls.run(name, STEPS_ON_GPU, "cuda")
    torch.cuda.synchronize()
    arch = "sm80" if support.unsupported_device() else "sm90"
    assert 0 < len(compiled) <= most_kernels(arch, name), sorted(x for x, _ in compiled)
