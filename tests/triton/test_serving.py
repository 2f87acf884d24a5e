"""An engine's warm-up takes every kernel that its steps take. Nothing is compiled here."""

import contextlib
import functools
import itertools
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from covering import every_row, left_out
from cross_compile import elsewhere

from torch_paged_attn import _serving
from torch_paged_attn._serving import MOST_ROWS, Serving, Step, rows_with_scales
from torch_paged_attn.backends.triton.compile_ahead import sample
from torch_paged_attn.backends.triton.dispatch import kernels
from torch_paged_attn.backends.triton.flash_varlen import MOST_SAID, said_of_reach
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M
from torch_paged_attn.ops import flash_varlen_out, reshape_and_cache

TINY = {"max_batch": 6, "max_tokens": 256, "max_length": 256}
SMALL = {"max_batch": 24, "max_tokens": 2048, "max_length": 1024}
LARGE = {"max_batch": 128, "max_tokens": 16384, "max_length": 4608}
# heads, KV heads and head_dim, and what else differs
# steps that were missed once
FOUND = [Step(1, 25, 25, 4608)]
MODELS = {
    "d64": ((32, 8, 64), {}),
    "d128": ((32, 8, 128), {}),
    "window": ((32, 8, 64), {"window_size_left": 511, "window_size_right": 511}),
    "sinks": ((64, 8, 64), {"window_size_left": 127, "window_size_right": 127, "sinks": True}),
    "float8": ((32, 8, 128), {"kv_dtype": torch.float8_e4m3fn}),
    "d256": ((16, 8, 256), {"softcap": 50.0, "window_size_left": 4095}),
}


