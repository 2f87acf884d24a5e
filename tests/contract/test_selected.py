"""The ops of selected keys as torch sees them: wrong calls, opcheck, compile, counting."""

import functools

import pytest
import torch
from right_calls import ints, packed, paged
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.testing import (
    SELECTED,
    SELECTED_DIFFERENTIABLE,
    assert_as_right_as,
    build,
)

OP = torch.ops.paged_attn.selected_attention.default


def lists(groups=2, entries=3):
    units = torch.stack([torch.randperm(4)[:entries] for _ in range(7 * groups)])
    return units.view(7, groups, entries).to(torch.int32)


def of_packed():
    return packed() | {"key_indices": lists(1)}


def of_pages():
    return paged() | {"key_indices": lists(2), "num_selected": torch.ones(7, 2, dtype=torch.int32)}


def of_slots():
    args = paged() | {"key_indices": lists(2), "causal": False}
    return args | {"block_table": None, "seqused_k": None}


BASES = {"packed": of_packed, "pages": of_pages, "slots": of_slots}

# base, changes, the argument that the error names
WRONG = [
    ("packed", {"key_indices": lists(1).long()}, "key_indices"),
    ("packed", {"key_indices": lists(1)[0]}, "key_indices"),
    ("packed", {"key_indices": lists(3)}, "key_indices"),
    ("packed", {"key_indices": lists(1)[:5]}, "key_indices"),
    ("packed", {"select_size": 3}, "select_size"),
    ("packed", {"select_size": 512}, "select_size"),
    ("packed", {"select_size": 0}, "select_size"),
    ("pages", {"num_selected": torch.ones(7, 1, dtype=torch.int32)}, "num_selected"),
    ("pages", {"num_selected": torch.ones(7, 2)}, "num_selected"),
    ("pages", {"seqused_k": None}, "seqused_k"),
    ("slots", {"causal": True}, "causal"),
    ("slots", {"window_size_left": 3}, "window_size_left"),
    ("slots", {"window_size_right": 3}, "window_size_right"),
    ("slots", {"q_position": ints(0, 1)}, "q_position"),
    ("slots", {"seqused_k": ints(4, 7)}, "seqused_k"),
    ("slots", {"select_size": 8}, "select_size"),
]
# what only the values say
WRONG_VALUES = [
    ("packed", {"key_indices": torch.ones(7, 1, 2, dtype=torch.int32)}, ValueError, "key_indices"),
    ("pages", {"num_selected": torch.full((7, 2), 4, dtype=torch.int32)}, ValueError, "num_select"),
    ("pages", {"num_selected": torch.full((7, 2), -1, dtype=torch.int32)}, ValueError, "num_sel"),
    ("pages", {"block_table": ints(9, 9, 9, 9).view(2, 2)}, IndexError, "block_table"),
    ("pages", {"block_table": ints(-1, 0, -1, 0).view(2, 2)}, IndexError, "block_table"),
]


def run(args):
    return OP(**args)


@pytest.mark.parametrize("base", BASES)
def test_right_calls(base):
    torch.manual_seed(0)
    out, lse = run(BASES[base]())
    assert out.shape == (7, 4, 6) and lse.shape == (4, 7)


@pytest.mark.parametrize("base, changes, name", WRONG)
def test_metadata(base, changes, name):
    """The same error eagerly and of fake tensors."""
    args = BASES[base]() | changes
    with pytest.raises(ValueError, match=name) as eager:
        run(args)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in args.items()}
        with pytest.raises(ValueError) as fake:
            run(fakes)
    assert str(eager.value) == str(fake.value)


@pytest.mark.parametrize("base, changes, error, name", WRONG_VALUES)
def test_values(base, changes, error, name):
    args = BASES[base]() | changes
    with torch.inference_mode(), pytest.raises(error, match=name):
        run(args)


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"num_units": 0}, "num_units"),
        ({"num_units": 3, "force_first": 2, "force_last": 2}, "num_units"),
        ({"num_units": 3, "score": "silu"}, "score"),
        ({"num_units": 3, "pool": "min"}, "pool"),
        ({"num_units": 3, "select_size": 5}, "select_size"),
        ({"num_units": 3, "force_last": -1}, "force_last"),
        ({"num_units": 3, "weights": torch.ones(7, 2)}, "weights"),
    ],
)
def test_wrong_select_keys(changes, name):
    args = {name: x for name, x in packed().items() if name != "v"} | {"weights": None}
    with pytest.raises(ValueError, match=name):
        torch_paged_attn.select_keys(**args | changes)


def test_a_unit_past_the_keys_may_be_named_twice():
    indices = torch.full((7, 1, 3), 99, dtype=torch.int32)
    out, lse = run(of_packed() | {"key_indices": indices})
    assert (out == 0).all() and (lse == float("-inf")).all()


def positional(op, args):
    args = {"cu_seqlens_k": None, "max_seqlen_q": 7, "max_seqlen_k": 300} | args
    order = [a.name for a in op._schema.arguments if not a.kwarg_only]
    return tuple(args.pop(name, None) for name in order), args


