"""Caches whose rows are whole lanes: of several keys, or of one key and zeros."""

import dataclasses

import pytest
import torch
from same_bits import same_bits

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

SEQS = ((1, 40), (20, 25), (0, 17))


KINDS = [
    pytest.param(16, 64, 32, marks=pytest.mark.device_suite),
    pytest.param(8, 80, 16, marks=pytest.mark.device_suite),
    pytest.param(8, 8, 128, marks=pytest.mark.thorough),
    pytest.param(8, 64, 16, marks=pytest.mark.thorough),
]


@pytest.mark.parametrize(("num_heads", "head_dim", "page_size"), KINDS)
def test_a_packed_cache_is_read_as_it_lies(num_heads, head_dim, page_size, run):
    from torch_paged_attn.backends.tpu.pages import packed_shape

    problem = dataclasses.replace(
        PROBLEMS["llama3_8b/mixed/bf16"], num_heads=num_heads, head_dim=head_dim,
        page_size=page_size, seqs=SEQS, window_size_left=30, sinks=True, alibi="heads",
    )  # fmt: skip
    call = build(problem)
    packed = {name: _packed(call.args[name], packed_shape(call.args[name].shape)) for name in "kv"}
    assert packed["k"].shape[-1] == 128
    assert_accurate(*run(call, "on_wait", **_as_jax(packed)), call.truth())


@pytest.mark.device_suite
def test_bits_of_float16_are_a_cache_of_float16(run):
    problem = PROBLEMS["llama3_8b/mixed/bf16"]
    call = build(dataclasses.replace(problem, dtype=torch.float16, seqs=SEQS))
    bits = {name: call.args[name].contiguous().view(torch.int16) for name in "kv"}
    assert_accurate(*run(call, "on_wait", **_as_jax(bits)), call.truth())


def test_a_packed_cache_is_written_as_the_other_one():
    import numpy as np
    from jax_arrays import to_jax, to_torch
    from pallas_oracle import watch

    from torch_paged_attn.backends.tpu.cache_write import reshape_and_cache
    from torch_paged_attn.backends.tpu.pages import packed_shape

    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 6, 2, 64, generator=generator).bfloat16()
    cache = torch.randn(2, 3, 2, 16, 64, generator=generator).bfloat16()
    # neighbours in one row, one of them twice, a token that is not kept
    slots = torch.tensor([17, 16, 3, -1, 16, 47])

    def write(interpret):
        packed = cache.reshape(packed_shape(cache.shape))
        arguments = [to_jax(x) for x in (key, value, packed)]
        table = np.asarray(slots, np.int32)
        written = reshape_and_cache(*arguments, table, interpret=interpret)
        return to_torch(written).reshape(cache.shape)

    expected = cache.clone()
    for plane, new in enumerate((key, value)):
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[plane, slot // 16, :, slot % 16] = new[token]
    assert torch.equal(watch(write, "on_wait"), expected)
    # Pallas' other interpreter, which knows less
    assert torch.equal(write(True), expected)


@pytest.mark.thorough  # the conformance suite has latents
def test_values_that_are_the_first_numbers_of_keys(run):
    problem = dataclasses.replace(
        PROBLEMS["llama3_8b/mixed/bf16"], num_heads=16, num_kv_heads=1, head_dim=192,
        head_dim_v=128, page_size=16, seqs=((1, 300), (1, 5), (0, 9)),
    )  # fmt: skip
    call = build(problem)
    # as the op has it: values are a view of the keys
    call.args["v"] = call.args["k"][..., :128]
    expected = call.truth()
    keys = torch.nn.functional.pad(call.args["k"], (0, 64))
    own = {"k": keys, "v": call.args["v"][:0]}
    found = run(call, "on_wait", **_as_jax(own))
    assert_accurate(*found, expected)
    # queries may be as wide as the rows of keys, if the scale of the true width is stated
    wide = own | {"q": torch.nn.functional.pad(call.args["q"], (0, 64))}
    options = {"softmax_scale": call.args.get("softmax_scale") or 192**-0.5}
    assert same_bits(run(call, "on_wait", **_as_jax(wide), **options), found)


def _packed(cache, shape):
    """A cache in this shape, in which rows may end in zeros."""
    return (
        torch.nn.functional.pad(cache, (0, shape[-1] - cache.shape[-1]))
        if cache.shape[-2] == shape[-2]
        else cache.reshape(shape)
    )


def _as_jax(tensors):
    from jax_arrays import to_jax

    return {name: to_jax(x) for name, x in tensors.items()}
