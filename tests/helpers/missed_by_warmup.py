"""Which kernels a model takes that `warmup` does not compile. Nothing is compiled, and no GPU is
needed; for a process in which Triton does not interpret."""

import contextlib
import os
from unittest import mock

import torch
from cross_compile import elsewhere

HEADS, PAGE_SIZE = (8, 2), 16
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
MOST_SEQUENCES, MOST_TOKENS = (64, 2048) if IS_THOROUGH else (6, 150)

# queries and keys of the sequences of a step, and columns of its block table; 0: as few as can be
Step = tuple[list[int], list[int], int]


def missed_by_warmup(arch: str, steps: list[Step]) -> tuple[int, list[str]]:
    """How many kernels `warmup` compiles for a model, and which steps take another one."""
    from triton.runtime.jit import JITFunction, compute_cache_key

    from torch_paged_attn import _warmup
    from torch_paged_attn.backends.triton.compile_ahead import sample
    from torch_paged_attn.backends.triton.flash_varlen import flash_varlen

    keys: set[str] = set()
    of_call: list[str] = []
    ops = "flash_varlen", "reshape_and_cache", "merge_states"

    def note(kernel, *args, grid, warmup, **kwargs):
        *_, key_cache, _, _, bind = kernel.device_caches[arch]
        _, specialization, options = bind(*args, **kwargs, debug=False, instrumentation_mode="")
        key = kernel.__name__ + compute_cache_key(key_cache, specialization, options)
        keys.add(key)
        of_call.append(key)

    def attend(q, k, v, *, cu_seqlens_q, seqused_k, block_table, **options):
        hints = (options.pop(f"max_seqlen_{x}", 0) for x in "qk")
        return flash_varlen(q, k, v, cu_seqlens_q, None, *hints, seqused_k, block_table, **options)

    cache = torch.zeros(2, 8, PAGE_SIZE, 2, 128, dtype=torch.bfloat16).transpose(2, 3)
    missed = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(JITFunction, "run", note))
        stack.enter_context(elsewhere(arch))
        for op, stand_in in zip(ops, (attend, *2 * (lambda *args: None,)), strict=True):
            stack.enter_context(mock.patch.object(_warmup, op, stand_in))
        calls = _warmup._make_calls(
            *HEADS, (128, 128), torch.bfloat16, torch.bfloat16, PAGE_SIZE,
            MOST_SEQUENCES, MOST_TOKENS, None, {"causal": True}, torch.device("cpu"),
        )  # fmt: skip

        def taken(i):
            of_call.clear()
            calls[i]()
            return tuple(of_call)

        for line in calls.lines:
            sample(line, taken)
        warmed = count = len(keys)
        for queries, contexts, columns in steps:
            width = max(columns, -(-max(contexts) // PAGE_SIZE))
            attend(
                torch.zeros(sum(queries), 8, 128, dtype=torch.bfloat16), *cache,
                cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0).int(),
                seqused_k=torch.tensor(contexts).int(), causal=True, max_seqlen_q=max(queries),
                block_table=torch.zeros(len(queries), width, dtype=torch.int32),
                max_seqlen_k=max(contexts),
            )  # fmt: skip
            if len(keys) > count:
                found = (
                    f"{len(queries)} sequences, {sum(queries)} and at most {max(queries)} queries"
                )
                missed.append(f"{found}, {max(contexts)} keys of {width * PAGE_SIZE}")
                count = len(keys)
    return warmed, missed
