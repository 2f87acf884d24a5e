"""How a gradient reaches the backward ops, which the reference answers here."""

import itertools

import pytest
import torch
from gradient_cases import INPUTS, SPARSE, assert_same, by_hand, case, gradients, is_float, loss_of

import torch_paged_attn
from torch_paged_attn import reference

pytestmark = pytest.mark.usefixtures("reference_backward")


@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_eager(changes, reference_backward):
    op, args, leaves = case(**changes)
    found = gradients(getattr(torch_paged_attn, op), args, leaves)
    assert reference_backward == [f"{op}_backward"]
    assert_same(found, gradients(by_hand(op), args, leaves))


SUBSETS = [s for n in (1, 2, 4) for s in itertools.combinations(INPUTS, n)][::3]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_some_of_the_inputs(names, reference_backward, monkeypatch):
    _, args, leaves = case()
    for name in INPUTS:
        leaves[name].requires_grad_(name in names)
    asked = {name: leaves[name] for name in names}
    masks = []
    backward = reference.flash_varlen_backward

    def watched(*args, output_mask, **kwargs):
        masks.append(tuple(output_mask))
        return backward(*args, output_mask=output_mask, **kwargs)

    monkeypatch.setattr(reference, "flash_varlen_backward", watched)
    found = gradients(torch_paged_attn.flash_varlen, args, asked)
    assert masks == [tuple(name in names for name in INPUTS)]
    assert_same(found, gradients(by_hand("flash_varlen"), args, asked))


@pytest.mark.parametrize("which", ["out", "lse"])
def test_one_result_alone(which):
    _, args, leaves = case()

    def loss(function):
        out, lse = function(**args)
        return out.sum() if which == "out" else torch.where(lse > float("-inf"), lse, 0.0).sum()

    found, wanted = (
        torch.autograd.grad(loss(f), list(leaves.values()), materialize_grads=True)
        for f in (torch_paged_attn.flash_varlen, by_hand("flash_varlen"))
    )
    assert_same(found, wanted)


def test_slices_of_a_fused_projection():
    """Gradients are contiguous, whatever the strides of the inputs."""
    torch.manual_seed(0)
    fused = torch.randn(6, 8, 16).requires_grad_()
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)

    def gradient(function):
        q, k, v = fused.split([4, 2, 2], dim=1)
        return torch.autograd.grad(loss_of(*function(q, k, v, bounds, causal=True)), fused)

    assert_same(gradient(torch_paged_attn.flash_varlen), gradient(by_hand("flash_varlen")))


def test_values_that_are_a_part_of_the_keys():
    torch.manual_seed(0)
    latent = torch.randn(6, 1, 16).requires_grad_()
    q, bounds = torch.randn(6, 4, 16), torch.tensor([0, 6], dtype=torch.int32)

    def gradient(function):
        return torch.autograd.grad(loss_of(*function(q, latent, latent[..., :8], bounds)), latent)

    assert_same(gradient(torch_paged_attn.flash_varlen), gradient(by_hand("flash_varlen")))


def positional(op, args):
    """The call as `opcheck` wants it: tensors and hints in order, options by name."""
    overload = getattr(torch.ops.paged_attn, op).default
    args = {"cu_seqlens_k": None, "max_seqlen_q": 7, "max_seqlen_k": 9} | args
    order = [a.name for a in overload._schema.arguments if not a.kwarg_only]
    return overload, tuple(args.pop(name, None) for name in order), args


@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_opcheck(changes):
    op, args, _ = case(**changes)
    torch.library.opcheck(*positional(op, args))


@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_opcheck_of_the_backward(changes):
    op, args, _ = case(**changes)
    args = {n: x.detach() if is_float(x) else x for n, x in args.items()}
    for name in ("out_dtype", "batch_invariant"):  # the forward's alone
        args.pop(name)
    out, lse = getattr(torch_paged_attn, op)(**args)
    args |= {"dout": torch.randn(out.shape), "dlse": None, "out": out, "softmax_lse": lse}
    for mask in ([True] * 5, [False, True, False, False, True]):
        torch.library.opcheck(*positional(f"{op}_backward", args | {"output_mask": mask}))


