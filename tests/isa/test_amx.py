"""The AMX kernels with their tile instructions in software: the same problems, judged by the same
rule. All else that they execute, this processor must have.
"""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import truths
from hypothesis import HealthCheck, given, settings
from same_bits import assert_same_bits

from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    PROBLEMS,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import layouts, problems

sys.path.insert(0, str(Path(__file__).parent))
import build_run_call
import run_call
from build_run_call import ROOT

BFLOAT16 = torch.bfloat16  # what tiles multiply
TILED = (BFLOAT16, torch.float16)  # what gradients make of it
VECTORS = [f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "bf16", "vbmi", "vnni")]
VECTORS += ["-mavx2", "-mfma", "-mf16c"]
ONLY_TABLE = """
const paged_attn::Kernels& paged_attn::kernels() {
  const Kernels *tiles = &kernels_amx, *vectors = &kernels_avx512bf16;
  static const Kernels& amx = combine(
      {"amx", vectors, tiles, tiles, tiles, tiles, tiles, tiles, vectors});
  return amx;
}
"""

pytestmark = pytest.mark.skipif(
    build_run_call.CXX is None or "avx512bf16" not in torch.ops.paged_attn.cpu_isas(),
    reason="needs g++ and AVX-512-BF16",
)


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    return build_run_call.built_once(tmp_path_factory, "amx", build_program)


def build_program(folder):
    tiles = ["-O1", *VECTORS, "-include", str(ROOT / "tests/isa/software_amx.h")]
    objects = [build_run_call.compile_isa("amx", folder, tiles)]
    objects.append(build_run_call.compiled("avx512bf16", folder, VECTORS))
    build_run_call.link(folder, ONLY_TABLE, objects)


@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_reference(name, program, tmp_path):
    out, lse = run_call.attend(build(PROBLEMS[name]), [program], tmp_path)
    assert_accurate(out, lse, truths.of(PROBLEMS[name]))


@pytest.mark.parametrize("name", [n for n, p in DIFFERENTIABLE.items() if p.dtype in TILED])
def test_gradients_agree_with_the_reference(name, program, tmp_path):
    call = build(DIFFERENTIABLE[name])
    out, lse = call.run()
    dout, dlse = hostile_gradients(call, out, lse)
    found = run_call.attend_backward(call, dout, dlse, out, lse, [program], tmp_path)
    assert_accurate_gradients(found, call.gradients(dout, dlse))


# causal: the last tokens that a cut sequence has stand where they stood
IN_ORDER = ("mixed/bf16", "mixed/kv_e4m3", "window_softcap", "sinks_window", "vllm_cache", "tiny")


@pytest.mark.parametrize("name", IN_ORDER)
def test_few_rows_add_up_as_tiles_do(name, program, tmp_path):
    """With `batch_invariant`, the tokens of a prompt have the same bits alone and among others."""
    problem = next(p for n, p in PROBLEMS.items() if name in n and p.dtype == BFLOAT16)
    call = build(dataclasses.replace(problem, batch_invariant=True))
    out, lse = run_call.attend(call, [program], tmp_path)
    assert_accurate(out, lse, call.truth())
    for b, rows in ((1, (0, 1)), (1, (77, 78)), (1, (126, 128)), (2, (5, 7)), (2, (33, 37))):
        found = run_call.attend(cut(call, problem, b, *rows), [program], tmp_path)
        start = int(call.args["cu_seqlens_q"][b])
        among = slice(start + rows[0], start + rows[1])
        assert_same_bits(found, (out[among], lse[:, among]))


def cut(call, problem, b, first, last):
    """Query tokens [first, last) of a sequence, and the keys up to them."""
    chunk = dict(call.alone(b).args)
    _, past = problem.seqs[b]
    lengths = {"cu_seqlens_q": last - first}
    if chunk.get("cu_seqlens_k") is not None or chunk.get("block_table") is None:
        lengths["cu_seqlens_k"] = past + last
    chunk |= {name: torch.tensor([0, n], dtype=torch.int32) for name, n in lengths.items()}
    if chunk.get("seqused_k") is not None:
        chunk["seqused_k"] = torch.tensor([past + last], dtype=torch.int32)
    chunk["q"] = chunk["q"][first:last]
    return dataclasses.replace(call, args=chunk)


def test_every_load_of_a_tile_says_that_it_reads_memory():
    """GCC moves stores across one that does not: the macro that says so makes all of them."""
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    loads = [path.name for path in sources for _ in range(path.read_text().count("_tile_loadd("))]
    assert loads == ["product_amx.h"]


def in_bfloat16(problem):
    """What the tiles multiply: 8-bit keys too, but nothing finer than bfloat16."""
    kv_dtype = problem.kv_dtype or (problem.dtype if problem.dtype.itemsize == 1 else None)
    return dataclasses.replace(problem, dtype=torch.bfloat16, kv_dtype=kv_dtype, out_scale=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given((problems() | problems(layouts)).map(in_bfloat16))
def test_fuzz(program, tmp_path, problem):
    call = build(problem)
    out, lse = run_call.attend(call, [program], tmp_path)
    assert_accurate(out, lse, call.truth())
