"""`selected_mass` and `select_keys` on a GPU or in Triton's interpreter, against their formulas."""

import pytest
import torch
from covering import left_out

from torch_paged_attn import reference
from torch_paged_attn.selection_calls import arguments
from torch_paged_attn.testing import SELECTED, assert_as_right_as, build
from torch_paged_attn.testing.inputs import cumulative

HINTS = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0}


def on(device, args):
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in args.items()}


@pytest.mark.parametrize("name", ["quest/decode/f16", "minimax_m3/decode/bf16"])
def test_selected_mass(name, device):
    from torch_paged_attn.backends.triton.selected_mass import selected_mass

    call = build(SELECTED[name])
    _, lse = reference.selected_attention(**call.args)
    names = [a.name for a in torch.ops.paged_attn.selected_mass.default._schema.arguments]
    args = HINTS | {n: x for n, x in call.args.items() if n in names} | {"softmax_lse": lse}
    golden, peer = (
        reference.selected_mass(**args, precision=precision)
        for precision in (reference.GOLDEN, reference.BASELINE)
    )
    assert_as_right_as(selected_mass(**on(device, args)), golden, peer)


def by_kernels(args, options):
    """`select_keys` as the dispatcher calls it."""
    from torch_paged_attn.backends.triton.select_keys import select_keys

    listed = [x.name for x in arguments("select_keys") if not x.keyword_only]
    return select_keys(*(args.get(name) for name in listed), **options)


@pytest.mark.parametrize(
    ("pool", "score", "size", "causal", "is_paged"),
    [
        ("max", "relu", 1, True, False),
        ("mean", "identity", 4, True, True),
        ("sum", "relu", 16, False, False),
        left_out("max", "relu", 1, True, True),
        left_out("mean", "identity", 4, True, False),
        left_out("sum", "relu", 16, False, True),
    ],
)
def test_select_keys(pool, score, size, causal, is_paged, device):
    """Scores are whole numbers, many of them equal: the ids are the same."""
    g = torch.Generator().manual_seed(1)

    def numbers(*shape):
        return torch.randint(-3, 4, shape, generator=g).float()

    options = {"pool": pool, "score": score, "select_size": size, "causal": causal}
    options |= {"num_units": 6, "force_first": 1, "force_last": 2}
    args = HINTS | {"q": numbers(14, 4, 8), "cu_seqlens_q": cumulative([8, 0, 3])}
    if is_paged:
        args |= {"k": numbers(9, 2, 16, 8), "weights": None}
        args["block_table"] = torch.tensor([[3, 1, 7], [99] * 3, [0, 2, 99]], dtype=torch.int32)
        args["seqused_k"] = torch.tensor([40, 0, 20], dtype=torch.int32)
    else:
        args |= {"k": numbers(90, 2, 8), "weights": numbers(14, 4)}
        args["cu_seqlens_k"] = cumulative([50, 5, 30])
    found = by_kernels(on(device, args), options)
    wanted = reference.select_keys(**args, **options)
    assert all(torch.equal(f.cpu(), w) for f, w in zip(found, wanted, strict=True))


FEW, MANY = {"num_units": 300}, {"num_units": 1500, "force_first": 1, "force_last": 3}


@pytest.mark.parametrize(
    ("spread", "options"),
    [(1, MANY), left_out(10**6, FEW), left_out(1, FEW), left_out(10**6, MANY)],
)
def test_select_keys_of_long_rows(spread, options, device, monkeypatch):
    """Rows that no program holds at once: where few scores are near the last one, and where so many
    are equal to it that a sample of a row is of no use."""
    from torch_paged_attn.backends.triton import select_keys

    monkeypatch.setattr(select_keys, "READ", 1024)
    g = torch.Generator().manual_seed(2)
    k = torch.randint(-spread, spread + 1, (2600, 1, 1), generator=g).float()
    args = HINTS | {"q": torch.tensor([[[1.0]], [[-1.0]]]), "k": k, "weights": None}
    args |= {"cu_seqlens_q": cumulative([2]), "cu_seqlens_k": cumulative([2600])}
    found = by_kernels(on(device, args), options | {"score": "identity"})
    wanted = reference.select_keys(**args, **options, score="identity")
    assert all(torch.equal(f.cpu(), w) for f, w in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", ["selected/everything/f32", "odd_sizes/f32"])
def test_rows_that_start_anywhere(name, compiler):
    """Loads of several elements at once would need aligned rows, and crash on a GPU."""
    import cross_compile

    kernels = compiler.submit(cross_compile.compile_call, "sm90", name).result()
    assert [kernel.wide_loads for kernel in kernels] == [0] * len(kernels)
