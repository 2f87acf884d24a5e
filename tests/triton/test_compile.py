"""torch.compile, torch.export and AOTInductor on a GPU: what they make of the ops, and its bits."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import torch_paged_attn
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.flash_varlen import why_opaque
from torch_paged_attn.ops.flash_varlen import fill_hints
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
def test_a_step_shows_its_kernels_and_copies_no_cache(mode):
    torch._dynamo.reset()
    compiled = torch.compile(Step(), fullgraph=True, mode=mode)
    _, (code, *_) = run_and_get_code(compiled, *step_inputs())
    assert "paged_attn.reshape_and_cache" in code
    assert "_merge_kernel" in code and "paged_attn.merge_states" not in code
    # where the host's time is hidden, fewer launches count
    is_inlined = mode == "default"
    assert ("_attention_fwd_kernel" in code) == is_inlined
    assert ("paged_attn.flash_varlen" not in code) == is_inlined
    for _ in range(3):
        run_and_expect(compiled)


class Attend(torch.nn.Module):
    """Sequences of one query attend to a cache."""

    def forward(self, q, kv_cache, cu_seqlens_q, table, used):
        return torch.ops.paged_attn.flash_varlen(
            q, kv_cache[0], kv_cache[1], cu_seqlens_q, None, 1, 64, used, table, causal=True
        )[0]


def attend_inputs(batch=3, pages=200):
    g = torch.Generator("cuda").manual_seed(batch)
    return (
        torch.randn(batch, HEADS, DIM, device="cuda", generator=g).bfloat16(),
        torch.randn(2, batch * pages, KV_HEADS, PAGE, DIM, device="cuda", generator=g).bfloat16(),
        torch.arange(batch + 1, device="cuda", dtype=torch.int32),
        torch.randperm(batch * pages, device="cuda", generator=g).view(batch, pages).int(),
        torch.randint(1, pages * PAGE, (batch,), device="cuda", generator=g).int(),
    )


@torch.no_grad()
def test_decode_becomes_a_cuda_graph():
    torch._dynamo.reset()
    skips = counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(Attend(), fullgraph=True, mode="reduce-overhead")
    inputs = attend_inputs()
    for _ in range(4):
        assert torch.equal(compiled(*inputs), Attend()(*inputs))
        inputs[-1].copy_(inputs[-1] // 2 + 1)
    assert counters["inductor"]["cudagraph_skips"] == skips


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_other_lengths_and_with_dynamic_shapes_other_sizes_compile_nothing_new(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(Attend(), fullgraph=True, dynamic=dynamic)
    _, (code, *_) = run_and_get_code(compiled, *attend_inputs())
    assert ("paged_attn.flash_varlen" in code) == dynamic
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch, pages in ((5, 200), (2, 90), (70, 40)) if dynamic else ((3, 200),) * 3:
            inputs = attend_inputs(batch, pages)
            inputs[-1].random_(1, pages * PAGE)
            assert torch.equal(compiled(*inputs), Attend()(*inputs))


@torch.no_grad()
def test_export_keeps_the_ops():
    torch._dynamo.reset()
    program = torch.export.export(Step(), step_inputs(), strict=False)
    graph = str(program.graph)
    ops = ("reshape_and_cache", "flash_varlen", "merge_states")
    assert all(f"paged_attn.{op}" in graph for op in ops)
    run_and_expect(program.module())


def package(module, inputs, path):
    torch._dynamo.reset()
    program = torch.export.export(module, inputs, strict=False)
    return torch._inductor.aoti_compile_and_package(program, package_path=str(path))


LOADS_A_PACKAGE = """
import sys, torch
from torch._inductor import aoti_compile_and_package, aoti_load_package, config
class Plain(torch.nn.Module):
    def forward(self, x):
        return x + 1
program = torch.export.export(Plain(), (torch.ones(8, device="cuda"),))
with config.patch({"cpp.cxx": (None, sys.argv[1]), "cpp.vec_isa_ok": False}):
    aoti_load_package(aoti_compile_and_package(program, package_path=sys.argv[2]))
"""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    """A C++ compiler that links torch's C++ library: a package of any other crashes.

    No code here runs on the CPU, so Inductor need not try its vector instructions: a minute.
    """
    for number, name in enumerate((os.environ.get("CXX", "g++"), "/usr/bin/g++")):
        path = tmp_path_factory.mktemp("plain") / f"{number}.pt2"
        command = [sys.executable, "-c", LOADS_A_PACKAGE, name, str(path)]
        if subprocess.run(command, capture_output=True).returncode == 0:
            with torch._inductor.config.patch({"cpp.cxx": (None, name), "cpp.vec_isa_ok": False}):
                yield
                return
    pytest.skip("a package without our ops crashes too: choose another compiler with CXX")


@torch.no_grad()
def test_aot_inductor_runs_a_step(tmp_path, compiler):
    run_and_expect(
        torch._inductor.aoti_load_package(package(Step(), step_inputs(), tmp_path / "step.pt2"))
    )


RUNS_A_PACKAGE = """
import sys, torch
inputs, want = torch.load(sys.argv[2])
assert torch.equal(torch._inductor.aoti_load_package(sys.argv[1])(*inputs), want)
assert "torch_paged_attn" not in sys.modules
"""


@torch.no_grad()
def test_a_package_of_aot_inductor_holds_the_kernel(tmp_path, compiler):
    """Attention in it needs no line of Python, nor this project."""
    inputs = attend_inputs()
    path = package(Attend(), inputs, tmp_path / "attend.pt2")
    torch.save((inputs, Attend()(*inputs)), tmp_path / "tensors")
    command = [sys.executable, "-c", RUNS_A_PACKAGE, path, str(tmp_path / "tensors")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@torch.no_grad()
@pytest.mark.parametrize("name", PROBLEMS)
def test_compiled_calls_give_the_bits_of_eager_ones(name):
    torch._dynamo.reset()
    call = build(PROBLEMS[name]).to("cuda")

    def attend(**args):
        return getattr(torch_paged_attn, call.op)(**args)

    compiled = torch.compile(attend, fullgraph=True)
    got, (code, *_) = run_and_get_code(compiled, **call.args)
    for one, other in zip(got, call.run(), strict=True):
        assert torch.equal(one, other)
    args = call.args
    longest, _ = fill_hints(args["q"], args["k"], args.get("block_table"), None, None)
    reason = why_opaque(getattr(AttentionCall, call.op)(**args), longest)
    assert ("_attention_fwd_kernel" in code) == (reason is None), reason
