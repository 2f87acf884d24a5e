"""What only the CPU backend promises."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from same_bits import assert_same_bits
from sampling import IS_THOROUGH

import torch_paged_attn
from torch_paged_attn import explain, flash_varlen, reference
from torch_paged_attn.reference.philox import dropout_keep
from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    PROBLEMS,
    SELECTED_DIFFERENTIABLE,
    Problem,
    assert_accurate,
    build,
)
from torch_paged_attn.testing.accuracy import Truth
from torch_paged_attn.testing.inputs import cumulative, hostile_gradients
from torch_paged_attn.testing.problem import Selected

ROOT = str(Path(torch_paged_attn.__file__).parents[1])


def test_calls_from_many_threads_do_not_meet():
    names = ("llama3_8b/mixed/bf16", "mpt/alibi_batch/f32", "llama3_70b_tp8/decode/bf16")
    calls = [build(PROBLEMS[name]) for name in names]
    expected = [call.run() for call in calls]
    wrong = []

    def work(i):
        for _ in range(20):
            got = calls[i].run()
            if not all(torch.equal(a, b) for a, b in zip(got, expected[i], strict=True)):
                wrong.append(names[i])

    threads = [threading.Thread(target=work, args=(i % len(calls),)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


INVARIANT = """
import torch, torch_paged_attn
from torch_paged_attn.testing import PROBLEMS, build
call = build(PROBLEMS["llama3_8b/decode_b5/bf16"])
default, asked = call.run(), call.run(batch_invariant=True)
print(*(all(map(torch.equal, x, asked)) for x in (default, asked)))
"""


@pytest.mark.any_isa
@pytest.mark.parametrize("value, same", [("0", "False True"), ("1", "True True")])
def test_the_environment_asks_for_invariant_bits(value, same, programs):
    """Of decode, which has bits of its own otherwise."""
    printed = programs.run(INVARIANT, ROOT, PAGED_ATTN_BATCH_INVARIANT=value)
    assert printed.strip() == same


def assert_same_bits_on_threads(run, counts):
    threads = torch.get_num_threads()
    results = []
    try:
        for n in counts:
            torch.set_num_threads(n)
            results.append(run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_threads_change_no_bit():
    assert_same_bits_on_threads(build(PROBLEMS["llama3_8b/mixed/bf16"]).run, (1, 2, 3))


# causal with groups; a bias of one head, which the heads add to in turn; a layout of every head
@pytest.mark.parametrize(
    "name",
    ["training/long/bf16", "training/one_bias/bf16", "blocksparse/batched/f32"],
)
def test_threads_change_no_bit_of_gradients(name):
    call = build(DIFFERENTIABLE[name])
    out, lse = call.run()
    backward = call.backward(*hostile_gradients(call, out, lse), out, lse)
    assert_same_bits_on_threads(backward.run, (1, 2, 7))


# lists that are divided among tasks: keys are read in place for 2 rows, and packed for 20
@pytest.mark.parametrize("num_heads", [4, pytest.param(40, marks=pytest.mark.any_isa)])
def test_threads_change_no_bit_of_long_lists(num_heads):
    call = build(
        Problem(
            "long_lists",
            ((1, 5200), (2, 4000)),
            num_heads,
            2,
            64,
            dtype=torch.bfloat16,
            page_size=16,
            sinks=True,
            selected=Selected(350, 16, "kv", holes=0.1),
        )
    )
    assert explain(call.op, **call.args).path.details["merges"] > 0
    assert_accurate(*call.run(), call.truth())
    assert_same_bits_on_threads(call.run, (1, 2, 3))


def test_threads_change_no_bit_of_gradients_of_lists():
    call = build(SELECTED_DIFFERENTIABLE["selected/training/bf16"])
    out, lse = call.run()
    backward = call.backward(*hostile_gradients(call, out, lse), out, lse)
    assert_same_bits_on_threads(backward.run, (1, 2, 7))


def test_callers_in_several_threads_change_no_bit_of_gradients():
    call = build(DIFFERENTIABLE["training/everything/f32"])
    out, lse = call.run()
    backward = call.backward(*hostile_gradients(call, out, lse), out, lse)
    wanted = backward.run()
    with ThreadPoolExecutor(6) as pool:
        for found in pool.map(lambda _: backward.run(), range(60)):
            assert_same_bits(found, wanted)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e5m2])
def test_an_infinity_stays_in_its_dim_and_head(kv_dtype):
    call = build(dataclasses.replace(PROBLEMS["llama3_8b/decode_b5/bf16"], kv_dtype=kv_dtype))
    truth = call.truth()
    expected, _ = call.run()
    block_table = call.args["block_table"]
    call.args["v"][block_table[2, 3], 1, 5, 6] = float("inf")  # a key of the third sequence
    threads = torch.get_num_threads()
    try:
        for n in (1, 2):
            torch.set_num_threads(n)
            out, lse_now = call.run()
            changed = (out != expected).nonzero()
            if n == 1:
                first = out, lse_now
            assert torch.equal(out, first[0]) and torch.equal(lse_now, first[1])
            # four query heads look at the second key head; another dim is rounded in another way
            finite = out.isfinite()
            assert (~finite).nonzero().tolist() == [[2, head, 6] for head in range(4, 8)]
            assert set(map(tuple, changed[:, :2].tolist())) <= {(2, h) for h in range(4, 8)}
            assert_accurate(out.where(finite, expected), lse_now, truth)
    finally:
        torch.set_num_threads(threads)


def test_workspace_does_not_grow_with_queries_times_keys(programs):
    # scores of 12,000 x 12,000 would be 549 MiB; a peak is that of a whole process
    code = """
