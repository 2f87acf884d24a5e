"""torch.compile, torch.export and AOTInductor on a GPU: what they make of the ops, and its bits."""

import subprocess
import sys

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import torch_paged_attn
from torch_paged_attn.testing import PROBLEMS, build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PAGE, HEADS, KV_HEADS, DIM = 16, 8, 2, 64


class Step(torch.nn.Module):
    """One token a sequence: written, attended with its past, merged with a prefix's state."""

    def forward(self, x, kv_cache, slots, cu_seqlens_q, table, used, prefix, prefix_lse):
        q, key, value = x.unflatten(-1, (-1, DIM)).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        torch.ops.paged_attn.reshape_and_cache(key, value, kv_cache, slots)
        out, lse = torch.ops.paged_attn.flash_varlen(
            q, kv_cache[0], kv_cache[1], cu_seqlens_q, None, 1, 64, used, table, causal=True
        )
        return torch.ops.paged_attn.merge_states(out, lse, prefix, prefix_lse)[0] + 1.0


def step_inputs(batch=3, pages=4):
    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape):
        return torch.randn(shape, device="cuda", generator=g).bfloat16()

    used = torch.tensor([5, 64, 17], device="cuda", dtype=torch.int32)[:batch]
    table = torch.randperm(batch * pages, device="cuda", generator=g).view(batch, pages).int()
    slots = table.gather(1, (used[:, None].long() - 1) // PAGE)[:, 0] * PAGE + (used - 1) % PAGE
    return (
        randn(batch, (HEADS + 2 * KV_HEADS) * DIM),
        randn(2, batch * pages, KV_HEADS, PAGE, DIM),
        slots.long(),
        torch.arange(batch + 1, device="cuda", dtype=torch.int32),
        table,
        used,
        randn(batch, HEADS, DIM),
        randn(HEADS, batch).float(),
    )


def run_and_expect(run):
    """`run` answers and writes what the module does eagerly."""
    inputs, expected = step_inputs(), step_inputs()
    want = Step()(*expected)
    assert torch.equal(run(*inputs), want)
    assert torch.equal(inputs[1], expected[1])


@torch.no_grad()
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_step_compiles_without_copies_of_the_cache(mode):
    torch._dynamo.reset()
    compiled = torch.compile(Step(), fullgraph=True, mode=mode)
    _, (code, *_) = run_and_get_code(compiled, *step_inputs())
    assert "paged_attn.reshape_and_cache" in code and "paged_attn.flash_varlen" in code
    assert "_merge_kernel" in code and "paged_attn.merge_states" not in code
    for _ in range(3):
        run_and_expect(compiled)


@torch.no_grad()
def test_dynamic_shapes_keep_merge_states_one_node():
    torch._dynamo.reset()
    compiled = torch.compile(Step(), fullgraph=True, dynamic=True)
    _, (code, *_) = run_and_get_code(compiled, *step_inputs())
    assert "paged_attn.merge_states" in code
    run_and_expect(compiled)


@torch.no_grad()
def test_export_keeps_the_ops():
    torch._dynamo.reset()
    program = torch.export.export(Step(), step_inputs(), strict=False)
    graph = str(program.graph)
    ops = ("reshape_and_cache", "flash_varlen", "merge_states")
    assert all(f"paged_attn.{op}" in graph for op in ops)
    run_and_expect(program.module())


PLAIN_PACKAGE = """
import sys, torch
class Plain(torch.nn.Module):
    def forward(self, x):
        return x + 1
program = torch.export.export(Plain(), (torch.ones(8, device="cuda"),))
torch._inductor.aoti_compile_and_package(program, package_path=sys.argv[1])
torch._inductor.aoti_load_package(sys.argv[1])
"""


@torch.no_grad()
def test_aot_inductor_runs_the_ops(tmp_path):
    # where the C++ compiler links a C++ library other than torch's, no package can be loaded
    control = [sys.executable, "-c", PLAIN_PACKAGE, str(tmp_path / "plain.pt2")]
    if subprocess.run(control, capture_output=True).returncode != 0:
        pytest.skip("a package without our ops crashes too: choose another compiler with CXX")
    torch._dynamo.reset()
    program = torch.export.export(Step(), step_inputs(), strict=False)
    path = str(tmp_path / "step.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    run_and_expect(torch._inductor.aoti_load_package(path))


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama3_8b/mixed/kv_e4m3", "blocksparse/wide_blocks/f16"])
def test_compiled_calls_give_the_bits_of_eager_ones(name):
    torch._dynamo.reset()
    call = build(PROBLEMS[name]).to("cuda")

    def attend(**args):
        return getattr(torch_paged_attn, call.op)(**args)

    for got, want in zip(
        torch.compile(attend, fullgraph=True)(**call.args), call.run(), strict=True
    ):
        assert torch.equal(got, want)
