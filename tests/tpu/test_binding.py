"""The ops on torch tensors, by a front end that copies them to JAX and back."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from jax_arrays import to_jax, to_torch
from same_bits import assert_same_bits

from torch_paged_attn import environment
from torch_paged_attn.attention_call import arguments
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.torch_side import binding, front_ends
from torch_paged_attn.backends.tpu.torch_side.tensors import (
    is_front_of,
    memory_of,
    pad_attention,
    whole_of,
)
from torch_paged_attn.testing import PROBLEMS, SELECTED, assert_accurate, build

# each with a tensor that has an entry for every sequence, or words of its own
CASES = {
    "decode": ("llama3_8b/decode_b5/bf16", {}),
    "bias": ("t5/bias/f32", {"seqs": ((3, 5), (1, 7))}),
    "dropout": ("training/dropout/f32", {"seqs": ((3, 5), (1, 7))}),
    "blocksparse": ("blocksparse/batched/f32", {"seqs": ((3, 5), (1, 7))}),
}


def dispatched(call, **changes):
    """Arguments as the dispatcher passes them: all tensors and hints by position."""
    given = call.args | changes
    listed = arguments(call.op)
    args = [given.get(x.name, x.default) for x in listed if not x.keyword_only]
    return args, {x.name: given[x.name] for x in listed if x.keyword_only and x.name in given}


@pytest.fixture
def front_end(monkeypatch):
    """Runs JAX functions on copies of torch tensors."""
    # compiled in half the time of Pallas' plain interpreter, which knows no loads with strides
    monkeypatch.setattr(environment, "TPU_INTERPRET", pltpu.InterpretParams())

    def run(function, tensors, outputs):
        results = function(*(to_jax(x) for x in tensors))
        return to_torch(results) if outputs == 1 else tuple(map(to_torch, results))

    return run


@pytest.mark.device_suite  # a view reaches them in the sample
@pytest.mark.parametrize(("name", "changes"), CASES.values(), ids=CASES)
def test_attention(name, changes, front_end):
    call = build(dataclasses.replace(PROBLEMS[name], **changes))
    args, options = dispatched(call)
    out, lse = getattr(binding, call.op)(*args, run=front_end, **options)
    assert_accurate(out, lse, call.truth())


@pytest.mark.device_suite
def test_selected_pages(front_end):
    """Each token and KV head is a sequence; what is no whole page is refused by name."""
    call = build(dataclasses.replace(SELECTED["selected/pages/f32"], seqs=((1, 20), (2, 5))))
    args, options = dispatched(call)
    out, lse = binding.selected_attention(*args, run=front_end, **options)
    assert_accurate(out, lse, call.truth())
    with pytest.raises(NotImplementedError, match="select_size is 4 with a page_size of 8"):
        binding.selected_attention(*args, run=front_end, **options | {"select_size": 4})


@pytest.mark.device_suite
def test_halves_of_one_tensor_reach_the_kernel_as_one(front_end):
    call = build(PROBLEMS["llama3_8b/decode_b5/bf16"])
    whole = torch.stack((call.args["k"], call.args["v"]))

    def run(function, tensors, outputs):
        assert sum(x is whole for x in tensors) == 1
        assert all(x.shape != whole.shape[1:] for x in tensors)
        return front_end(function, tensors, outputs)

    k, v = whole
    args, options = dispatched(call, k=k, v=v)
    out, lse = binding.flash_varlen(*args, run=run, **options)
    assert_accurate(out, lse, call.truth())


def test_what_is_no_half_is_not_taken_for_one():
    whole = torch.zeros(2, 4, 2, 16, 128)
    assert whole_of(*whole) is whole
    assert whole_of(whole[0], whole.clone()[1]) is None
    assert whole_of(whole[1], whole[0]) is None
    assert whole_of(whole[0], whole[0]) is None
    assert whole_of(*whole.transpose(2, 3).unbind()) is None
    assert whole_of(*whole[:, :3].unbind()) is None


def test_views_of_rows_of_whole_lanes_are_known():
    packed, filled = torch.zeros(2, 4, 2, 8, 128), torch.zeros(4, 2, 16, 128)
    heads_of_64, heads_of_80 = packed.view(2, 4, 2, 16, 64), filled[..., :80]
    assert memory_of(heads_of_64) is packed
    assert memory_of(heads_of_80) is filled
    assert whole_of(*heads_of_64) is packed
    assert whole_of(heads_of_64[1], heads_of_64[0]) is None
    assert is_front_of(filled[..., :64], heads_of_80)
    for view in (filled[..., :64], filled[..., 8:88], filled[1:], filled[:, :, :8], packed[0]):
        assert memory_of(view) is view
    assert not is_front_of(filled[..., 8:72], heads_of_80)
    assert not is_front_of(torch.zeros(4, 2, 16, 64), heads_of_80)


def _packed(x):
    """A view like x of rows of 128 numbers, which hold one key and zeros, or several keys."""
    *front, page_size, head_dim = x.shape
    keys, is_filled = divmod(128, head_dim)
    if is_filled:
        rows = torch.zeros(*front, page_size, 128, dtype=x.dtype)
        view = rows[..., :head_dim]
    else:
        rows = torch.zeros(*front, page_size // keys, 128, dtype=x.dtype)
        view = rows.view(x.shape)
    view.copy_(x)
    return rows, view


@pytest.mark.parametrize(
    ("head_dim", "is_whole"),
    [
        (64, True),
        pytest.param(80, False, marks=pytest.mark.device_suite),
        pytest.param(64, False, marks=pytest.mark.thorough),
        pytest.param(80, True, marks=pytest.mark.thorough),
    ],
    ids=lambda x: {True: "whole", False: "two"}.get(x, x) if isinstance(x, bool) else x,
)
def test_a_view_reaches_the_kernels_as_its_rows(head_dim, is_whole, front_end):
    """A write and attention of heads that fill no lanes."""
    problem = PROBLEMS["llama3_8b/decode_b5/bf16"]
    call = build(dataclasses.replace(problem, head_dim=head_dim))
    stored = torch.stack((call.args["k"], call.args["v"]))
    if is_whole:
        rows, view = _packed(stored)
        arrays, caches = [rows], view.unbind()
    else:
        arrays, caches = zip(*map(_packed, stored), strict=True)

    def run(function, tensors, outputs):
        assert all(sum(x is array for x in tensors) == 1 for array in arrays)
        assert all(x.shape[-1] != head_dim for x in tensors if x.dim() >= 4)
        return front_end(function, tensors, outputs)

    new = torch.randn(2, 3, call.args["k"].shape[1], head_dim).to(stored.dtype)
    slots = torch.tensor([5, -1, 40])
    _, _, page_size, _ = call.args["k"].shape
    if is_whole:
        binding.reshape_and_cache(*new, view, slots, run=run)
    else:
        binding.reshape_and_cache_split(*new, *caches, slots, run=run)
    for cache, x, before in zip(caches, new, stored, strict=True):
        for token in (0, 2):
            page, slot = divmod(int(slots[token]), page_size)
            before[page, :, slot] = x[token]
        assert_same_bits([cache], [before])
    call = dataclasses.replace(call, args=call.args | {"k": stored[0], "v": stored[1]})
    args, options = dispatched(call, k=caches[0], v=caches[1])
    out, lse = binding.flash_varlen(*args, run=run, **options)
    assert_accurate(out, lse, call.truth())


@pytest.mark.device_suite
def test_values_within_keys_are_loaded_with_them(front_end):
    """Latent attention: the kernel gets the width of values, and gets no second cache."""
    call = build(PROBLEMS["llama3_8b/decode_b5/bf16"])
    keys = call.args["k"].clone()
    _, latent = _packed(keys)
    values = latent[..., :64]
    args, options = dispatched(call, k=latent, v=values)

    def run(function, tensors, outputs):
        assert sum(x.dim() == 4 and x.shape[0] > 0 for x in tensors) == 1
        return front_end(function, tensors, outputs)

    out, lse = binding.flash_varlen(*args, run=run, **options)
    expected = dataclasses.replace(call, args=call.args | {"v": keys[..., :64]})
    assert_accurate(out, lse, expected.truth())


@pytest.mark.parametrize("shared", [False, True], ids=["alone", "shared"])
def test_a_cache_that_is_alone_gives_its_memory_away(shared, monkeypatch):
    """The front end leaves what is donated without memory, as torch_tpu does; a cache that other
    tensors see is copied to.
    """
    monkeypatch.setattr(environment, "TPU_INTERPRET", True)
    monkeypatch.setattr(environment, "TPU_DONATE", True)
    places = []

    def run(function, tensors, outputs, donated=()):
        places.append(donated)
        arrays = [to_jax(x.clone()) for x in tensors]
        for place in donated:
            tensors[place].untyped_storage().resize_(0)
        return tuple(to_torch(x) for x in function(*arrays))

    monkeypatch.setattr(binding, "DONATING", front_ends.DONATING | {run})
    k_cache, v_cache = (torch.zeros(4, 2, 16, 128) for _ in range(2))
    views = [k_cache.view(-1)] if shared else []
    key, value = torch.randn(2, 3, 2, 128)
    slots = torch.tensor([5, -1, 40])
    binding.reshape_and_cache_split(key, value, k_cache, v_cache, slots, run=run)
    assert places == [() if shared else (2, 3)]
    expected = torch.zeros(2, 4, 2, 16, 128)
    expected[:, 0, :, 5], expected[:, 2, :, 8] = (torch.stack((key[i], value[i])) for i in (0, 2))
    assert torch.equal(torch.stack((k_cache, v_cache)), expected)
    assert all(torch.equal(x, expected[0].view(-1)) for x in views)


def test_calls_of_one_bucket_share_a_function():
    """Neither lengths nor the hint that no kernel takes make a program anew; an option does."""
    functions = []

    def run(function, tensors, _outputs):
        functions.append(function)
        return torch.empty(8, 4, 8), torch.empty(4, 8)

    for batch, max_seqlen_k, causal in ((3, 9, True), (5, 1000, True), (5, 1000, False)):
        cu_seqlens = torch.arange(batch + 1, dtype=torch.int32)
        q, k, v = torch.zeros(3, batch, 4, 8)
        binding.flash_varlen(q, k, v, cu_seqlens, None, 1, max_seqlen_k, causal=causal, run=run)
    assert functions[0] is functions[1] is not functions[2]


def test_a_decode_has_tiles_of_one_token():
    """The hint of 1 is no bucket: with 8, tiles would have eight times the rows."""
    q = torch.zeros(3, 4, 8)
    given = {"q": q, "k": q, "v": q, "cu_seqlens_q": torch.arange(4, dtype=torch.int32)}
    hints = {1: 1, 2: 8, 9: 16}
    for hint, longest in hints.items():
        padded = pad_attention(Call.of("flash_varlen", given | {"max_seqlen_q": hint}))
        assert padded.max_seqlen_q == longest


def test_call_is_a_pytree():
    q, bounds = jnp.zeros((4, 2, 8)), jnp.arange(5, dtype=jnp.int32)
    given = {"q": q, "k": q, "v": q, "cu_seqlens_q": bounds, "softcap": 3.0}
    call = Call.of("flash_varlen", given | {"max_seqlen_k": 7})
    leaves, structure = jax.tree.flatten(call)
    assert [x.shape for x in leaves] == [q.shape] * 3 + [bounds.shape]
    assert structure == jax.tree.structure(Call.of("flash_varlen", given))
    assert structure != jax.tree.structure(Call.of("flash_varlen", given | {"softcap": 2.0}))
    assert jax.tree.unflatten(structure, leaves).softcap == 3.0
