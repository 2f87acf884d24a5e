"""What only the CPU backend promises."""

import subprocess
import sys
import threading

import torch

from torch_paged_attn.testing import PROBLEMS, build


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