def serving_of(name, sizes):
    heads, given = MODELS[name]
    options = {"softmax_scale": heads[2] ** -0.5, "causal": True} | given
    dtype = torch.bfloat16
    return Serving(
        *heads, dtype, options.pop("kv_dtype", dtype), 16, -(-sizes["max_length"] // 16), **sizes,
        has_sinks=options.pop("sinks", False), options=tuple(options.items()),
    )  # fmt: skip


def drawn_steps(serving, count):
    """What a scheduler may make: decodes, drafts, chunks of prompts, and mixed batches."""
    g = random.Random(2)

    def up_to(most):
        return g.choice((g.randint(1, most), round(most ** g.random())))

    for number in range(count):
        batch = up_to(serving.max_batch)
        total = longest = batch
        if number % 5 < 2:
            longest = 1
        elif number % 5 == 2:
            longest = g.randint(2, 8)
            total = g.randint(batch, batch * longest)
        else:
            most = min(serving.max_tokens, batch * serving.max_length)
            total = max(batch, min(most, up_to(serving.max_tokens)))
            # each of the others has a query
            longest = max(-(-total // batch), min(up_to(total - batch + 1), serving.max_length))
        total = min(total, serving.max_tokens)
        keys = max(longest, g.choice((serving.max_length, up_to(serving.max_length))))
        yield Step(batch, total, longest, min(keys, serving.max_length))


def every_step(serving):
    """All steps of few sequences, as far as plans can tell them apart."""
    long = BLOCK_M * serving.num_kv_heads // serving.num_heads + 1
    keys = {said_of_reach(n, False) for n in range(1, serving.max_length + 1)}
    for batch in range(1, serving.max_batch + 1):
        for total in range(batch, serving.max_tokens + 1):
            least, most = -(-total // batch), total - batch + 1
            # longer ones are all the same
            for longest in {min(x, max(least, long)) for x in range(least, most + 1)}:
                for reach in keys:
                    if reach >= longest:
                        yield Step(batch, total, longest, min(reach, serving.max_length))


@contextlib.contextmanager
def noted_keys(of_call, arch="sm90"):
    """The name and key of each kernel that calls take are appended; none is compiled."""
    from triton.runtime.jit import JITFunction, compute_cache_key

    from torch_paged_attn.backends.triton.compile_ahead import OnGPU

    def note(kernel, *args, grid, warmup, **kwargs):
        *_, key_cache, _, _, bind = kernel.device_caches[arch]
        _, specialization, options = bind(*args, **kwargs, debug=False, instrumentation_mode="")
        of_call.append(kernel.__name__ + compute_cache_key(key_cache, specialization, options))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", note))
        stack.enter_context(elsewhere(arch))
        stack.enter_context(OnGPU())
        stack.enter_context(torch.inference_mode())
        yield


def keys_of_warm_up(serving, of_call):
    """Within `noted_keys(of_call)`."""
    keys = set()
    calls = serving.calls(torch.device("cpu"))

    def taken(i):
        of_call.clear()
        calls[i]()
        keys.update(of_call)
        return tuple(of_call)

    for line in calls.lines:
        sample(line, taken)
    return keys


def keys_taken(serving, steps):
    """How many kernels the warm-up takes, and the steps that take another one."""
    of_call, missed = [], []
    with noted_keys(of_call):
        keys = keys_of_warm_up(serving, of_call)
        warmed = len(keys)
        attend = serving.attention(torch.device("cpu"))
        for step in steps:
            of_call.clear()
            attend(step)
            if not keys.issuperset(of_call):
                missed.append(step)
                keys.update(of_call)
    return warmed, missed


# minutes each, and no GPU makes them quicker
thorough = pytest.mark.thorough(on_gpu=False)


@pytest.mark.parametrize(
    ("name", "sizes", "count"),
    [
        ("d64", TINY, 1000),
        pytest.param("d64", SMALL, 4000, marks=thorough),
        pytest.param("d128", SMALL, 4000, marks=thorough),
        *(pytest.param(name, LARGE, 20000, marks=thorough) for name in MODELS),
    ],
)
def test_no_step_takes_another_kernel(name, sizes, count, compiler):
    serving = serving_of(name, sizes)
    found = [step for step in FOUND if step.max_seqlen_k <= serving.max_length]
    steps = [*found, *drawn_steps(serving, count)]
    warmed, missed = compiler.submit(keys_taken, serving, steps).result()
    assert missed == []
    assert 5 < warmed < 100


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        left_out("d128", {"max_batch": 3, "max_tokens": 512, "max_length": 2048}),
        ("sinks", {"max_batch": 2, "max_tokens": 16, "max_length": 512}),
        *(pytest.param(name, LARGE, marks=thorough) for name in MODELS),
    ],
)
def test_samples_of_lines_take_all_kernels_of_all_steps(name, sizes, compiler):
    serving = serving_of(name, sizes)
    _, missed = compiler.submit(keys_taken, serving, list(serving.steps())).result()
    assert missed == []


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        left_out("d128", {"max_batch": 1, "max_tokens": 300, "max_length": 4608}),
        *(
            pytest.param(name, sizes, marks=thorough)
            for name in MODELS
            for sizes in (
                {"max_batch": 1, "max_tokens": 2048, "max_length": 4608},
                {"max_batch": 4, "max_tokens": 160, "max_length": 2048},
            )
        ),
    ],
)
def test_no_step_of_few_sequences_takes_another_kernel(name, sizes, compiler):
    """All of them: `Serving.steps` samples numbers of queries, between which kernels may change."""
    serving = serving_of(name, sizes)
    warmed, missed = compiler.submit(keys_taken, serving, list(every_step(serving))).result()
    assert missed == []
    assert 5 < warmed < 100


def layer_of(serving, blocks=100):
    """An engine's layer, with tensors as vLLM has them: its cache, scales that are buffers of their
    own, and a function from a number of tokens to queries, keys and values out of one product.
    """
    kv_heads, dim, dtype = serving.num_kv_heads, serving.head_dim, serving.kv_dtype
    page = [kv_heads, serving.page_size, 2 * (dim + 4 * serving.by_token)]
    order = (1, 0, 2) if serving.tokens_first else (0, 1, 2)
    cache = torch.zeros(blocks, *(page[i] for i in order), dtype=torch.uint8)
    cache = cache.permute(0, *(1 + i for i in order))
    if serving.by_token:
        k, v, *scales = rows_with_scales(cache, dim, dtype)
    else:
        k, v = cache.view(dtype).split(dim, -1)
        scales = [torch.tensor(1.0), torch.tensor(1.0)]

    def project(tokens):
        heads = serving.num_heads, kv_heads, kv_heads
        fused = torch.zeros(tokens, sum(heads) * dim, dtype=serving.dtype)
        return [x.unflatten(1, (-1, dim)) for x in fused.split([n * dim for n in heads], -1)]

    return k, v, scales, project


