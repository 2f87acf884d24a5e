"""What `explain` says of a call is what the call does; the log and profiles name the same."""

import json
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_paged_attn
from torch_paged_attn import explain
from torch_paged_attn.testing import PROBLEMS, build

ROOT = Path(torch_paged_attn.__file__).parents[1]


SAMPLE = {(x.op, x.page_size is None): x for x in PROBLEMS.values()}.values()


def empty(mode, *shape, dtype=torch.bfloat16, device="cpu"):
    with mode:
        return torch.empty(shape, dtype=dtype, device=device)


def without_memory(x):
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def paged(total_q, batch=8, pages=100_000, max_pages=640, device="cpu"):
    """A paged batch as an engine plans it, of fake tensors."""
    mode = FakeTensorMode()
    cache = empty(mode, pages, 8, 16, 128, device=device)
    starts, lengths = (empty(mode, n, dtype=torch.int32, device=device) for n in (batch + 1, batch))
    table = empty(mode, batch, max_pages, dtype=torch.int32, device=device)
    tensors = empty(mode, total_q, 32, 128, device=device), cache, cache, starts
    return tensors, {"seqused_k": lengths, "block_table": table, "causal": True}


@pytest.mark.parametrize("problem", SAMPLE, ids=lambda x: x.name)
def test_what_a_call_allocates(problem):
    call = build(problem)
    found = explain(problem.op, **call.args)
    assert found.backend == "cpu" and found.path is found.paths["cpu"]
    with torch.profiler.profile(profile_memory=True) as profile:
        results = call.run()
    (event,) = (x for x in profile.key_averages() if x.key == f"paged_attn::{problem.op}")
    # nothing but results comes from torch's allocator
    assert found.result_bytes == sum(x.nbytes for x in results) == event.cpu_memory_usage


def test_memory_is_planned_under_fake_tensors():
    args, options = paged(4096, pages=10**9)  # 32 TiB of keys
    with args[0].fake_mode:
        found = explain("flash_varlen", *args, **options)
        results = torch_paged_attn.flash_varlen(*args, **options)
    assert found.result_bytes == sum(x.nbytes for x in results)
    assert 0 < found.paths["cpu"].workspace < 2**24


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=lambda x: x.name)
def test_every_problem_has_a_path(problem):
    call = build(problem)
    found = explain(problem.op, **call.args, target="sm90:132").paths
    assert found["cpu"].kernel.startswith(torch.ops.paged_attn.cpu_isa())
    kernel, details = found["triton"].kernel, found["triton"].details
    assert all((name in kernel) == (name in details) for name in ("hopper", "portable"))
    on_meta = {n: without_memory(x) if torch.is_tensor(x) else x for n, x in call.args.items()}
    imagined = explain(problem.op, **on_meta, target="sm90:132").paths
    assert imagined["triton"] == found["triton"]
    assert imagined["cpu"].details["products"] == found["cpu"].details["products"]


@pytest.mark.parametrize(("queries", "engine"), [(1, "rows"), (4, "rows"), (5, "tiles")])
def test_the_engine_of_the_cpu(queries, engine):
    args, options = paged(8 * queries)
    path = explain("flash_varlen", *args, **options).paths["cpu"]
    assert path.kernel == f"{torch.ops.paged_attn.cpu_isa()} {engine}"
    assert (path.details["row_tasks"] > 0) == (engine == "rows")
    assert path.details["merges"] > 0  # 10240 keys are cut


@pytest.mark.parametrize(
    ("total_q", "said", "kernel", "is_shared"),
    [
        (8, None, "portable", True),
        (8192, None, "hopper", False),
        (600, None, "hopper", True),
        (64, 8, "hopper", True),
    ],
)
def test_the_kernels_of_hopper(total_q, said, kernel, is_shared):
    args, options = paged(total_q, device="cuda")
    path = explain("flash_varlen", *args, max_seqlen_q=said, **options, target="sm90:132").paths[
        "triton"
    ]
    assert path.kernel == kernel and (path.workspace > 0) is is_shared
    # the estimates by which it was chosen, the shortest first
    times = [x for x in path.details["microseconds"].values() if not isinstance(x, str)]
    assert times == sorted(times) and len(times) > 1


@pytest.mark.parametrize("is_paged", [False, True], ids=["packed", "paged"])
def test_no_bit_depends_on_a_hint_where_the_batch_may_not_matter(is_paged):
    """On Hopper a hint chooses among kernels and tiles; with batch_invariant there is no choice."""
    args, options = paged(64, device="cuda")
    if not is_paged:
        q = empty(args[0].fake_mode, 2048, 16, 64, device="cuda")
        starts = empty(args[0].fake_mode, 33, dtype=torch.int32, device="cuda")
        args, options = (q, q, q, starts), {}

    def paths(**more):
        found = [
            explain("flash_varlen", *args, max_seqlen_q=hint, max_seqlen_k=hint, **options, **more)
            for hint in (1, 8, 200, 512, 4096)
        ]
        return {f"{x.paths['triton'].kernel} {x.paths['triton'].details}" for x in found}

    assert len(paths(batch_invariant=True, target="sm90:132")) == 1
    assert len(paths(target="sm90:132")) > 1


