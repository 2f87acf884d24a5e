"""Programs that wait for each other to add up parts: who does what, and that bits stay the same."""

import dataclasses

import pytest
import torch
import triton
import triton.language as tl
from covering import every, every_other
from dispatched import dispatched

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.arrivals import arrive
from torch_paged_attn.backends.triton.portable.forward import plan as attention
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan
from torch_paged_attn.backends.triton.tuning import Config
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

HAS_GPU = torch.cuda.is_available()
DECODE = PROBLEMS["llama3_8b/decode_b5/bf16"]


@triton.jit
def _arriving_kernel(counters, is_mine, are_shared, parts, waiting, RESETS: tl.constexpr):
    result, number = tl.program_id(1), tl.program_id(0)
    mine, shared = arrive(counters + result, number, parts, waiting, RESETS)
    tl.store(is_mine + result * parts + number, mine.to(tl.int32))
    tl.store(are_shared + result * parts + number, shared.to(tl.int32))


@pytest.mark.parametrize("parts, waiting", [(2, 0), (2, 1), (9, 8), (40, 8), (66, 16)])
@pytest.mark.parametrize("results", [1, 3, 400] if HAS_GPU else [2])
def test_every_part_is_added_up_once(parts, waiting, results, device):
    """By all that wait, or else by one; on a GPU also where programs are more than run at once."""
    counters = torch.zeros(results, dtype=torch.int32, device=device)
    is_mine, are_shared = (
        torch.full((results, parts), -1, dtype=torch.int32, device=device) for _ in range(2)
    )
    for _ in range(3):
        _arriving_kernel[(parts, results)](
            counters, is_mine, are_shared, parts, waiting, RESETS=True
        )
        assert not counters.any()
        for mine, shared in zip(is_mine.tolist(), are_shared.tolist(), strict=True):
            if any(mine[i] and shared[i] for i in range(parts)):
                assert mine == [1] * waiting + [0] * (parts - waiting)
                assert shared[:waiting] == [1] * waiting
            else:
                assert sum(mine) == 1


# keys of a tile, warps, stages: one, four or eight warps, with and without stages
CONFIGS = [(32, 1, 5), (64, 4, 5), (128, 8, 5), (256, 8, 1)]
# the interpreter knows no warps and no stages, and takes longest for the smallest tiles
SLOW = pytest.param(CONFIGS[0], marks=pytest.mark.thorough)
# of more parts than there are columns to share; those of several sequences begin inside a
# program's piece
CONTEXTS = [(5000,), (2500, 90, 1400)] if HAS_GPU else [(900, 90, 500)]
PARTS = 40 if HAS_GPU else 30


def decode(contexts, kv_heads=1, **changes):
    heads = {"num_heads": 8 * kv_heads, "num_kv_heads": kv_heads}
    return build(
        dataclasses.replace(DECODE, seqs=tuple((1, n) for n in contexts), **heads | changes)
    )


def launcher(call, keys, warps, stages, programs=PARTS):
    args, options = dispatched(call.op, call.args)
    given = AttentionCall.flash_varlen(*args, **options)
    config = Config(16, keys, warps, stages, resident=1, is_merged_by_all=True)
    plan = attention.plan_attention(given, config=config, splits=SplitPlan(programs, keys))
    tensors = tuple(given.given_tensors().values())
    return lambda: plan(tensors, [x.data_ptr() for x in tensors])


@pytest.mark.parametrize("head_dim", [128, 80] if HAS_GPU else [48])
@pytest.mark.parametrize("contexts", CONTEXTS, ids=str)
@pytest.mark.parametrize("config", every_other((SLOW, *CONFIGS[1:])), ids=str)
def test_many_parts(config, contexts, head_dim, device):
    call = decode(contexts, head_dim=head_dim)
    truth = call.truth()
    launch = launcher(call.to(device), *config)
    want = launch()
    assert_accurate(*want, truth)
    for _ in range(20 if HAS_GPU else 1):
        assert all(map(torch.equal, launch(), want))


OPTIONS = [{"sinks": True}, {"window_size_left": 700}, {"dtype": torch.float32}]


@pytest.mark.parametrize("changes", every(3, OPTIONS), ids=str)
def test_many_parts_with_options(changes, device):
    call = decode((1000, 2000), **changes)
    assert_accurate(*launcher(call.to(device), *CONFIGS[1])(), call.truth())


@pytest.mark.skipif(not HAS_GPU, reason="streams are a GPU's")
def test_streams_whose_programs_wait_at_once():
    """Programs of some launches hold the multiprocessors for which those of others wait."""
    calls = [decode((9000 + 500 * n,), 8).to("cuda") for n in range(6)]
    # more programs than a GPU has multiprocessors
    launches = [launcher(call, *CONFIGS[2], programs=60) for call in calls]
    wants = [launch() for launch in launches]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in calls]
    found = []
    for _ in range(50):
        for stream, launch in zip(streams, launches, strict=True):
            with torch.cuda.stream(stream):
                found.append(launch())
    torch.cuda.synchronize()
    for number, result in enumerate(found):
        assert all(map(torch.equal, result, wants[number % len(calls)]))