def kernels_missed(serving, steps):
    """Names of those that a layer's calls take and the warm-up does not."""
    of_call = []
    k, v, scales, project = layer_of(serving)
    zeros = functools.partial(torch.zeros, dtype=torch.int32)
    with noted_keys(of_call):
        keys = keys_of_warm_up(serving, of_call)
        of_call.clear()
        for batch, total, longest, reach in steps:
            q, key, value = project(total)
            slots = torch.full((total,), -1)
            reshape_and_cache(key, value, (k, v), slots, *scales, quantize=serving.by_token)
            flash_varlen_out(
                torch.empty(q.shape, dtype=q.dtype), q, k, v, zeros(batch + 1),
                max_seqlen_q=longest, max_seqlen_k=reach, seqused_k=zeros(batch),
                block_table=zeros(batch, serving.max_pages), **dict(serving.options),
                k_descale=scales[0], v_descale=scales[1],
            )  # fmt: skip
    return sorted({key.partition("[")[0] for key in {*of_call} - keys})


@pytest.mark.parametrize(
    ("kv_dtype", "tokens_first"),
    every_row(3, itertools.product((torch.float8_e4m3fn, torch.int8), (True, False))),
)
def test_tensors_of_an_engine_take_the_kernels_of_its_warm_up(kv_dtype, tokens_first, compiler):
    """Alignments and strides of caches of 8 bits, on which kernels depend as on sizes."""
    sizes = {"max_batch": 4, "max_tokens": 64, "max_length": 512}
    serving = Serving(
        32, 8, 64, torch.bfloat16, kv_dtype, 16, 32, **sizes, tokens_first=tokens_first,
        by_token=kv_dtype == torch.int8, options=(("causal", True), ("softmax_scale", 0.125)),
    )  # fmt: skip
    steps = list(drawn_steps(serving, 40))
    assert compiler.submit(kernels_missed, serving, steps).result() == []


def test_the_hint_on_queries_says_something_for_so_many_rows():
    assert MOST_ROWS == BLOCK_M == MOST_SAID


@pytest.mark.parametrize("room", [256, 1024, 1040, 4608, 40960])
def test_hints_are_in_order_of_the_keys_that_plans_assume(room):
    def assumed(hint):
        call = SimpleNamespace(max_seqlen_k=said_of_reach(hint, False))
        with mock.patch.object(kernels.support, "key_bound", lambda call: room):
            return kernels._longest_keys(call)

    hints = _serving.hints_in_order(room, room)
    assert sorted(hints) == _serving.key_hints(room)
    found = [assumed(hint) for hint in hints]
    assert found == sorted(found)


@pytest.mark.parametrize("length", [1, 2, 3, 22])
def test_a_line_is_sampled_where_kernels_change(length):
    """However often they change, if both ends or the middle show it."""
    for changes in ([], [length - 1], [length // 3, length // 2]):
        made = []

        def taken(i, changes=changes, made=made):
            made.append(i)
            return sum(i >= change for change in changes)

        sample(range(length), taken)
        assert len(set(made)) == len(made) <= length
        assert {0, length - 1} <= set(made)
        kernels = {sum(i >= change for change in changes) for i in range(length)}
        assert {sum(i >= change for change in changes) for i in made} == kernels


def test_lines_are_all_calls_and_differ_in_keys_alone():
    calls = serving_of("d128", TINY).calls(torch.device("cpu"))
    assert [i for line in calls.lines for i in line] == list(range(len(calls)))
    assert {len({calls[i].args[0][:3] for i in x}) for x in calls.lines if len(x) > 1} == {1}
    assert len(calls.lines) < len(calls) * 0.8  # those of few queries are lines of one call
