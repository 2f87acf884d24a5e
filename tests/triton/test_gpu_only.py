"""What only a GPU can show: CUDA graphs, no host in the loop, caches past 2**31 elements."""

import dataclasses
import subprocess
import sys
import threading
from typing import ClassVar

import first_calls
import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.backends.triton.runtime import launch_cache, workspace
from torch_paged_attn.integrations._kvcache import APPENDING
from torch_paged_attn.integrations.flash_attn import flash_attn_with_kvcache, with_kvcache
from torch_paged_attn.testing import (
    PROBLEMS,
    Truth,
    assert_accurate,
    assert_rounded_alike,
    build,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("name", PROBLEMS)
def test_no_call_waits_for_the_gpu(name, run):
    call = build(PROBLEMS[name]).to("cuda")
    run(call)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_first_calls_of_a_process_give_what_later_ones_do():
    command = [sys.executable, first_calls.__file__]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr


def elsewhere(call):
    """The same call with its tensors at other addresses."""
    room = [torch.empty(1 << 16, device="cuda")]
    copied = {}
    for name, value in call.args.items():
        if isinstance(value, torch.Tensor):
            room.append(torch.empty(1000, device="cuda"))
            span = value.new_zeros(value.untyped_storage().nbytes() // value.itemsize)
            value = span.as_strided(value.shape, value.stride(), value.storage_offset()).copy_(
                value
            )
        copied[name] = value
    return dataclasses.replace(call, args=copied)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "default_device": lambda: torch.device("cpu"),
}


@pytest.fixture
def nothing_new(monkeypatch):
    """Called, makes every plan and every launch through Triton an error from then on."""
    from triton.runtime.jit import JITFunction

    def start():
        monkeypatch.setattr(launch_cache._plans, "put", None)
        monkeypatch.setattr(JITFunction, "run", None)

    return start


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_call_like_one_before_is_not_planned_again(name, nothing_new):
    call = build(PROBLEMS[name]).to("cuda")
    others = elsewhere(call)
    want = call.run()
    nothing_new()
    for mode in MODES.values():
        with mode():
            for again in (call, others):
                assert all(torch.equal(a, b) for a, b in zip(again.run(), want, strict=True))


@pytest.mark.parametrize("name", PROBLEMS)
def test_memory_that_is_not_filled_first_gives_the_same_bits(name):
    """As outside these tests, where algorithms need not be deterministic."""
    call = build(PROBLEMS[name]).to("cuda")
    want = call.run()
    torch.use_deterministic_algorithms(False)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(call.run(), want, strict=True))


def decode(batch, context=90):
    problem = PROBLEMS["llama3_8b/decode_b5/bf16"]
    problem = dataclasses.replace(problem, seqs=((1, context),) * batch, page_seed=batch)
    return build(problem)


def test_a_new_size_takes_no_kernel_from_triton(monkeypatch):
    from triton.runtime.jit import JITFunction

    for context in (90, 200):  # whose tiles may differ
        decode(9, context).to("cuda").run()
    calls = [(call.truth(), call.to("cuda")) for call in (decode(10), decode(12, 200))]
    monkeypatch.setattr(JITFunction, "run", None)
    for truth, call in calls:
        assert_accurate(*call.run(), truth)


def test_a_triton_that_is_not_known_launches_all_the_same(monkeypatch):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"]).to("cuda")
    want = call.run()
    monkeypatch.setattr(launch_cache, "IS_KNOWN", False)
    launch_cache.clear()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(call.run(), want, strict=True))


class Noting(torch.Tensor):
    """Notes the functions that are called with it."""

    seen: ClassVar[list] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_a_subclass_sees_every_call():
    call = build(PROBLEMS["llama3_8b/decode_b5/bf16"]).to("cuda")
    want = call.run()
    q = call.args["q"].as_subclass(Noting)
    for number in range(1, 6):
        out, _ = call.run(q=q)
        assert isinstance(out, Noting)
        assert torch.equal(out.as_subclass(torch.Tensor), want[0])
        assert len([name for name in Noting.seen if "flash_varlen" in name]) == number


@pytest.mark.parametrize(
    "name, is_one_kernel",
    [("llama3_70b_tp8/decode/bf16", True), ("llama3_8b/decode_b5/bf16", False)],
)
def test_addresses_off_16_bytes_and_on_take_turns(name, is_one_kernel):
    call = build(PROBLEMS[name])
    truth, call = call.truth(), call.to("cuda")
    q = call.args["q"]
    room = torch.zeros(q.numel() + 1, dtype=q.dtype, device="cuda")
    off = room[1:].view(q.shape).copy_(q)
    # tensor maps need 16 bytes: on Hopper kernels may differ, and with them bits
    wants = [call.run(q=x) for x in (q, off)]
    for want in wants:
        assert_accurate(*want, truth)
    assert not is_one_kernel or all(map(torch.equal, *wants))
    for _ in range(3):
        for x, want in zip((q, off), wants, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(call.run(q=x), want, strict=True))