import resource, torch, torch_paged_attn
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def run(n):
    q = torch.randn(n, 1, 16)
    torch_paged_attn.flash_varlen(q, q, q, torch.tensor([0, n], dtype=torch.int32), causal=True)
run(64)
before = peak()
run(12000)
print(peak() - before)
"""
    grown = programs.run(code, ROOT)
    assert float(grown) < 64, f"{grown} MiB"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_what_the_reference_keeps(dtype):
    # zero queries weigh all keys alike, and values are unit vectors: an output shows who was kept
    query_lens, key_len, num_heads, left, p = (1, 70, 3), 300, 2, 250, 0.3
    batch, bounds = len(query_lens), cumulative(query_lens)
    q = torch.zeros(sum(query_lens), num_heads, 16, dtype=dtype)
    k = torch.randn(batch * key_len, 1, 16).to(dtype)
    v = torch.eye(key_len, dtype=dtype).repeat(batch, 1)[:, None]
    state = torch.tensor([-(2**40) - 3, 2**35 + 9])
    lengths = {"cu_seqlens_q": bounds, "cu_seqlens_k": cumulative([key_len] * batch)}
    dropout = {"window_size_left": left, "dropout_p": p, "rng_state": state}
    out, _ = flash_varlen(q, k, v, **lengths, **dropout)
    for b, query_len in enumerate(query_lens):
        kept = dropout_keep(state, p, b, num_heads, query_len, key_len)
        positions = torch.arange(key_len - query_len, key_len)
        seen = torch.arange(key_len) >= positions[:, None] - left
        assert torch.equal(out[bounds[b] : bounds[b + 1]].transpose(0, 1) > 0, kept & seen)


@pytest.mark.any_isa
def test_a_refused_call_leaves_no_memory_behind(programs):
    code = """
import torch
from torch_paged_attn import flash_varlen, reference
def memory():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
def refused(n):
    q, k = torch.randn(1, 1, 16), torch.randn(4, 1, 16, 16)
    bounds, used = torch.tensor([[0, 1], [100, 100]], dtype=torch.int32)
    table = torch.zeros(1, 4, dtype=torch.int32)
    for _ in range(n):
        try:
            flash_varlen(q, k, k, bounds, seqused_k=used[:1], block_table=table)
        except RuntimeError:
            continue
        raise AssertionError("not refused")
refused(2000)
before = memory()
refused(5000)
print(memory() - before)
"""
    assert int(programs.run(code, ROOT)) < 5000 * 32


@pytest.mark.any_isa
def test_texts_of_the_kernels_leave_no_memory_behind(programs):
    code = """
import torch, torch_paged_attn
def memory():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
def asked(n):
    for _ in range(n):
        texts = [getattr(torch.ops.paged_attn, x)() for x in ("cpu_isa", "cpu_isas")]
    return texts + torch.ops.paged_attn.cpu_isas_missing().splitlines()
name, all_names, *missing = asked(2000)
assert name in all_names.split() and not {name} & {line.split()[0] for line in missing}
before = memory()
asked(200_000)
print(memory() - before)
"""
    assert int(programs.run(code, ROOT)) < 200_000 * 4


@pytest.mark.any_isa
def test_a_large_call_does_not_keep_its_memory(programs):
    """96 MB of partial results: 6000 splits of 1024 keys under 16 heads of 256."""
    code = """
