"""`torch.ops.paged_attn.*` on XLA and torchax tensors agree with the reference."""

import pytest
import torch
import torch_xla  # noqa: F401  the device
from torch.utils._pytree import tree_map

import torch_paged_attn  # noqa: F401  the ops
from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.torch_side.binding import register_torchax
from torch_paged_attn.testing import Truth, assert_accurate

PAGE, PAGES, HEADS, KV_HEADS, DIM = 128, 2, 2, 1, 128
ops = torch.ops.paged_attn


def eager(function):
    return function


def compiled(function):
    return torch.compile(function, backend="openxla", dynamic=False)


@pytest.fixture(params=[eager, compiled], ids=lambda mode: mode.__name__)
def on_xla(request):
    """Run a function of tensors on XLA, results back on the CPU."""

    def run(function, *tensors):
        moved = tree_map(lambda x: x.to("xla"), tensors)
        results = request.param(function)(*moved)
        return tree_map(lambda x: x.cpu(), (results, moved))

    return run


@pytest.fixture
def on_torchax():
    import torchax

    register_torchax()
    environment = torchax.default_env()
    environment.load_ops()

    def run(function, *tensors):
        with environment:
            moved = tree_map(lambda x: x.to("jax"), tensors)
            results = function(*moved)
            return tree_map(lambda x: x.to("cpu"), (results, moved))

    return run


@pytest.fixture
def decode():
    """A mixed batch over pages in random order: two decodes and a short prefill."""
    torch.manual_seed(0)
    cu_seqlens = torch.tensor([0, 1, 2, 7], dtype=torch.int32)
    seqused_k = torch.tensor([5, 200, 33], dtype=torch.int32)
    block_table = torch.randperm(3 * PAGES).reshape(3, PAGES).int()
    q = torch.randn(7, HEADS, DIM)
    k, v = torch.randn(2, 3 * PAGES, KV_HEADS, PAGE, DIM)
    return q, k, v, cu_seqlens, seqused_k, block_table


def attend(q, k, v, cu_seqlens, seqused_k, block_table, flash_varlen=ops.flash_varlen, **more):
    return flash_varlen(
        q, k, v, cu_seqlens, None, 5, 200, seqused_k, block_table, causal=True, softcap=30.0, **more
    )


def attend_by_reference(*tensors, **precision):
    return attend(*tensors, flash_varlen=reference.flash_varlen, **precision)


@pytest.fixture
def write():
    torch.manual_seed(0)
    key, value = torch.randn(2, 4, KV_HEADS, DIM)
    slots = torch.tensor([3, -1, 20, 47])
    caches = torch.zeros(2, 3, KV_HEADS, 16, DIM)
    expected = caches.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[:, slot // 16, :, slot % 16] = torch.stack([key[token], value[token]])
    return (key, value, caches, slots), expected


def store(key, value, cache, slots):
    ops.reshape_and_cache(key, value, cache, slots)
    return cache * 1.0


def test_flash_varlen(on_xla, decode):
    assert_accurate(*on_xla(attend, *decode)[0], Truth.of(attend_by_reference, *decode))


def test_bad_input_is_refused_before_any_kernel(on_xla, decode):
    q, k, *rest = decode
    refusals = ValueError, torch._dynamo.exc.TorchRuntimeError  # the op itself, and its fake
    with pytest.raises(refusals, match=r"flash_varlen\(\): expected v to be .* got shape"):
        on_xla(attend, q, k[:-1], *rest)


def test_reshape_and_cache(on_xla, write):
    tensors, expected = write
    result, (_, _, cache, _) = on_xla(store, *tensors)
    assert torch.equal(result, expected)
    assert torch.equal(cache, expected)


def test_merge_states(on_xla):
    out_a, out_b = torch.randn(2, 5, HEADS, DIM)
    lse_a, lse_b = torch.randn(2, HEADS, 5)
    states = (out_a, lse_a, out_b, lse_b)
    results, _ = on_xla(ops.merge_states, *states)
    assert_accurate(*results, Truth.of(reference.merge_states, *states))


def assert_merges_a_list(run):
    outs, lses = torch.randn(3, 5, HEADS, DIM).unbind(), torch.randn(3, HEADS, 5).unbind()

    def merge(*states):
        return ops.merge_states.list(list(states[:3]), list(states[3:]))

    results, _ = run(merge, *outs, *lses)
    assert_accurate(*results, Truth.of(reference.merge_states, outs, lses))


def test_merge_states_of_a_list(on_xla):
    assert_merges_a_list(on_xla)


def test_torchax_merge_states_of_a_list(on_torchax):
    assert_merges_a_list(on_torchax)


def test_torchax_flash_varlen(on_torchax, decode):
    assert_accurate(*on_torchax(attend, *decode)[0], Truth.of(attend_by_reference, *decode))


def test_torchax_reshape_and_cache(on_torchax, write):
    tensors, expected = write
    assert torch.equal(on_torchax(store, *tensors)[0], expected)


def test_the_fake_agrees_under_export(decode):
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(x).to("meta") for x in decode]
        out, lse = attend(*fake)
    assert out.shape == (7, HEADS, DIM)
    assert lse.shape == (HEADS, 7)
