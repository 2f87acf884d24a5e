"""How a gradient reaches the backward ops, which the reference answers here."""

import inspect
import itertools

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.backends.cpu import Cpu
from torch_paged_attn.ops import _inlining
from torch_paged_attn.testing import Layout, Problem, build

pytestmark = pytest.mark.usefixtures("reference_backward")

SEQS = ((3, 2), (0, 0), (5, 0))
SPARSE = {"layout": Layout(16, 16, "kv")}
PROBLEM = Problem("glue", SEQS, 4, 2, 8, 6, bias="float", sinks=True, softcap=3.0)
INPUTS = ("q", "k", "v", "attn_bias", "sinks")


def case(**changes):
    """A call without NaN, its leaves, and a loss of both of its results."""
    call = build(Problem(**{**vars(PROBLEM), **changes}))
    args = {n: x.nan_to_num(0.0) if is_float(x) else x for n, x in call.args.items()}
    leaves = {n: args[n].requires_grad_() for n in INPUTS if is_float(args.get(n))}
    return call.op, args, leaves


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def loss_of(out, lse):
    return (out.float() ** 2).sum() + torch.where(lse > float("-inf"), lse, 0.0).sin().sum()


def gradients(function, args, leaves):
    loss = loss_of(*function(**args))
    return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


class ByHand(torch.autograd.Function):
    """An op whose backward is called here, not by the package's way to it."""

    @staticmethod
    def forward(ctx, op, args, *inputs):
        ctx.op, ctx.args = op, args
        out, lse = getattr(torch_paged_attn, op)(**args, **dict(zip(INPUTS, inputs, strict=True)))
        ctx.save_for_backward(*inputs, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *inputs, out, lse = ctx.saved_tensors
        args = ctx.args | dict(zip(INPUTS, inputs, strict=True))
        args |= {"dout": dout, "dlse": dlse, "out": out, "softmax_lse": lse}
        mask = ctx.needs_input_grad[2:]
        found = getattr(reference, f"{ctx.op}_backward")(**args, output_mask=mask)
        return None, None, *(x if wanted else None for x, wanted in zip(found, mask, strict=True))


def by_hand(op):
    signature = inspect.signature(getattr(torch_paged_attn, op))

    def call(*args, **options):
        given = signature.bind(*args, **options).arguments
        inputs = [given.pop(name, None) for name in INPUTS]
        return ByHand.apply(op, given, *inputs)

    return call


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


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


class Graphs:
    """A compiler that runs graphs as they are and keeps the names of their operators."""

    def __init__(self):
        self.forward, self.backward = [], []

    def keep(self, names):
        def compiler(graph, _):
            names.append([str(n.target) for n in graph.graph.nodes if n.op == "call_function"])
            return make_boxed_func(graph.forward)

        return compiler

    def compile(self, function, **options):
        from torch._dynamo.backends.common import aot_autograd

        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=self.keep(self.forward),
            bw_compiler=self.keep(self.backward),
            partition_fn=min_cut_rematerialization_partition,
        )
        return torch.compile(function, fullgraph=True, backend=backend, **options)

    def count(self, op):
        """How often an operator stands in the forward graph, and in the backward's."""
        target = f"paged_attn.{op}.default"
        assert len(self.forward) == len(self.backward) == 1
        return self.forward[0].count(target), self.backward[0].count(target)


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

    monkeypatch.setattr(_inlining, "DISPATCH_KEYS", {"cpu": "CPU"})
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


def policy_of(policy):
    """Contexts of selective checkpointing that save attention, or compute it again."""
    from torch.utils import checkpoint

    def decide(_context, op, *_args, **_kwargs):
        is_ours = op is torch.ops.paged_attn.flash_varlen.default
        return policy if is_ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: checkpoint.create_selective_checkpoint_contexts(decide)


def block(**args):
    out, lse = torch_paged_attn.flash_varlen(**args)
    return out * 1.0, lse * 1.0


