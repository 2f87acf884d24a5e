"""How many kernels a process compiles whose lengths grow with each call. Without a GPU nothing is
compiled; on one, Triton's own hook counts.
"""

import gc

import cross_compile
import growing_calls
import growing_selected
import pytest
import torch
from kernel_counts import counted
from triton import knobs
from triton.runtime.jit import JITFunction

from torch_paged_attn._model_calls import Sizes, selected_calls, selected_training_calls
from torch_paged_attn._model_config import KeyLists, Layer
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.runtime import launch_cache

STEPS, STEPS_ON_GPU, MOST = 200, 24, 6
# chips with Hopper's kernels, with the portable ones alone, and AMD's
ARCHES = ("sm90", "sm80", "gfx942")
# loops that compile more, and why: docs/design/first_use.md has what was tried
MORE = {
    # A forward and a backward, counted together. Of lists of blocks the portable kernel for the
    # fewest tokens, Hopper's and five that sort lists, copy queries and add up parts, and two of
    # the backward: of units, and of rows before and after it
    ("sm90", "selected/training_blocks"): 9,
    # The portable kernel for the shortest; a list and two of Hopper's, with all heads of a group in
    # a tile or, where one head fills it, with one (sharing takes 1 to 15 % longer); statistics and
    # two of the backward or, of long sequences whose gradients are added in any order, one and the
    # rounding of its sums
    ("sm90", "flash_attn_func/training"): 9,
    # A forward and two of the backward, each for rows of a mask that are multiples of 16, which are
    # read in wide pieces, and for others; statistics, and a map of the mask
    **dict.fromkeys([(arch, "flash_varlen/training_masked") for arch in ARCHES], 8),
}
# numbers of groups that kernels are compiled for: work that a program takes at least, of two
# tunings; whether rows of a mask are multiples of 16, which are read in wide pieces
BIAS = [
    f"_attention_{kernel}_kernel: strides.bias_{x}"
    for kernel in ("fwd", "dkdv", "dq")
    for x in ("head", "token", "width")
]
CHOSEN = {"_attention_fwd_kernel: scalars.min_units", *BIAS}


def most_kernels(arch, name):
    return MORE.get((arch, name), MOST)


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
    """With `--sample`, the other chips than Hopper have every eighth loop, and those of `MORE`."""
    for i, name in enumerate(growing_calls.LOOPS):
        for j, arch in enumerate(ARCHES):
            is_few = arch == "sm90" or (i + j) % 8 == 0 or (arch, name) in MORE
            yield pytest.param(arch, name, marks=() if is_few else pytest.mark.device_suite)


@pytest.mark.parametrize(("arch", "name"), pairs())
def test_growing_calls_compile_few_kernels(arch, name, process, request):
    # with `--sample`, every eleventh step: all remainders of 16 are among them
    stride = 11 if request.config.getoption("--sample") else 1
    found, report, specialised = process.submit(count, arch, name, stride).result()
    print(f"{arch} {name}: {found} kernels")
    assert 0 < found <= most_kernels(arch, name), report
    assert specialised.keys() <= CHOSEN, specialised


# a model's lists: what `compile` reads of its config, and the loops of its calls
MODELS = {
    "tokens": KeyLists(512, 1, 32, 128),
    "blocks": KeyLists(16, 128),
}


def missed(arch, name, is_training):
    """How many kernels `compile` makes for a model of lists, and what its growing calls take
    besides."""
    of, lists = growing_selected.KINDS[name], MODELS[name]
    if is_training:
        of, lists = growing_selected.in_training(of), lists._replace(units=4)
    dims = of.heads, of.kv_heads, *of.dims
    layer = Layer(*dims, 0.1, is_latent=of.kv_heads == 1, lists=lists)
    sizes = Sizes(torch.bfloat16, torch.bfloat16, of.page_size, 8, 2048, 4096)
    uses = ["decode", "prefill", *(["keys_decode", "keys_prefill"] if lists.index_heads else [])]
    make = selected_calls
    if is_training:
        uses, make = ["training"], selected_training_calls
    with counted(arch) as kernels, torch.inference_mode(not is_training):
        for call in make(layer, sizes, torch.device("cpu")):
            call()
        made = len(kernels)
        for use in uses:
            growing_calls.run(f"selected/{use}_{name}", STEPS, stride=3)
    return made, len(kernels) - made, kernels.report()


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("is_training", [False, True], ids=["serving", "training"])
def test_models_of_lists_are_compiled_ahead(is_training, name, arch, process):
    made, more, report = process.submit(missed, arch, name, is_training).result()
    assert made > 2 and more == 0, report


@pytest.fixture
def compiled(monkeypatch):
    """The kernels that Triton compiles or finds on the disk, by its own hook, in a process that has
    none yet."""
    launch_cache.clear()
    gc.unfreeze()
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
