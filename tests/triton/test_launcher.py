"""Triton's launchers, called by `ReadyKernel`, hand the CUDA driver what Triton hands it.

The driver is one of empty functions (benchmarks/gpu/no_gpu.py), and Triton the one that is
installed: `make test-triton TRITON=3.9.0` runs these tests with another.
"""

import functools
import sys
from pathlib import Path

import cross_compile
import growing_selected
import pytest
import torch
import triton
from covering import left_out
from growing_tensors import New
from launcher_calls import BF16, decode, prefill, write

import torch_paged_attn
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.runtime import launcher

# the benchmarks are scripts: they import one another as top-level modules
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import no_gpu

# built beside the CPU kernels; without it, Triton's launchers start kernels
LIBRARY = Path(torch_paged_attn.__file__).with_name("_launch.abi3.so")


def selected(of):
    """Lists of keys: their plans start with addresses, or for the first time with tensors."""
    x = growing_selected.a_batch(New(torch.device("cpu")), of, [1, 1], [700, 90], is_paged=True)
    options = x.lengths | {"select_size": of.select_size, "causal": True}
    call = torch_paged_attn.selected_attention
    tensors = (
        x.q,
        *x.kv,
        x.key_indices,
        *(y for y in options.values() if isinstance(y, torch.Tensor)),
    )
    return functools.partial(call, x.q, *x.kv, x.key_indices, **options), tensors


def without_new_tokens(is_step):
    """The operator behind `flash_attn_with_kvcache`, and behind a step of Transformers."""
    ints = functools.partial(torch.tensor, dtype=torch.int32)
    if is_step:
        q, kv = torch.zeros(3, 8, 1, 128, dtype=BF16), torch.zeros(2, 3, 2, 90, 128, dtype=BF16)
        rows = ints(range(7)), ints([80] * 6), ints(range(0, 540, 90))
        tensors = q, *kv, rows[1], None, rows[0], *(None,) * 5, rows[2]
        options = {"max_seqlen_q": 1, "max_seqlen_k": 80, "causal": True}
    else:
        q, kv = torch.zeros(3, 1, 8, 128, dtype=BF16), torch.zeros(2, 24, 16, 2, 128, dtype=BF16)
        tensors = q, *kv, ints([90] * 3), ints(range(24)).view(3, 8)
        options = {"causal": True, "softmax_scale": 0.3}
    call = functools.partial(BACKEND.function("attend_cache"), *tensors, **options)
    return call, [x for x in tensors if x is not None]


CALLS = {
    "without new tokens": lambda: without_new_tokens(False),
    "a step": lambda: without_new_tokens(True),
    **{
        f"selected {name}": functools.partial(selected, of)
        for name, of in growing_selected.KINDS.items()
        if name != "tokens"  # planned as few heads are
    },
    "odd group": lambda: prefill(24),
    "decode": decode,
    "write": write,
    "prefill": lambda: prefill(32),
}
# with `--sample`, Hopper's kernels are lists of keys and the odd group
LABELS = [left_out(x) if x == "prefill" else x for x in CALLS]


def named(launches, tensors):
    """The launches, with addresses by the number of a tensor, or as other memory."""
    numbers = {x.data_ptr(): f"tensor {i}" for i, x in enumerate(tensors)}

    def name(x):
        if isinstance(x, int):
            return numbers.get(x, "other memory" if x >= 1 << 26 else x)
        return x._replace(address=name(x.address))

    return [x._replace(parameters=tuple(map(name, x.parameters))) for x in launches]


def both_ways(labels):
    """Of these calls: what the driver is handed by a kernel that is made ready, when it is started
    again, by Triton's launcher from `ReadyKernel`, and by Triton; and how often Triton was asked
    for the second of them. And whether kernels were started from C.
    """
    noted = no_gpu.Launches(no_gpu.pretend())
    from triton.runtime.jit import JITFunction

    from torch_paged_attn.backends.triton.runtime import launch_cache

    run, asked, found = JITFunction.run, [], {}

    def counting(kernel, *args, **options):
        asked.append(kernel.__name__)
        return run(kernel, *args, **options)

    for label in labels:
        call, tensors = CALLS[label]()

        def take(call=call, tensors=tensors):
            call()
            return named(noted.take(), tensors)

        launch_cache.IS_KNOWN = launch_cache.HAS_KNOWN_MAPS
        launch_cache.refuse_host = lambda pointers: None  # they stay on the CPU
        launch_cache.clear()
        first = take()
        JITFunction.run = counting
        asked.clear()
        again, count = take(), len(asked)
        JITFunction.run = run
        kernels = [x for x, _ in launch_cache._kernels._entries.values()]
        from_c = all(x.types is not None for x in kernels)
        launch_cache.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launcher, "starter_type", lambda: None)
            by_launcher = take()
        launch_cache.IS_KNOWN = False
        launch_cache.clear()
        found[label] = first, again, by_launcher, take(), count, from_c
    return found


@pytest.fixture(scope="module")
def launches(request):
    labels = [x for x in CALLS if x != "prefill" or not request.config.getoption("--sample")]
    with cross_compile.workers(1) as pool:
        return pool.submit(both_ways, labels).result()


@pytest.mark.parametrize("label", LABELS)
def test_the_driver_is_handed_what_triton_hands_it(label, launches):
    first, again, by_launcher, by_triton, asked, from_c = launches[label]
    assert first and again == first and by_launcher == first and asked == 0
    assert from_c == LIBRARY.exists()
    if label == "odd group":
        by_triton = [as_filled(a, b) for a, b in zip(by_triton, first, strict=True)]
    assert by_triton == first


def as_filled(by_triton, ours):
    """Triton's launch with our boxes, which it knows nothing of: see the next test."""
    pairs = zip(by_triton.parameters, ours.parameters, strict=True)
    given = tuple([a if isinstance(a, int | str) else a._replace(box=b.box) for a, b in pairs])
    return by_triton._replace(parameters=given)


def test_boxes_hold_the_heads_of_an_odd_group(launches):
    (first, *_), _, _, (by_triton, *_), *_ = launches["odd group"]
    of_queries = [
        (ours.box, theirs.box)
        for ours, theirs in zip(first.parameters, by_triton.parameters, strict=True)
        if not isinstance(ours, int | str) and ours.box != theirs.box
    ]
    assert of_queries
    for ours, theirs in of_queries:
        # columns, heads, rows: three heads a token, and Triton's box, of powers of two
        assert ours[:3] == (theirs[0], 3, theirs[2] // 3) and theirs[1] == 1


def test_the_installed_triton_is_known():
    assert launcher.HAS_KNOWN_MAPS and launcher.unknown_triton() is None


def test_another_triton_is_named(monkeypatch):
    monkeypatch.setattr(launcher, "HAS_KNOWN_MAPS", False)
    said = launcher.unknown_triton()
    assert f"Triton {triton.__version__}" in said and "3.6 to 3.9" in said
    assert said in BACKEND.notes()
    x = torch.zeros(4, 2, 64, dtype=BF16)
    call = x, x, x, torch.tensor([0, 4], dtype=torch.int32)
    explained = torch_paged_attn.explain("flash_varlen", *call, target="sm90:132")
    assert explained.paths["triton"].details["launches"] == said
