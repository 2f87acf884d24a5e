"""What graphs hold of the ops, traced for chips that are not here: kernels that write nothing but
results and memory of their own.
"""

import ast
import builtins
import importlib
import itertools
import operator

import cross_compile
import pytest
import torch
from covering import left_out
from torch._functorch.aot_autograd import aot_function
from torch._inductor.codegen.wrapper import (
    user_defined_triton_kernel_transitive_closure_source_code as printed,
)
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_paged_attn
from torch_paged_attn.testing import PROBLEMS, build

# arguments of the kernels that a graph may write: memory made in it, and copies
WRITTEN = {"out_ptr", "lse_ptr", "parts_ptr", "counters_ptr"}
COPIED = {"cu_seqlens_q_ptr", "cu_seqlens_k_ptr", "seqused_k_ptr"}


def nodes(arch: str, name: str) -> list[tuple[str, list[str]]]:
    """Of the graph of a call: what its nodes call, and the arguments that those write."""
    call = build(PROBLEMS[name])
    tensors = {k: v for k, v in call.args.items() if isinstance(v, torch.Tensor)}
    rest = {k: v for k, v in call.args.items() if k not in tensors}
    graphs = []

    def run(*given):
        return getattr(torch_paged_attn, call.op)(**dict(zip(tensors, given, strict=True)), **rest)

    def keep(graph, _):
        graphs.append(graph)
        return graph

    with cross_compile.elsewhere(arch), FakeTensorMode(), torch.no_grad():
        given = [
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda")
            for t in tensors.values()
        ]
        aot_function(run, keep, keep_inference_input_mutations=True)(*given)
    return [
        (str(node.target), node.kwargs.get("tensors_to_clone", []))
        for node in graphs[0].graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]


def printed_names(module: str, kernel: str) -> tuple[list[str], set[str]]:
    """Of a kernel as Inductor prints it into one module: its functions, and what they name that
    the module does not define.
    """
    text = printed(getattr(importlib.import_module(module), kernel))
    # between quotes of three, where a line's end in a string would be lost
    assert "\\n" not in text and "'''" not in text
    # the printer goes on behind a function's decorator
    tree = ast.parse(text[text.index("def ") :])
    functions = [x for x in tree.body if isinstance(x, ast.FunctionDef)]
    known = {x.name for x in functions} | {"tl", "triton"} | set(dir(builtins))
    named = set()
    for x in ast.walk(tree):
        if isinstance(x, ast.arg):
            known.add(x.arg)
        elif isinstance(x, ast.alias):
            known.add(x.asname or x.name)
        elif isinstance(x, ast.Name):
            (named if isinstance(x.ctx, ast.Load) else known).add(x.id)
    return [x.name for x in functions], named - known


HELD = (
    "llama3_8b/decode_b5/bf16",
    "llama3_70b_tp8/decode/bf16",
    "llama3_8b/mixed/bf16",
    "sglang/page1/f16",
    "training/dropout/f32",
    "blocksparse/batched/f32",
)
# which a kernel in Gluon takes on Hopper
OF_HOPPER = (("sm90", "llama3_8b/mixed/bf16"),)


PAIRS = [x for x in itertools.product(("sm80", "sm90", "gfx942"), HELD) if x not in OF_HOPPER]


# each chip and each problem with half of the others; with `--sample`, a quarter
@pytest.mark.parametrize(
    "arch, name",
    [
        pytest.param(*x, marks=pytest.mark.thorough) if i % 2 else x if i % 4 == 0 else left_out(*x)
        for i, x in enumerate(PAIRS)
    ],
)
def test_a_graph_holds_the_kernel_and_writes_no_input(arch, name, compiler):
    found = compiler.submit(nodes, arch, name).result()
    targets = [target for target, _ in found]
    assert targets.count("triton_kernel_wrapper_functional") == 1
    written = {argument for _, arguments in found for argument in arguments}
    assert {"out_ptr", "lse_ptr"} <= written <= WRITTEN | COPIED
    assert targets.count("aten.clone.default") == len(written & COPIED)
    assert not any("copy_" in target or "paged_attn" in target for target in targets)


@pytest.mark.parametrize(
    "name",
    ["llama3_8b/mixed/kv_e4m3", "llama3_8b/speculative/bf16", *(name for _, name in OF_HOPPER)],
)
def test_what_a_graph_would_copy_or_cannot_hold_stays_one_node(name, compiler):
    found = compiler.submit(nodes, "sm90", name).result()
    assert [target for target, _ in found] == ["paged_attn.flash_varlen.default"]


@pytest.mark.parametrize(
    "module, kernel",
    [
        ("portable.forward.graph_kernel", "_graph_attention_fwd_kernel"),
        ("merges.merge_states", "_merge_kernel"),
    ],
)
def test_what_inductor_prints_has_every_name_once(module, kernel, compiler):
    module = f"torch_paged_attn.backends.triton.{module}"
    names, unknown = compiler.submit(printed_names, module, kernel).result()
    assert names[0] == kernel and len(names) == len(set(names))
    assert not unknown
