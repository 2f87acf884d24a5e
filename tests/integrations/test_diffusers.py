"""Attention as diffusers' models call it; the models themselves are in tests/diffusers."""

import pytest
import torch
import torch.nn.functional as F

from torch_paged_attn.integrations import diffusers as paged
from torch_paged_attn.testing import assert_as_right_as


def tensors(queries=9, keys=9, heads=4, kv_heads=4, batch=2):
    generator = torch.Generator().manual_seed(0)

    def random(length, heads):
        return torch.randn(batch, length, heads, 16, generator=generator)

    return random(queries, heads), random(keys, kv_heads), random(keys, kv_heads)


def native(*tensors, **options):
    """diffusers' native backend, whose masks of two dimensions may be (batch, S)."""
    mask = options.get("attn_mask")
    if mask is not None and mask.shape == (tensors[0].shape[0], tensors[1].shape[1]):
        options = options | {"attn_mask": mask[:, None, None]}
    return F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in tensors), enable_gqa=True, **options
    ).transpose(1, 2)


def masks():
    generator = torch.Generator().manual_seed(1)
    keys = torch.rand(2, 1, 1, 9, generator=generator) > 0.4
    return {
        "keys": keys,
        "pairs": torch.rand(9, 9, generator=generator) > 0.3,
        "heads": torch.randn(2, 4, 9, 9, generator=generator),
        "every head's pairs": torch.randn(4, 9, 9, generator=generator),
        "one row": torch.randn(1, 9, generator=generator),
        "one sequence": torch.randn(1, 1, 9, 9, generator=generator),
    }


CALLS = {
    "plain": (tensors(), {}),
    "scale": (tensors(), {"scale": 0.4}),
    "causal": (tensors(), {"is_causal": True}),
    "grouped": (tensors(kv_heads=2), {}),
    "cross": (tensors(keys=5), {}),
    "causal from the first key": (tensors(keys=14), {"is_causal": True}),
    "causal with few keys": (tensors(keys=5), {"is_causal": True}),
    # as many sequences as queries: what the two dimensions are does not follow from the shape
    "padding of 9 sequences": (
        tensors(batch=9),
        {"attn_mask": torch.arange(9) <= torch.arange(9)[:, None]},
    ),
    "bias of 9 sequences of 5 keys": (
        tensors(batch=9, keys=5),
        {"attn_mask": torch.arange(45.0).view(9, 5)},
    ),
    "padding": (tensors(), {"attn_mask": torch.arange(9) < torch.tensor([[4], [7]])}),
    "causal of 9 sequences": (tensors(batch=9, keys=14), {"is_causal": True}),
    **{f"mask of {name}": (tensors(), {"attn_mask": mask}) for name, mask in masks().items()},
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_it_is_sdpa_with_tokens_first(name, heads_first):
    inputs, options = CALLS[name]
    if heads_first:  # in memory
        inputs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    out, lse = paged.attention(*inputs, return_lse=True, **options)
    mask = options.get("attn_mask")
    exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
    golden = native(*(x.double() for x in inputs), **options | {"attn_mask": exact})
    assert_as_right_as(out, golden, native(*inputs, **options))
    assert lse.shape == out.shape[:3] and lse.dtype == torch.float32
    assert torch.equal(paged.attention(*inputs, **options), out)


def test_dropout_draws_from_torchs_generator():
    inputs = tensors()
    torch.manual_seed(3)
    first = paged.attention(*inputs, dropout_p=0.5)
    assert not torch.equal(paged.attention(*inputs, dropout_p=0.5), first)
    torch.manual_seed(3)
    assert torch.equal(paged.attention(*inputs, dropout_p=0.5), first)


def test_a_mask_that_is_learned_alone():
    """Keys that lie heads first are no pages where the mask needs a gradient."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors())
    mask = torch.randn(q.shape[1], k.shape[1])

    def found(attend, *inputs):
        *inputs, leaf = (x.detach() for x in inputs)
        leaf.requires_grad_()
        return torch.autograd.grad(attend(*inputs, attn_mask=leaf).square().sum(), leaf)[0]

    golden = found(native, *(x.double() for x in (q, k, v, mask)))
    assert_as_right_as(found(paged.attention, q, k, v, mask), golden, found(native, q, k, v, mask))


def test_refusals():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="expected attn_mask or is_causal, got both"):
        paged.attention(q, k, v, attn_mask=torch.ones(9, 9, dtype=torch.bool), is_causal=True)
    with pytest.raises(NotImplementedError, match="does not support _parallel_config"):
        paged.attention(q, k, v, _parallel_config=object())


def test_it_says_that_diffusers_is_not_here():
    with pytest.raises(ImportError, match="there is none here: pip install"):
        paged.register()
