"""What only a GPU can show: CUDA graphs, no host in the loop, caches past 2**31 elements."""

import dataclasses

import pytest
import torch

from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

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


def elsewhere(call):
    """The same call with its tensors at other addresses."""
    room = [torch.empty(1 << 16, device="cuda")]
    copied = {}
    for name, value in call.args.items():
        if isinstance(value, torch.Tensor):
            room.append(torch.empty(1000, device="cuda"))
            span = value.new_zeros(value.untyped_storage().nbytes() // value.itemsize)
            value = span.as_strided(value.shape, value.stride(), 0).copy_(value)
        copied[name] = value
    return dataclasses.replace(call, args=copied)


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_call_like_one_before_is_not_planned_again(name, monkeypatch):
    call = build(PROBLEMS[name]).to("cuda")
    others = elsewhere(call)
    with torch.inference_mode():
        want, _ = (call.run() for _ in range(2))
        monkeypatch.setattr(recipes, "make", None)
        for again in (call, others):
            assert all(torch.equal(a, b) for a, b in zip(again.run(), want, strict=True))
    # neither through the dispatcher
    assert all(torch.equal(a, b) for a, b in zip(others.run(), want, strict=True))


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