import torch
from torch_paged_attn import flash_varlen
def memory():
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096
def decode(batch, keys):
    q, k = torch.randn(batch, 16, 16).bfloat16(), torch.randn(1, 1, 1024, 16).bfloat16()
    v = torch.randn(1, 1, 1024, 256).bfloat16()
    table = torch.zeros(batch, keys // 1024, dtype=torch.int32)
    used, bounds = torch.full((batch,), keys).int(), torch.arange(batch + 1).int()
    flash_varlen(q, k, v, bounds, seqused_k=used, block_table=table)
decode(1, 4096)
before = memory()
decode(192, 32 * 1024)
print(memory() - before)
"""
    assert int(programs.run(code, ROOT)) < 48 << 20


# how many seconds a call is tried beside a writer
RACED = 2.0 if IS_THOROUGH else 0.25

# a call, and the values that another thread writes into one of its tensors meanwhile
RACES = {
    "seqused_k": ("attend(seqused_k=used)", "used", (512, 2**31 - 1)),
    "cu_seqlens_q": ("attend(seqused_k=used)", "bounds[1:]", (1, 2**30)),
    "block_table": ("attend(seqused_k=used)", "table", (7, 2**31 - 1)),
    "cu_seqlens_k": ("attend(cu_seqlens_k=starts)", "starts[1:-1]", (512, -(2**30))),
    "crow_indices": ("sparse()", "crow[0, 1:]", (8, 2**31 - 1)),
    "col_indices": ("sparse()", "col[0, :1]", (0, -(2**31))),
    "slot_mapping": ("write()", "slots", (3, 2**40)),
}


def test_metadata_written_during_a_call_leads_nowhere_else(programs):
    code = f"""
import threading, time, torch
from torch_paged_attn import blocksparse, flash_varlen, reshape_and_cache
batch = 48
q, cache = torch.randn(batch, 8, 64), torch.randn(2, 64, 2, 64, 64)
bounds, starts = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (1, 512))
used = torch.full((batch,), 512, dtype=torch.int32)
table = torch.randint(64, (batch, 8), dtype=torch.int32)
crow = 8 * torch.arange(9, dtype=torch.int32)[None]
col = torch.arange(8, dtype=torch.int32).repeat(1, 8)
new, slots = torch.randn(4096, 2, 64), torch.arange(4096)
def attend(**lengths):
    flash_varlen(q, *cache, bounds, block_table=table, **lengths)
def sparse():
    blocksparse(q, *cache, crow, col, bounds, seqused_k=used, block_table=table)
def write():
    reshape_and_cache(new, new, cache, slots)
def race(call, written, values):
    call()
    before, done, outcomes = written.clone(), threading.Event(), [0, 0]
    def work():
        while not done.is_set():
            written.fill_(values[1])
            time.sleep(1e-4)
            written.copy_(before)
            time.sleep(1e-4)
    thread = threading.Thread(target=work)
    thread.start()
    end = time.monotonic() + {RACED}
    while time.monotonic() < end:
        try:
            call()
            outcomes[0] += 1
        except (ValueError, IndexError, RuntimeError):
            outcomes[1] += 1
    done.set()
    thread.join()
    print(outcomes)
for name, (call, tensor, values) in {RACES}.items():
    print(name, flush=True)
    race(lambda: eval(call), eval(tensor), values)
"""
    programs.run(code, ROOT)


# what a mask may hold for a key that is not to be seen; -inf alone hides it from a row of such keys
LOWEST = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.bfloat16, torch.float16)}


@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize("dtype", LOWEST, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("q_dtype", [torch.float32, torch.bfloat16], ids=["q_f32", "q_bf16"])
def test_a_row_of_the_lowest_bias_is_a_mean(q_dtype, dtype, query_len):
    torch.manual_seed(0)
    low, key_len = LOWEST[dtype], 70
    rows = {
        "all": torch.full((key_len,), low),
        "some hidden": torch.where(torch.arange(key_len) < 9, low, float("-inf")),
        "one ordinary": torch.where(torch.arange(key_len) == 64, 1.5, low),
        "two depths": torch.where(torch.arange(key_len) % 3 == 0, low, low / 1.25),
        "all high": torch.full((key_len,), -low),
        "ordinary": torch.randn(key_len),
    }
    bias = torch.stack([*rows.values(), *(torch.full((key_len,), low) for _ in range(34))])
    for first in range(0, len(rows) if query_len == 1 else 1):
        q = torch.randn(query_len, 4, 64).to(q_dtype)
        k, v = torch.randn(2, key_len, 2, 64).to(q_dtype)
        bounds = cumulative([query_len]), cumulative([key_len])
        options = {"attn_bias": bias[None, first : first + query_len].to(dtype)}
        out, lse = flash_varlen(q, k, v, *bounds, **options)
        truth = Truth.of(reference.flash_varlen, q, k, v, *bounds, **options)
        assert_accurate(out, lse, truth)


def test_a_sink_beside_the_lowest_bias():
    torch.manual_seed(0)
    low = torch.finfo(torch.float32).min
    q, k, v = torch.randn(1, 2, 16), *torch.randn(2, 5, 2, 16)
    bounds = cumulative([1]), cumulative([5])
    options = {"attn_bias": torch.full((1, 1, 5), low), "sinks": torch.tensor([0.5, low])}
    out, lse = flash_varlen(q, k, v, *bounds, **options)
    # the first head's sink outweighs its keys, the second's is one more key
    truth = Truth.of(reference.flash_varlen, q, k, v, *bounds, **options)
    assert not truth.out[0, 0].any() and truth.out[0, 1].all()
    assert_accurate(out, lse, truth)


def test_softcap_makes_no_number_of_nan():
    """Twenty keys: whole vectors and a rest."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 16), *torch.randn(2, 20, 1, 16)
    q[1] = float("nan")
    out, lse = flash_varlen(q, k, v, cumulative([3]), cumulative([20]), softcap=5.0)
    assert out[1].isnan().all() and lse[0, 1].isnan()
    assert out[::2].isfinite().all() and lse[0, ::2].isfinite().all()
