"""Gradients in compiled and exported graphs."""

import pytest
import torch
from gradient_cases import (
    SEQS,
    SPARSE,
    Attend,
    assert_same,
    by_hand,
    case,
    gradients,
    is_float,
    loss_of,
)
from recorded_graphs import Graphs

import torch_paged_attn
from torch_paged_attn.backends.cpu import Cpu

pytestmark = pytest.mark.usefixtures("reference_backward")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_compiled(changes, dynamic):
    op, args, leaves = case(**changes)
    graphs = Graphs()

    def attend(**args):
        return getattr(torch_paged_attn, op)(**args | {"q": args["q"] * 1.0})

    found = gradients(graphs.compile(attend, dynamic=dynamic), args, leaves)
    assert_same(found, gradients(by_hand(op), args, leaves))
    assert graphs.count(op) == (1, 0) and graphs.count(f"{op}_backward") == (0, 1)


def test_compiled_once_for_batches_of_any_size():
    graphs = Graphs()
    compiled = graphs.compile(torch_paged_attn.flash_varlen, dynamic=True)
    # no two sizes of the first batch are equal by chance: dynamo would take them for one symbol
    sizes = {"num_heads": 10, "num_kv_heads": 5, "head_dim": 16, "head_dim_v": 16, "bias": ""}
    for seqs in (SEQS, ((7, 1), (2, 2), (9, 0), (3, 30)), ((2, 1), (4, 0))):
        _, args, leaves = case(seqs=seqs, **sizes)
        found = gradients(compiled, args, leaves)
        assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))
        assert graphs.count("flash_varlen_backward") == (0, 1)


def test_hints_that_vary_compile_twice():
    graphs = Graphs()
    compiled = graphs.compile(torch_paged_attn.flash_varlen)
    _, args, leaves = case()
    wanted = gradients(by_hand("flash_varlen"), args, leaves)
    for hint in range(7, 12):
        hints = {"max_seqlen_q": hint, "max_seqlen_k": hint}
        assert_same(gradients(compiled, args | hints, leaves), wanted)
    assert len(graphs.forward) == 2  # 7 itself, then any number


def test_a_graph_without_gradients_has_no_backward():
    graphs = Graphs()
    _, args, _ = case()
    compiled = graphs.compile(torch_paged_attn.flash_varlen)
    with torch.no_grad():
        compiled(**args)
    assert "paged_attn.flash_varlen.default" in graphs.forward[0] and not graphs.backward


def test_a_graph_looks_into_an_op_only_without_gradients(monkeypatch):
    """Checkpointing policies and the partitioner go by the op."""

    def looked_into(q, *_args, **_options):
        return q * 2.0, q.sum(-1).mT

    monkeypatch.setattr(Cpu, "traceable", lambda self, op: looked_into)
    _, args, leaves = case(head_dim_v=8)
    node = "paged_attn.flash_varlen.default"
    graphs = Graphs()
    with torch.no_grad():
        plain = {n: x.detach() if is_float(x) else x for n, x in args.items()}
        graphs.compile(torch_paged_attn.flash_varlen)(**plain)
    assert node not in graphs.forward[0] and "aten.mul.Tensor" in graphs.forward[0]
    graphs = Graphs()
    gradients(graphs.compile(torch_paged_attn.flash_varlen), args, leaves)
    assert graphs.count("flash_varlen") == (1, 0)


def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    _, args, leaves = case()
    graphs = Graphs()
    attend = graphs.compile(torch_paged_attn.flash_varlen)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss_of(*attend(**args)).backward()
    found = [x.grad for x in leaves.values()]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


def test_an_exported_model_trains_on_batches_of_any_size():
    sizes = {0: torch.export.Dim("tokens", min=2)}, {0: torch.export.Dim("bounds", min=2)}
    given = torch.randn(12, 6), torch.tensor([0, 5, 12], dtype=torch.int32)
    model = Attend()
    exported = torch.export.export(model, given, dynamic_shapes=sizes).module()
    x, bounds = torch.randn(9, 6), torch.tensor([0, 2, 3, 9], dtype=torch.int32)
    found = []
    for either in (exported, model):
        either(x, bounds).square().sum().backward()
        found.append([p.grad.clone() for p in either.parameters()])
        either.zero_grad()
    assert_same(*found)
