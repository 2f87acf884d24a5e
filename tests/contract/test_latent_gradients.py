"""Gradients of a call with `q_latent` are those of one whose q and k have the latents' columns, and
what a backend has no backward for is refused where the forward would need it."""

import pytest
import torch

import torch_paged_attn

CU_SEQLENS = torch.tensor([0, 7, 7, 29], dtype=torch.int32)
OPTIONS = {"causal": True, "softmax_scale": 0.2}
NAMES = ("q", "k", "v", "q_latent")


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (29, 4, 16), "k": (29, 2, 16), "v": (29, 2, 24), "q_latent": (29, 4, 24)}
    return {name: torch.randn(s, generator=generator).to(dtype) for name, s in shapes.items()}


def gradients(given, asked, dout, dlse, **options):
    """Results of a call, and the gradients of the inputs that are asked for."""
    leaves = {name: x.clone().requires_grad_(name in asked) for name, x in given.items()}
    q, k, v = (leaves.pop(name) for name in ("q", "k", "v"))
    out, lse = torch_paged_attn.flash_varlen(q, k, v, CU_SEQLENS, **leaves, **options)
    leaves |= {"q": q, "k": k, "v": v}
    wanted = [leaves[name] for name in asked]
    found = torch.autograd.grad((out, lse), wanted, (dout, dlse))
    return (out.detach(), lse.detach()), dict(zip(asked, found, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("asked", [NAMES, ("q_latent",), ("v",), ("k",)], ids="-".join)
def test_latent_gradients_are_those_of_its_columns(dtype, asked):
    given = inputs(dtype)
    dout, dlse = torch.randn(29, 4, 24).to(dtype), torch.randn(4, 29)
    results, found = gradients(given, asked, dout, dlse, **OPTIONS)
    q = torch.cat((given["q"], given["q_latent"]), -1)
    k = torch.cat((given["k"], given["v"]), -1)
    dq, dk, dv, *_ = torch_paged_attn.flash_varlen_backward(
        dout, dlse, q, k, given["v"], *results, CU_SEQLENS, **OPTIONS
    )
    whole = {
        "q": dq[..., :16], "q_latent": dq[..., 16:], "k": dk[..., :16], "v": dv + dk[..., 16:]
    }  # fmt: skip
    for name, gradient in found.items():
        assert gradient.shape == given[name].shape
        assert torch.equal(gradient, whole[name]), name


@pytest.mark.parametrize("empty", ["queries", "keys", "both"])
@pytest.mark.parametrize("asked", [NAMES, ("q_latent",), ("v",), ("q",)], ids="-".join)
def test_latent_gradients_without_queries_or_keys(asked, empty):
    """An empty gradient is a gradient: of its input's shape, and 0."""
    rows = {"queries": ("q", "q_latent"), "keys": ("k", "v"), "both": NAMES}[empty]
    given = {name: x[:0] if name in rows else x for name, x in inputs(torch.float32).items()}
    given = {name: x.requires_grad_(name in asked) for name, x in given.items()}
    bounds = [torch.tensor([0, n], dtype=torch.int32) for n in (len(given["q"]), len(given["k"]))]
    q, k, v, latent = (given[name] for name in NAMES)
    out, lse = torch_paged_attn.flash_varlen(q, k, v, *bounds, q_latent=latent)
    found = torch.autograd.grad((out.sum(), lse.nan_to_num().sum()), [given[n] for n in asked])
    for name, gradient in zip(asked, found, strict=True):
        assert gradient.shape == given[name].shape
        assert not gradient.any()


def test_default_scale_is_that_of_q():
    given = inputs(torch.float32)
    dout, dlse = torch.randn(29, 4, 24), torch.randn(4, 29)
    _, found = gradients(given, NAMES, dout, dlse, causal=True)
    _, want = gradients(given, NAMES, dout, dlse, causal=True, softmax_scale=16**-0.5)
    for name in NAMES:
        assert torch.equal(found[name], want[name]), name


def test_blocksparse_of_dealt_keys_is_refused():
    """By the CPU, at the forward that would need a gradient and at the backward itself."""
    given = inputs(torch.float32)
    bounds = torch.tensor([0, 29], dtype=torch.int32)
    layout = [torch.tensor([x], dtype=torch.int32) for x in ([0, 1], [0])]
    options = {"key_ranks": 2, "key_interleave": 4, "q_position": bounds[:1]}
    args = [given[name] for name in ("q", "k", "v")]
    out, lse = torch_paged_attn.blocksparse(*args, *layout, bounds, bounds, **options)
    needing = [args[0].clone().requires_grad_(), *args[1:]]
    with pytest.raises(NotImplementedError, match="no blocksparse_backward with key_ranks yet"):
        torch_paged_attn.blocksparse(*needing, *layout, bounds, bounds, **options)
    with pytest.raises(NotImplementedError, match=r"blocksparse_backward\(\): key_ranks is not"):
        torch_paged_attn.blocksparse_backward(
            out, None, *args, *layout, out, lse, bounds, bounds, **options
        )
