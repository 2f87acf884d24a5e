"""Gradients under autocast, and with a scaler."""

import pytest
import torch
from gradient_cases import SEQS, SPARSE, Attend, assert_same, case, gradients
from recorded_graphs import Graphs

import torch_paged_attn
from torch_paged_attn.testing import Problem, build

pytestmark = pytest.mark.usefixtures("reference_backward")


def test_a_scaler_skips_the_step_that_overflows():
    model, x = Attend(), torch.randn(12, 6)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def step(weight):
        before = model.project.weight.detach().clone()
        with torch.autocast("cpu", torch.float16):
            out = model(x, bounds)
        assert out.dtype == torch.float16
        scaler.scale((out.float() * weight).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return not torch.equal(model.project.weight, before)

    assert step(1.0) and scaler.get_scale() == 2.0**8
    assert not step(1e6) and scaler.get_scale() < 2.0**8
    assert step(1.0)


CASTS = {
    "f32": (torch.float32, torch.bfloat16),
    "other 16 bits": (torch.float16, torch.bfloat16),
    "same": (torch.bfloat16, torch.bfloat16),
    "to f16": (torch.float32, torch.float16),
}


@pytest.mark.parametrize("dtype, to", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_autocast(changes, dtype, to):
    """q, k and v are cast, and their gradients back; bias and sinks are left as they are."""
    op, args, leaves = case(dtype=dtype, **changes)
    args["attn_bias"] = leaves["attn_bias"] = args["attn_bias"].detach().float().requires_grad_()
    function = getattr(torch_paged_attn, op)

    def attend(**args):
        with torch.autocast("cpu", to):
            return function(**args)

    out, _ = attend(**args)
    cast = args | {name: args[name].to(to) for name in "qkv"}
    assert out.dtype == to and torch.equal(out, function(**cast)[0])
    found = gradients(attend, args, leaves)
    assert [x.dtype for x in found] == [x.dtype for x in leaves.values()]
    assert_same(found, gradients(function, cast, leaves))
    graphs = Graphs()
    compiled = gradients(graphs.compile(attend), args, leaves)
    assert_same(compiled, found)
    assert graphs.count(op) == (1, 0) and graphs.count(f"{op}_backward") == (0, 1)
    # and the same call outside
    assert function(**args)[0].dtype == dtype


def test_autocast_leaves_caches_and_eight_bits_alone():
    call = build(Problem("cached", SEQS, 4, 2, 8, page_size=4))
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = call.run()
        assert out.dtype == torch.float32
        out, _ = call.run(q=call.args["q"].half())
        assert out.dtype == torch.float32
    call = build(Problem("eight bits", SEQS, 4, 2, 8, dtype=torch.float8_e4m3fn))
    with torch.autocast("cpu", torch.bfloat16):
        assert call.run()[0].dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XLA", "PrivateUse1"])
def test_autocast_is_bound(key):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in ("flash_varlen", "blocksparse"):
        assert has(f"paged_attn::{op}", f"Autocast{key}")
