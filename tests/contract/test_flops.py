"""How many operations torch's counter sees in a call."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torch_paged_attn
from torch_paged_attn.testing import Layout, Problem, build

HEADS, DIM, DIM_V = 4, 16, 8
SEQS = ((5, 3), (0, 2), (9, 0), (4, -1))
# pairs of a query and a key that see each other
CAUSAL = (4 + 5 + 6 + 7 + 8) + 45 + (0 + 1 + 2 + 3)
DENSE = 5 * 8 + 9 * 9 + 4 * 3
WINDOW = 5 * 3 + (1 + 2 + 7 * 3) + (0 + 1 + 2 + 3)  # of the position and two keys before it


def problem(**changes):
    return Problem("counted", SEQS, HEADS, 2, DIM, DIM_V, **changes)


def counted(call, **changes):
    with FlopCounterMode(display=False) as counter:
        call.run(**changes)
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "changes, pairs",
    [
        ({}, CAUSAL),
        ({"causal": False}, DENSE),
        ({"window_size_left": 2}, WINDOW),
        ({"page_size": 4}, CAUSAL),
        ({"layout": Layout(16, 16, density=1.0)}, CAUSAL),
        ({"layout": Layout(16, 16, density=0.0)}, 0),
    ],
)
def test_forward(changes, pairs):
    assert counted(build(problem(**changes))) == 2 * HEADS * pairs * (DIM + DIM_V)


@pytest.mark.usefixtures("reference_backward")
@pytest.mark.parametrize(
    "asked, products", [(("q", "k", "v"), 3 * DIM + 2 * DIM_V), (("q",), None)]
)
def test_backward(asked, products):
    call = build(problem()).needs(*asked)
    out, _ = call.run()
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(out.nan_to_num().sum(), [call.args[name] for name in asked])
    products = products or 2 * DIM + DIM_V
    assert counter.get_total_flops() == 2 * HEADS * CAUSAL * products


def test_unknown_lengths():
    with FakeTensorMode():
        q, bounds = torch.empty(100, HEADS, DIM), torch.empty(5, dtype=torch.int32)
        for options, pairs in (
            ({}, 100 * 100),
            ({"max_seqlen_k": 30}, 100 * 30),
            ({"max_seqlen_k": 30, "causal": True}, 100 * 15),
            ({"causal": True, "window_size_left": 6}, 100 * 7),
        ):
            with FlopCounterMode(display=False) as counter:
                torch_paged_attn.flash_varlen(q, q, q, bounds, **options)
            assert counter.get_total_flops() == 2 * HEADS * pairs * 2 * DIM


@pytest.mark.parametrize("first", ["torch_paged_attn", "torch.utils.flop_counter"])
def test_flops_are_registered_in_either_order_of_import(first, programs):
    """Only programs that count import the counter, which imports Triton."""
    code = f"""
import sys, torch, {first}
assert {first!r} == "torch.utils.flop_counter" or "torch.utils.flop_counter" not in sys.modules
import torch_paged_attn, torch.utils.flop_counter
for op in ("flash_varlen", "flash_varlen_backward", "blocksparse", "blocksparse_backward"):
    assert getattr(torch.ops.paged_attn, op) in torch.utils.flop_counter.flop_registry
"""
    programs.run(code, str(Path(torch_paged_attn.__file__).parents[1]))
