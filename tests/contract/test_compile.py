"""torch.compile, torch.export and AOTInductor see the ops as they are."""

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import torch_paged_attn
from torch_paged_attn.testing import Layout, Problem, assert_accurate, build

# no two sizes of the first batch are equal by chance: dynamo would take them for one symbol
HEADS, KV_HEADS, DIM, PAGE = 10, 5, 16, 8


def call_of(seqs, **options):
    return build(Problem("compiled", seqs, HEADS, KV_HEADS, DIM, page_size=PAGE, **options))


def attend(q, k, v, cu_seqlens_q, block_table, seqused_k):
    out, lse = torch_paged_attn.flash_varlen(
        q * 1.0, k, v, cu_seqlens_q, seqused_k=seqused_k, block_table=block_table, causal=True
    )
    return out + 0.0, lse


def arguments(call):
    names = ("q", "k", "v", "cu_seqlens_q", "block_table", "seqused_k")
    return tuple(call.args[name] for name in names)


RAGGED = [
    ((3, 9), (1, 30), (8, 0)),
    ((1, 50), (1, 9)),
    ((70, 0), (1, 100), (2, 3), (5, 5)),
    ((2, 0), (0, 40), (9, 9), (1, 1), (30, 7)),
]


def test_ragged_batches_compile_once():
    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    compiled(*arguments(call_of(RAGGED[0])))
    with torch.compiler.set_stance("fail_on_recompile"):
        for seqs in RAGGED[1:]:
            call = call_of(seqs)
            assert_accurate(*compiled(*arguments(call)), call.truth())


def test_blocksparse_and_merge_compile():
    torch._dynamo.reset()
    args = call_of(RAGGED[0], layout=Layout(16, 16, "kv")).args

    def merged(args):
        out, lse = torch_paged_attn.blocksparse(**args)
        return torch_paged_attn.merge_states(out, lse, out, lse)

    got, want = torch.compile(merged, fullgraph=True, dynamic=True)(args), merged(args)
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


class Layer(torch.nn.Module):
    """Projects, writes its cache, reads it: what a decoder layer does."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.qkv = torch.nn.Linear(32, (HEADS + 2 * KV_HEADS) * DIM)

    def forward(self, x, kv_cache, slot_mapping, cu_seqlens_q, block_table, seqused_k):
        q, key, value = (
            self.qkv(x).unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        )
        torch.ops.paged_attn.reshape_and_cache(key, value, kv_cache, slot_mapping)
        out, _ = torch.ops.paged_attn.flash_varlen(
            q,
            kv_cache[0],
            kv_cache[1],
            cu_seqlens_q,
            None,
            q.shape[0],
            block_table.shape[1] * PAGE,
            seqused_k,
            block_table,
            causal=True,
        )
        return out


def layer_inputs(tokens=(5, 3), pages=6):
    bounds = torch.tensor([0, *tokens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    table = torch.tensor([[4, 1], [2, 0]], dtype=torch.int32)
    slots = torch.cat([table[b, 0] * PAGE + torch.arange(n) for b, n in enumerate(tokens)])
    x = torch.randn(sum(tokens), 32, generator=torch.Generator().manual_seed(1))
    cache = torch.zeros(2, pages, KV_HEADS, PAGE, DIM)
    return x, cache, slots, bounds, table, torch.tensor(tokens, dtype=torch.int32)


@torch.no_grad()
def test_a_layer_writes_and_reads_its_cache_in_one_graph_without_copies():
    torch._dynamo.reset()
    layer = Layer()
    expected_inputs, inputs = layer_inputs(), layer_inputs()
    expected = layer(*expected_inputs)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    out, (code, *_) = run_and_get_code(compiled, *inputs)
    assert torch.equal(out, expected)
    assert torch.equal(inputs[1], expected_inputs[1]) and inputs[1].any()
    # in place on the argument: neither a copy of the cache into the op nor one back
    assert "torch.ops.paged_attn.reshape_and_cache.default(" in code
    assert "copy_" not in code.replace("copy_misaligned", ""), code
    assert "cpp_fused" not in code, code


# how long the C++ compiler works on what it is given once
QUICK = {"aot_inductor.compile_wrapper_opt_level": "O0", "aot_inductor.precompile_headers": False}


@torch.no_grad()
@pytest.mark.parametrize("package", [False, True], ids=["export", "aot_inductor"])
def test_export(package, tmp_path):
    layer = Layer()
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    dynamic = ({0: tokens}, None, {0: tokens}, None, None, None)
    program = torch.export.export(layer, layer_inputs(), dynamic_shapes=dynamic, strict=False)
    if package:
        path = torch._inductor.aoti_compile_and_package(
            program, package_path=str(tmp_path / "layer.pt2"), inductor_configs=QUICK
        )
        run = torch._inductor.aoti_load_package(path)
    else:
        run = program.module()
    for tokens in ((5, 3), (7, 8)):
        expected_inputs, inputs = layer_inputs(tokens), layer_inputs(tokens)
        expected = layer(*expected_inputs)
        assert torch.equal(run(*inputs), expected)
        assert torch.equal(inputs[1], expected_inputs[1])


class Packed(torch.nn.Module):
    """Takes its hints from the lengths: numbers that a graph does not know."""

    def forward(self, q, cu_seqlens_q):
        longest = cu_seqlens_q.diff().max().item()
        return torch_paged_attn.flash_varlen(q, q, q, cu_seqlens_q, None, longest, longest)[0]


class Sparse(torch.nn.Module):
    def forward(self, q, cu_seqlens_q, crow, col):
        longest = cu_seqlens_q.diff().max().item()
        hints = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        return torch_paged_attn.blocksparse(q, q, q, crow, col, cu_seqlens_q, **hints)[0]


def compiled_whole(module, _args):
    return torch.compile(module, fullgraph=True)


def exported(module, args):
    return torch.export.export(module, args, strict=True).module()


def exported_without_dynamo(module, args):
    return torch.export.export(module, args, strict=False).module()


@pytest.mark.parametrize("traced", [compiled_whole, exported, exported_without_dynamo])
@pytest.mark.parametrize("module", [Packed(), Sparse()], ids=["packed", "sparse"])
def test_hints_that_a_graph_does_not_know(module, traced):
    torch._dynamo.reset()
    bounds = [torch.tensor(ends, dtype=torch.int32) for ends in ([0, 2, 6], [0, 5, 6])]
    layout = [torch.tensor([ends], dtype=torch.int32) for ends in ([0, 1], [0])]
    layout = layout if isinstance(module, Sparse) else []
    q = torch.randn(6, 2, 16)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        run = traced(module, (q, bounds[0], *layout))
        for cu_seqlens_q in bounds:
            args = (q, cu_seqlens_q, *layout)
            assert torch.equal(run(*args), module(*args))