@pytest.mark.parametrize("base", BASES)
def test_opcheck(base):
    args, options = positional(OP, BASES[base]())
    torch.library.opcheck(OP, args, options)


def test_opcheck_with_gradients():
    call = build(SELECTED_DIFFERENTIABLE["selected/training_shared_list/f32"]).needs()
    args, options = positional(OP, call.args)
    torch.library.opcheck(OP, args, options)


def test_opcheck_of_the_other_ops():
    args = {name: x for name, x in of_packed().items() if name != "v"}
    ops = torch.ops.paged_attn
    mass = args | {"softmax_lse": torch.zeros(4, 7)}
    given, options = positional(ops.selected_mass.default, mass)
    torch.library.opcheck(ops.selected_mass.default, given, options)
    del args["key_indices"]
    given, options = positional(ops.select_keys.default, args | {"weights": torch.rand(7, 4)})
    torch.library.opcheck(ops.select_keys.default, given, options | {"num_units": 2})


def test_compiles_once_for_all_sizes():
    torch._dynamo.reset()

    def attend(q, k, v, indices, bounds):
        return torch_paged_attn.selected_attention(q * 1.0, k, v, indices, bounds)[0] + 0.0

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for i, (tokens, entries) in enumerate(((9, 4), (13, 7), (30, 11))):
        x = torch.randn(tokens, 2, 8)
        rows = [torch.randperm(tokens)[:entries] for _ in range(tokens)]
        args = x, x, x, torch.stack(rows)[:, None].int(), ints(0, 3, tokens)
        with torch.compiler.set_stance("fail_on_recompile" if i else "default"):
            assert torch.equal(compiled(*args), attend(*args))


def test_exports():
    class Module(torch.nn.Module):
        def forward(self, q, indices, bounds):
            return torch_paged_attn.selected_attention(q, q, q, indices, bounds)[0]

    args = torch.randn(9, 2, 8), lists(1)[[0, 1, 2, 3, 4, 5, 6, 0, 1]], ints(0, 9)
    program = torch.export.export(Module(), args, strict=False)
    assert torch.equal(program.module()(*args), Module()(*args))


def test_autocast_casts_what_is_multiplied():
    args = of_packed()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, lse = run(args)
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32


def test_flops_follow_the_lists():
    args = of_slots()
    with FlopCounterMode(display=False) as counter:
        run(args)
    assert counter.get_total_flops() == 2 * 4 * 7 * 3 * (8 + 6)


@pytest.mark.parametrize("base", ["pages", "slots"])
def test_pages_have_no_gradient(base):
    args = BASES[base]()
    args["q"].requires_grad_()
    with pytest.raises(NotImplementedError, match="no gradient for"):
        run(args)


def test_explain_says_who_has_it():
    found = torch_paged_attn.explain("selected_attention", **of_packed())
    assert found.backend == "cpu" and found.path.kernel
    for name in ("tpu", "neuron"):
        assert found.paths[name].kernel is None


def on_hopper(op, *shapes, lists, **options):
    """Which of Triton's kernels run a call of one sequence."""
    make = functools.partial(torch.empty, device="meta")
    rows = [make(shape, dtype=torch.bfloat16) for shape in shapes]
    bounds = [make(2, dtype=torch.int32) for _ in range(2)]
    more = () if lists is None else (make(lists, dtype=torch.int32),)
    args = *rows, *more, *bounds, *([0, 0] if lists is None else [])
    return torch_paged_attn.explain(op, *args, target="sm90:132", **options).paths["triton"].kernel


def test_explain_names_the_kernels_of_hopper():
    q, k = (8192, 64, 128), (98304, 4, 128)
    blocks = functools.partial(on_hopper, "selected_attention", q, k, k, select_size=128)
    assert blocks(lists=(8192, 4, 16)) == "hopper units"
    assert blocks(lists=(8192, 4, 16), batch_invariant=True) == "portable"
    latents = (9, 16, 64), (90, 1, 64), (90, 1, 512)
    assert on_hopper("selected_attention", *latents, lists=(9, 1, 5)) == "portable"
    keys = functools.partial(on_hopper, "select_keys", lists=None, num_units=9)
    assert keys((64, 64, 128), (90, 1, 128), (64, 64)) == "hopper and portable"
    assert keys((1, 64, 128), (90, 1, 128), (1, 64)) == "portable"


@pytest.mark.parametrize("name", ["quest/decode/f16", "selected/everything/f32"])
def test_masses_are_probabilities(name):
    call = build(SELECTED[name])
    args = {n: x for n, x in call.args.items() if n in MASS_ARGUMENTS}
    _, lse = call.run()
    mass = torch_paged_attn.selected_mass(softmax_lse=lse, **args)
    golden, peer = (
        reference.selected_mass(softmax_lse=lse, **args, precision=precision)
        for precision in (reference.GOLDEN, reference.BASELINE)
    )
    assert_as_right_as(mass, golden, peer)


MASS_ARGUMENTS = {a.name for a in torch.ops.paged_attn.selected_mass.default._schema.arguments} - {
    "softmax_lse"
}