def test_many_sizes_leave_a_bounded_number_of_plans(monkeypatch):
    monkeypatch.setattr(launch_cache._plans, "bound", 4)
    new = torch.randn(40, 2, 64, device="cuda")
    for n in (*range(1, 20), 3, 19):
        part = new[:n], new[:2, :1, :n].reshape(2, n)
        truth = Truth.of(reference.merge_states, *part, *part)
        assert_accurate(*torch_paged_attn.merge_states(*part, *part), truth)
        assert len(launch_cache._plans) <= 4


def test_threads_that_call_with_sizes_of_their_own_get_their_results(monkeypatch):
    monkeypatch.setattr(launch_cache._plans, "bound", 3)
    calls = [decode(batch).to("cuda") for batch in range(2, 10)]
    wants = [call.run() for call in calls]
    failures = []

    def work(first):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        try:
            with torch.cuda.stream(stream):
                for i in range(40):
                    number = (first + i) % len(calls)
                    got = calls[number].run()
                    if not all(map(torch.equal, got, wants[number])):
                        failures.append(number)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(2 * n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_streams_give_their_scratch_memory_back():
    call = decode(4, 8000).to("cuda")  # whose keys are split
    call.run()
    launch_cache.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for priority in (0, -1):
        for _ in range(32):
            with torch.cuda.stream(torch.cuda.Stream(priority=priority)):
                call.run()
    torch.cuda.synchronize()
    assert 0 < len(workspace._scratch) <= workspace.MOST_STREAMS
    launch_cache.clear()
    assert len(workspace._scratch) == 0
    assert torch.cuda.memory_allocated() <= before


def test_a_call_of_a_new_size_may_be_captured():
    decode(9).to("cuda").run()
    call = decode(11)
    truth, call = call.truth(), call.to("cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call.run()
    for _ in range(3):
        graph.replay()
        assert_accurate(*captured, truth)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_current_device_may_be_another_one():
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    truth, other = call.truth(), call.to("cuda:1")
    for _ in range(3):
        out, lse = other.run()
        assert out.device.index == 1 and torch.cuda.current_device() == 0
        assert_accurate(out, lse, truth)


def test_values_within_keys_or_elsewhere():
    """An MLA cache: the values are a part of the keys, or a copy of it."""
    call = build(PROBLEMS["deepseek_mla/decode/bf16"]).to("cuda")
    part = call.args["k"][..., : call.args["v"].shape[-1]]
    copied = torch.empty_like(call.args["k"])[..., : part.shape[-1]].copy_(part)
    doubled = torch.empty_like(call.args["k"])[..., : part.shape[-1]].copy_(2 * part)
    planned = {}
    for v in (part, copied, doubled):
        launch_cache.clear()
        planned[id(v)] = call.run(v=v)
    launch_cache.clear()
    for v in (part, copied, doubled, part, doubled, copied):
        got, want = call.run(v=v), planned[id(v)]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_decode_step_replays_while_lengths_tables_and_slots_change(kernels):
    """Write one token a sequence, attend: captured once, replayed over other lengths and pages."""
    batch, heads, kv_heads, dim, page_size, width = 5, 8, 2, 128, 16, 40
    device, g = "cuda", torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, device=device, generator=g).bfloat16()

    cache = randn(2, batch * width, kv_heads, page_size, dim)
    q, key, value = randn(batch, heads, dim), *(randn(batch, kv_heads, dim) for _ in range(2))
    cu_seqlens_q = torch.arange(batch + 1, device=device, dtype=torch.int32)
    used = torch.ones(batch, device=device, dtype=torch.int32)
    table = torch.arange(batch * width, device=device, dtype=torch.int32).view(batch, width)
    slots = torch.zeros(batch, device=device, dtype=torch.int64)

    def step():
        kernels.reshape_and_cache(key, value, cache, slots)
        args = (q, cache[0], cache[1], cu_seqlens_q, None, 1, 1, used, table)
        return kernels.flash_varlen(*args, causal=True)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(4):
        used.copy_(torch.randint(1, width * page_size, (batch,), device=device, generator=g))
        table.copy_(torch.randperm(batch * width, device=device, generator=g).view(batch, width))
        last = (used - 1).long()
        page = table.gather(1, (last // page_size)[:, None])[:, 0].long()
        slots.copy_(page * page_size + last % page_size)
        for tensor in (q, key, value):
            tensor.copy_(randn(*tensor.shape))
        graph.replay()
        torch.cuda.synchronize()
        got = [t.clone() for t in captured]
        assert all(torch.equal(a, b) for a, b in zip(got, step(), strict=True))
        assert torch.equal(cache[0].transpose(1, 2).flatten(0, 1)[slots], key)


def test_caches_past_two_to_the_31_elements(run):
    problem = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], page_seed=1)
    call = build(problem)
    truth = call.truth()
    k, v, table = (call.args[n] for n in ("k", "v", "block_table"))
    far = 2**31 // k[0].numel() + 3
    args = dict(call.to("cuda").args)
    for name, cache in (("k", k), ("v", v)):
        big = torch.empty(far + len(k), *k.shape[1:], dtype=k.dtype, device="cuda")
        big[far:] = cache.cuda()
        args[name] = big
    pages = table.clone()
    used = (pages >= 0) & (pages < len(k))
    args["block_table"] = torch.where(used, pages + far, pages).cuda()
    assert args["k"].numel() > 2**31
    assert_accurate(*run(dataclasses.replace(call, args=args)), truth)


def kvcache_step(batch, pages=8, page_size=16, heads=8, kv_heads=2, dim=64):
    """Tensors of a decode step: q, caches, new keys and values, lengths, table."""
    g = torch.Generator("cuda").manual_seed(batch)

    def randn(*shape):
        return torch.randn(shape, generator=g, device="cuda", dtype=torch.bfloat16)

    caches = [randn(batch * pages, page_size, kv_heads, dim) for _ in range(2)]
    table = torch.randperm(batch * pages, generator=g, device="cuda").view(batch, pages).int()
    lengths = torch.arange(5, 5 + batch, device="cuda").int()
    new = [randn(batch, 1, kv_heads, dim) for _ in range(2)]
    return randn(batch, 1, heads, dim), *caches, *new, lengths, table


@pytest.mark.parametrize("mode", MODES)
def test_steps_in_one_call_by_plans_of_earlier_ones_are_steps_of_new_plans(mode, monkeypatch):
    """Lengths grow, new tokens differ, and two sizes take turns."""

    def steps(forget):
        outs = []
        problems = [kvcache_step(3), kvcache_step(4)]
        for i in range(6):
            for q, k_cache, v_cache, k, v, lengths, table in problems:
                forget()
                out = flash_attn_with_kvcache(
                    q + i, k_cache, v_cache, k * i, v + i, cache_seqlens=lengths + i,
                    block_table=table, causal=True,
                )  # fmt: skip
                outs.append(out)
        return [*outs, *(x for problem in problems for x in problem[1:3])]

    with MODES[mode]():
        gots = steps(lambda: None)
        monkeypatch.setattr(with_kvcache, "in_one_call", lambda *args, **options: None)
        wants = steps(launch_cache.clear)
    assert all(map(torch.equal, gots, wants))


def forms_of_kvcache():
    """Calls with new tokens: rotated, ragged, in rows of a cache, and more tokens than a program
    compares slots of."""
    q, k_cache, v_cache, k, v, lengths, table = kvcache_step(5, pages=60)
    angles = torch.arange(960 * 24, device="cuda").view(960, 24) * 0.37
    rotary = {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    bounds = torch.arange(6, device="cuda", dtype=torch.int32)
    pages = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    ragged = {"cu_seqlens_q": bounds, "cu_seqlens_k_new": bounds, "max_seqlen_q": 1}
    long = [x.repeat(1, 300, 1, 1) * 0.5 for x in (q, k, v)]
    rows = [x.view(5, 960, 2, 64) for x in (k_cache, v_cache)]
    return {
        "rotary": ((q, k_cache, v_cache, k, v), pages | rotary),
        "halves": ((q, k_cache, v_cache, k, v), pages | rotary | {"rotary_interleaved": False}),
        "ragged": ((q[:, 0], k_cache, v_cache, k[:, 0], v[:, 0]), pages | ragged),
        "ragged rotary": ((q[:, 0], k_cache, v_cache, k[:, 0], v[:, 0]), pages | ragged | rotary),
        "rows": ((q, *rows, k, v), {"cache_seqlens": lengths} | rotary),
        "many": ((long[0], k_cache, v_cache, *long[1:]), pages | rotary),
    }


@pytest.mark.parametrize("form", ["rotary", "halves", "ragged", "ragged rotary", "rows", "many"])
def test_one_call_is_what_the_general_code_computes(form, monkeypatch):
    def run(is_general):
        tensors, options = forms_of_kvcache()[form]
        if is_general:
            monkeypatch.setattr(with_kvcache, "in_one_call", lambda *args, **options: None)
        outs = [flash_attn_with_kvcache(*tensors, **options) for _ in range(2)]
        return [*outs, *tensors[1:3]]

    assert with_kvcache.in_one_call(*one_call_of(form)) is not None
    for got, want in zip(run(False), run(True), strict=True):
        assert_rounded_alike(got, want)


def one_call_of(form):
    (q, k_cache, v_cache, k, v), options = forms_of_kvcache()[form]
    names = "block_table", "s_aux", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k_new"
    others = [options.get(x) for x in (*names, "rotary_cos", "rotary_sin")]
    args = q, k_cache, v_cache, k, v, options["cache_seqlens"], *others
    return APPENDING, args, {"causal": True}


def test_steps_on_streams_and_in_graphs():
    q, k_cache, v_cache, k, v, lengths, table = kvcache_step(3)

    def step():
        return flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
        )

    want = step()
    step()
    stream = torch.cuda.Stream()
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = step()
        stream.synchronize()
        assert torch.equal(got, want) and torch.equal(step(), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    launch_cache.clear()
    for i in range(2):
        k.add_(i)
        graph.replay()
        assert torch.equal(captured, step())
