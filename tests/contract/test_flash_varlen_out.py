"""`flash_varlen_out` before any kernel: what it refuses, and how torch sees it."""

import pytest
import torch

import torch_paged_attn
from torch_paged_attn.ops import _library

BOUNDS = torch.tensor([0, 3, 6], dtype=torch.int32)


def inputs(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    q = torch.randn(7, 4, 16, generator=g).to(dtype)
    k, v = (torch.randn(7, 2, 16, generator=g).to(dtype) for _ in range(2))
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": BOUNDS}


def wrong_outs(given):
    return {
        "columns": (torch.empty(7, 4, 15), "shape"),
        "tokens": (torch.empty(6, 4, 16), "shape"),
        "dimensions": (torch.empty(7, 64), "shape"),
        "bfloat16": (torch.empty(7, 4, 16, dtype=torch.bfloat16), "got bfloat16"),
        "int32": (torch.empty(7, 4, 16, dtype=torch.int32), "got int32"),
        "columns apart": (torch.empty(7, 4, 32)[..., ::2], "strides"),
        "one row of heads": (torch.empty(7, 1, 16).expand(7, 4, 16), "strides"),
        "overlapping tokens": (torch.empty(999).as_strided((7, 4, 16), (16, 16, 1)), "strides"),
        "q itself": (given["q"], "memory of q"),
        "between q's heads": (torch.zeros(7, 8, 16)[:, 4:], "memory of q"),
    }


@pytest.mark.parametrize(
    ("runs", "name"),
    [
        (runs, name)
        for runs in ("op", "explain", "meta")
        for name, (_, why) in wrong_outs(inputs()).items()
        if runs != "meta" or "memory" not in why  # a tensor without memory shares none
    ],
)
def test_refuses(name, runs):
    given = inputs()
    out, why = wrong_outs(given)[name]
    if name == "between q's heads":  # queries that are slices of a fused projection
        fused = torch.zeros(7, 8, 16)
        given["q"], out = fused[:, :4], fused[:, 4:]
    if runs == "meta":
        given = {n: x.to("meta") for n, x in given.items()}
        out = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    call = torch_paged_attn.flash_varlen_out
    with pytest.raises(ValueError, match=rf"flash_varlen_out.*out.*{why}"):
        if runs == "explain":
            torch_paged_attn.explain(call, out, **given)
        else:
            call(out, **given)


def test_a_scale_needs_float8():
    given = inputs()
    with pytest.raises(ValueError, match=r"flash_varlen_out.*out_scale"):
        torch_paged_attn.flash_varlen_out(
            torch.empty(7, 4, 16), **given, out_scale=torch.tensor(2.0)
        )


@pytest.mark.parametrize("name", ["out", "q", "v"])
def test_gradients_are_refused(name):
    given = inputs() | {"out": torch.empty(7, 4, 16)}
    given[name] = given[name].requires_grad_()
    with pytest.raises(NotImplementedError, match=rf"flash_varlen_out.*{name} requires grad"):
        torch_paged_attn.flash_varlen_out(**given)
    with torch.no_grad():
        torch_paged_attn.flash_varlen_out(**given)


def test_version_is_raised():
    """Autograd has to see that a tensor which it saved has changed."""
    x = torch.ones(7, 4, 16, requires_grad=True)
    out = torch.zeros(7, 4, 16)
    product = x * out
    torch_paged_attn.flash_varlen_out(out, **inputs())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_autocast():
    given = inputs()
    out = torch.empty(7, 4, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        lse = torch_paged_attn.flash_varlen_out(out, **given)
        wanted, wanted_lse = torch_paged_attn.flash_varlen(**given)
    assert torch.equal(out, wanted) and torch.equal(lse, wanted_lse)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic):
    """One node of a graph, which writes in place: into a part of a tensor, too."""

    def step(whole, **given):
        lse = torch_paged_attn.flash_varlen_out(whole[:, 4:], **given, causal=True)
        return whole * 2, lse

    given = inputs()
    found, wanted = torch.zeros(7, 8, 16), torch.zeros(7, 8, 16)
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for a, b in zip(compiled(found, **given), step(wanted, **given), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found, wanted)
    assert (found[:, :4] == 0).all() and (found[:6, 4:] != 0).any()


def test_exports():
    class Step(torch.nn.Module):
        def forward(self, out, q, k, v, cu_seqlens_q):
            lse = torch_paged_attn.flash_varlen_out(out, q, k, v, cu_seqlens_q)
            return out + 1, lse

    args = (torch.zeros(7, 4, 16), *inputs().values())
    program = torch.export.export(Step(), args)
    wanted, _ = torch_paged_attn.flash_varlen(**inputs())
    assert torch.equal(program.module()(*args)[0], wanted + 1)


@pytest.mark.parametrize("out", [torch.zeros(7, 4, 16), torch.zeros(7, 8, 16)[:, 4:]])
def test_opcheck(out):
    args = (out, *inputs().values(), None, 3, 3)
    torch.library.opcheck(torch.ops.paged_attn.flash_varlen_out.default, args, {"causal": True})


def test_vmap_is_refused():
    given = inputs()
    with pytest.raises(NotImplementedError, match=r"flash_varlen_out.*vmap"):
        torch.vmap(lambda out: torch_paged_attn.flash_varlen_out(out, **given))(
            torch.zeros(2, 7, 4, 16)
        )


def test_every_backend_has_it():
    for name in ("cpu", "triton", "neuron", "tpu"):
        backend = next(x for x in _library.backends() if x.name == name)
        assert backend.is_compiled or backend.has("flash_varlen_out"), name