def test_opcheck_of_merged_states():
    out, lse = torch.randn(3, 2, 4).requires_grad_(), torch.randn(2, 3).requires_grad_()
    parts = out, lse, out.detach() + 1, lse.detach() - 1
    torch.library.opcheck(torch.ops.paged_attn.merge_states.default, parts)
    parts = tuple(x.detach() for x in parts)
    lists = list(parts[::2]), list(parts[1::2])
    torch.library.opcheck(torch.ops.paged_attn.merge_states.list, lists)
    merged = torch_paged_attn.merge_states(*parts)
    given = (torch.randn(3, 2, 4), torch.randn(2, 3), *parts, *merged)
    torch.library.opcheck(torch.ops.paged_attn.merge_states_backward.default, given)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_lists_of_parts_have_the_gradients_of_each_part(number):
    """Bit for bit: what is known of the other parts are the results."""
    outs = [torch.randn(3, 2, 4).requires_grad_() for _ in range(number)]
    lses = [torch.randn(2, 3).requires_grad_() for _ in range(number)]
    out, lse = torch_paged_attn.merge_states(outs, lses)
    dout, dlse = torch.randn(3, 2, 4), torch.randn(2, 3)
    found = torch.autograd.grad((out, lse), (*outs, *lses), (dout, dlse))
    for i in range(number):
        part = outs[i].detach(), lses[i].detach()
        whole = out.detach(), lse.detach()
        wanted = torch_paged_attn.merge_states_backward(dout, dlse, *part, *part, *whole)
        assert torch.equal(found[i], wanted[0]) and torch.equal(found[number + i], wanted[1])


def test_lists_of_parts_where_one_alone_needs_a_gradient():
    outs, lses = [torch.randn(3, 2, 4) for _ in range(3)], [torch.randn(2, 3) for _ in range(3)]
    lses[1].requires_grad_()
    out, _ = torch_paged_attn.merge_states(outs, lses, out_dtype=torch.bfloat16)
    assert out.requires_grad and out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert lses[1].grad.shape == (2, 3) and lses[1].grad.any()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_losses_at_once():
    _, args, leaves = case()
    out, _ = torch_paged_attn.flash_varlen(**args)
    douts = torch.randn(3, *out.shape)
    given = out, list(leaves.values())
    batched = torch.autograd.grad(*given, douts, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(*given, dout, retain_graph=True) for dout in douts]
    assert_same(batched, [torch.stack(x) for x in zip(*alone, strict=True)])


def test_what_is_saved():
    """The inputs and the results, and nothing else: hooks may keep them elsewhere."""
    _, args, leaves = case()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        out, lse = torch_paged_attn.flash_varlen(**args)
    kept = {x.data_ptr() for x in saved if x.numel()}
    given = [x for x in args.values() if isinstance(x, torch.Tensor)]
    assert kept == {x.data_ptr() for x in (*given, out, lse)} and len(saved) == len(kept)
    with torch.autograd.graph.save_on_cpu():
        found = gradients(torch_paged_attn.flash_varlen, args, leaves)
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


def test_an_exception_of_a_hook_passes():
    class Full(Exception):
        pass

    def pack(_):
        raise Full("no room")

    _, args, _ = case()
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
        pytest.raises(Full, match="no room"),
    ):
        torch_paged_attn.flash_varlen(**args)


@pytest.mark.parametrize("name", [*INPUTS, "cu_seqlens_q", "out", "softmax_lse"])
def test_what_is_written_before_the_backward_is_seen(name):
    _, args, leaves = case()
    out, lse = torch_paged_attn.flash_varlen(**args)
    loss = loss_of(out * 1.0, lse * 1.0)
    with torch.no_grad():
        ({"out": out, "softmax_lse": lse} | args)[name].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, list(leaves.values()))


def test_plain_meta_tensors():
    _, args, _ = case()
    meta = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in args.items()}
    meta |= {n: meta[n].detach().requires_grad_() for n in ("q", "k")}
    out, _ = torch_paged_attn.flash_varlen(**meta)
    dq, dk = torch.autograd.grad(out.sum(), (meta["q"], meta["k"]))
    assert dq.shape == meta["q"].shape and dk.shape == meta["k"].shape


def test_deterministic_is_passed_on(monkeypatch):
    seen, answer = [], reference.flash_varlen_backward

    def backward(*args, deterministic=True, **kwargs):
        seen.append(deterministic)
        return answer(*args, **kwargs)

    monkeypatch.setattr(reference, "flash_varlen_backward", backward)
    _, args, leaves = case()
    for asked in (True, False):
        loss = loss_of(*torch_paged_attn.flash_varlen(**args | {"deterministic": asked}))
        torch.autograd.grad(loss, leaves["q"])
    assert seen == [True, False]