def test_another_chip_has_the_portable_kernel():
    args, options = paged(8192, device="cuda")
    path = explain("flash_varlen", *args, **options, target="gfx942:304").paths["triton"]
    assert (path.kernel, path.reason) == ("portable", "this is no Hopper chip")


def test_backwards_have_paths():
    q = torch.empty(4096, 8, 64, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(8, 4096, device="meta")
    starts = torch.empty(2, dtype=torch.int32, device="meta")
    found = explain("flash_varlen_backward", q, None, q, q, q, q, lse, starts, target="sm90:132")
    assert found.result_bytes == 3 * q.nbytes
    assert found.paths["triton"].kernel == "hopper"
    assert found.paths["cpu"].kernel == torch.ops.paged_attn.cpu_isa()


def test_other_ops_have_paths():
    new = torch.empty(4, 2, 16)
    cache = torch.empty(5, 2, 16, 16)
    slots = torch.arange(4)
    for caches in ((cache, cache), torch.stack([cache, cache])):
        found = explain(torch_paged_attn.reshape_and_cache, new, new, caches, slots)
        assert (found.op, found.result_bytes, found.backend) == ("reshape_and_cache", 0, "cpu")
    lse = torch.empty(2, 4)
    found = explain("merge_states", new, lse, new, lse)
    assert found.result_bytes == new.nbytes + lse.nbytes


def test_a_device_without_a_backend_says_so():
    args, options = paged(8, device="cuda")
    found = explain("flash_varlen", *args, **options)
    assert found.backend is None and found.path is None and "no GPU here" in found.reason
    assert found.paths["triton"].kernel is None and "target='sm90:132'" in str(found)


def test_wrong_arguments_raise_what_the_op_raises():
    q = torch.empty(4, 3, 16)
    with pytest.raises(
        ValueError, match=r"flash_varlen\(\): expected q's num_heads to be .* got 3"
    ):
        explain("flash_varlen", q, q[:, :2], q[:, :2], torch.tensor([0, 4], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"expected op to be one of flash_varlen.* got 'attend'"):
        explain("attend", q)
    with pytest.raises(ValueError, match=r"expected target to be .* got 'h100'"):
        explain("flash_varlen", q, q, q, torch.tensor([0, 4], dtype=torch.int32), target="h100")


PROGRAM = """
import json, logging, sys
{setup}
import torch, torch_paged_attn
q = torch.randn(4, 2, 16, requires_grad=True)
half = q.detach().bfloat16()
starts = torch.tensor([0, 4], dtype=torch.int32)
with torch.autograd.profiler.profile(use_kineto=False) as profile:
    for _ in range(2):
        out, _ = torch_paged_attn.flash_varlen(q, q, q, starts)
        out.sum().backward()
        parts = torch_paged_attn.flash_varlen(half, half, half, starts) * 2
    torch_paged_attn.merge_states(*parts)
print(json.dumps([x.key for x in profile.key_averages()]))
"""


@pytest.fixture
def run(programs):
    """Runs the program in a process of its own; returns its ranges and the lines of its log."""

    def run(setup="", **environment):
        program = PROGRAM.format(setup=setup)
        status, out, errors = programs.end(program, str(ROOT), **environment)
        assert status == 0, errors
        return json.loads(out.splitlines()[-1]), errors.splitlines()

    return run


def test_the_log_and_ranges_name_kernels(run):
    setup = "logging.basicConfig(level=logging.INFO, format='%(name)s %(message)s')"
    ranges, log = run(setup, PAGED_ATTN_CPU_ISA="generic", PAGED_ATTN_PROFILE="1")
    kernels = "cpu, generic, products of float32"
    assert [x for x in log if x.startswith("torch_paged_attn ")] == [
        f"torch_paged_attn paged_attn::flash_varlen: {kernels}",
        f"torch_paged_attn paged_attn::flash_varlen_backward: {kernels}",
        "torch_paged_attn paged_attn::merge_states: cpu, generic",
    ]
    q, half, lse = "4x2x16 float32", "4x2x16 bfloat16", "2x4 float32"
    assert sorted(x for x in ranges if x.startswith("paged_attn::") and "[" in x) == [
        f"paged_attn::flash_varlen [cpu generic rows] {half}, {half}, {half}",
        f"paged_attn::flash_varlen [cpu generic rows] {q}, {q}, {q}",
        f"paged_attn::flash_varlen_backward [cpu generic] {q}, {q}, {q}",
        f"paged_attn::merge_states [cpu generic] {half}, {lse}, {half}",
    ]


def test_nothing_is_logged_or_recorded_by_default(run):
    ranges, log = run()
    assert not any("[" in x for x in ranges) and not any("paged_attn" in x for x in log)


@pytest.mark.parametrize("op", ["flash_varlen", "blocksparse"])
def test_under_a_default_device(op):
    """The plan of tensors without memory is asked of tensors on the CPU."""
    problem = next(x for x in SAMPLE if x.op == op)
    args = build(problem).args
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(x) if torch.is_tensor(x) else x for n, x in args.items()}
    expected = str(explain(op, **fakes))
    with torch.device("meta"):
        assert str(explain(op, **fakes)) == expected
