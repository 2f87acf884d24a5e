"""What only the CPU backend promises."""

import dataclasses
import subprocess
import sys
import threading

import pytest
import torch

from torch_paged_attn import flash_varlen
from torch_paged_attn.reference.philox import dropout_keep
from torch_paged_attn.testing import PROBLEMS, build
from torch_paged_attn.testing.inputs import cumulative


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


def test_threads_change_no_bit():
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    threads = torch.get_num_threads()
    results = []
    try:
        for n in (1, 2, 3):
            torch.set_num_threads(n)
            results.append(call.run())
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e5m2])
def test_an_infinity_stays_in_its_dim_and_head(kv_dtype):
    call = build(dataclasses.replace(PROBLEMS["llama3_8b/decode_b5/bf16"], kv_dtype=kv_dtype))
    expected, lse = call.run()
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
            torch.testing.assert_close(lse_now, lse)
            # four query heads look at the second key head; another dim is rounded in another way
            finite = out.isfinite()
            assert (~finite).nonzero().tolist() == [[2, head, 6] for head in range(4, 8)]
            assert set(map(tuple, changed[:, :2].tolist())) <= {(2, h) for h in range(4, 8)}
            torch.testing.assert_close(out[finite], expected[finite])
    finally:
        torch.set_num_threads(threads)


def test_workspace_does_not_grow_with_queries_times_keys():
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 64, f"{done.stdout} MiB"


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


def in_a_process(code):
    """What the code prints, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr or f"signal {-done.returncode}"
    return done.stdout


def test_a_refused_call_leaves_no_memory_behind():
    grown = in_a_process("""
import torch
from torch_paged_attn import flash_varlen
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
""")
    assert int(grown) < 5000 * 32