def checkpointed(context_fn=None):
    from torch.utils.checkpoint import checkpoint

    options = {} if context_fn is None else {"context_fn": context_fn}
    return lambda **args: checkpoint(block, use_reentrant=False, **options, **args)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """How often an operator ran."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


POLICIES = {"MUST_SAVE": 1, "PREFER_RECOMPUTE": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(policy):
    from torch.utils.checkpoint import CheckpointPolicy

    _, args, leaves = case()
    context = policy_of(CheckpointPolicy[policy])
    with Calls(torch.ops.paged_attn.flash_varlen.default) as calls:
        found = gradients(checkpointed(context), args, leaves)
    assert calls.count == POLICIES[policy]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_compiled(policy):
    from torch.utils.checkpoint import CheckpointPolicy

    _, args, leaves = case()
    graphs = Graphs()
    compiled = graphs.compile(checkpointed(policy_of(CheckpointPolicy[policy])))
    found = gradients(compiled, args, leaves)
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))
    assert graphs.count("flash_varlen") == (1, POLICIES[policy] - 1)
    assert graphs.count("flash_varlen_backward") == (0, 1)


def test_checkpointing():
    """Computing again stops as soon as all is there: an exception that passes a kernel in C++."""
    _, args, leaves = case()
    found = gradients(checkpointed(), args, leaves)
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


def test_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    _, args, leaves = case()

    def again(*inputs):
        return block(**args | dict(zip(leaves, inputs, strict=True)))

    # this one refuses `torch.autograd.grad`
    loss_of(*checkpoint(again, *leaves.values(), use_reentrant=True)).backward()
    found = [x.grad for x in leaves.values()]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    _, args, leaves = case()
    graphs = Graphs()
    attend = graphs.compile(torch_paged_attn.flash_varlen)
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss_of(*attend(**args)).backward()
    found = [x.grad for x in leaves.values()]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_several_losses_at_once():
    _, args, leaves = case()
    out, _ = torch_paged_attn.flash_varlen(**args)
    douts = torch.randn(3, *out.shape)
    given = out, list(leaves.values())
    batched = torch.autograd.grad(*given, douts, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(*given, dout, retain_graph=True) for dout in douts]
    assert_same(batched, [torch.stack(x) for x in zip(*alone, strict=True)])


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(6, 8 * 8)

    def forward(self, x, bounds):
        q, k, v = self.project(x).unflatten(1, (8, 8)).split([4, 2, 2], 1)
        return torch_paged_attn.flash_varlen(q, k, v, bounds, causal=True)[0]


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


def test_gradients_of_gradients_are_refused():
    _, args, leaves = case()
    out, _ = torch_paged_attn.flash_varlen(**args)
    (dq,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^paged_attn::flash_varlen_backward: a gra"):
        torch.autograd.grad(dq.square().sum(), leaves["q"])


def loss_by_q(args, function):
    return lambda q: loss_of(*function(**args | {"q": q}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms():
    from torch.func import grad, jacrev, vjp, vmap

    _, args, leaves = case(seqs=((3, 2),))
    args = {n: x.detach() if is_float(x) else x for n, x in args.items()}
    ours = loss_by_q(args, torch_paged_attn.flash_varlen)
    q = args["q"]
    batch = torch.stack([q, q * 2.0])
    wanted = []
    for x in batch:
        leaf = x.clone().requires_grad_()
        wanted += gradients(by_hand("flash_varlen"), args | {"q": leaf}, {"q": leaf})
    assert_same([grad(ours)(q)], wanted[:1])
    assert_same([vjp(ours, q)[1](torch.tensor(1.0))[0]], wanted[:1])
    assert_same([jacrev(ours)(q)], wanted[:1])
    assert_same(vmap(grad(ours))(batch), wanted)
    assert_same(grad(lambda x: vmap(ours)(x).sum())(batch), wanted)
    with pytest.raises(NotImplementedError, match="a gradient of its results came"):
        grad(lambda x: grad(ours)(x).sum())(q)
    assert leaves.keys() == {"q", "k", "v", "attn_bias", "sinks"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode_over_reverse_mode():
    """Products with a Hessian: a tangent that only the outer transform sees is found."""
    from torch.func import grad, hessian, jvp, vjp, vmap

    _, args, _ = case(seqs=((3, 2),))
    args = {n: x.detach() if is_float(x) else x for n, x in args.items()}
    ours = loss_by_q(args, torch_paged_attn.flash_varlen)
    q, out, lse = args["q"], torch.randn(3, 2, 8), torch.randn(2, 3)
    one = torch.tensor(1.0)
    for transform in (
        lambda: jvp(grad(ours), (q,), (q,)),
        lambda: jvp(grad(grad(ours)), (q,), (q,)),
        lambda: jvp(lambda x: vjp(ours, x)[1](one)[0], (q,), (q,)),
        lambda: jvp(vmap(grad(ours)), (q[None],), (q[None],)),
        lambda: hessian(ours)(q),
        lambda: jvp(
            grad(lambda x: torch_paged_attn.merge_states(x, lse, x, lse)[0].sum()), *2 * [(out,)]
        ),
    ):
        with pytest.raises(NotImplementedError, match="carries a tangent of forward-mode AD"):
            transform()
    scaled = jvp(lambda x: (grad(ours)(q) * x).sum(), (one,), (one,))[1]
    assert_same([scaled], [grad(ours)(q).sum()])


def test_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    _, args, leaves = case()
    q = TwoTensor(leaves["q"].detach(), leaves["q"].detach() * 2.0).requires_grad_()
    (dq,) = torch.autograd.grad(loss_of(*torch_paged_attn.flash_varlen(**args | {"q": q})), q)
    for part, factor in ((dq.a, 1.0), (dq.b, 2.0)):
        scaled = (leaves["q"].detach() * factor).requires_grad_()
        wanted = gradients(by_hand("flash_varlen"), args | {"q": scaled}, {"q": scaled})
        assert_same([part], wanted)


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
