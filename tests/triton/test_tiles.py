"""Tiles that no table of this machine's would choose."""

import dataclasses

import pytest
import torch
from covering import left_out

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.forward.splits import plan_splits
from torch_paged_attn.backends.triton.tuning import Config
from torch_paged_attn.testing import PROBLEMS, Problem, assert_accurate, build


def test_group_wider_than_tile(kernels, device):
    """It takes the heads in turns: 40 of them here, 16 at a time."""
    from torch_paged_attn.backends.triton.portable.forward.plan import attend

    problem = Problem("wide_group", ((1, 40), (3, 20), (0, 5)), 80, 2, 32, page_size=16)
    call = build(problem)
    arguments = AttentionCall.flash_varlen(**call.to(device).args)
    assert_accurate(*attend(arguments, config=Config(16, 16, 4, 1)), call.truth())


F32 = Problem("f32", ((1, 300), (21, 91)), 8, 2, 128, page_size=16)


@pytest.mark.parametrize(
    "problem, config",
    [
        left_out(F32, Config(8, 16, 4, 1)),
        (PROBLEMS["deepseek_mla/decode/bf16"], Config(16, 32, 4, 1, chain=32)),
        left_out(PROBLEMS["gemma2/window_softcap/bf16"], Config(32, 16, 4, 1, chain=64)),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_chains(problem, config, kernels, device):
    """What AMD's wide heads take."""
    from torch_paged_attn.backends.triton.portable.forward.plan import attend

    call = build(problem)
    arguments = AttentionCall.flash_varlen(**call.to(device).args)
    assert_accurate(*attend(arguments, config=config), call.truth())


@pytest.mark.parametrize(
    "sequences, programs",
    [(1, 66), (8, 64), (32, 64), (60, 66), (64, 64), (66, 66), (67, 66), (100, 66), (256, 64)],
)
def test_even_splits(sequences, programs):
    """A few less than there is room for, so that a tile is whole or cut into equal parts."""
    assert plan_splits(sequences + 1, 8, sequences, 4096, 4 * 132, True).programs == programs


@pytest.mark.parametrize(
    "longest, options",
    [
        (1, dict(causal=False, num_heads=2, num_kv_heads=2, padding_rows=20)),
        (40, dict(num_heads=3, num_kv_heads=1, sinks=True)),
        (512, dict(window_size_left=20, lengths="cu_seqlens_k", num_heads=2, num_kv_heads=1)),
    ],
    ids=str,
)
def test_tiles_in_turns(longest, options, kernels, device):
    """Whatever the hint of the longest sequence."""
    from torch_paged_attn.backends.triton.portable.forward.plan import attend

    seqs = ((0, 0), (40, 0), (1, 0), (17, 0), (0, 0))
    call = build(Problem("turns", seqs, dtype=torch.bfloat16, head_dim=32, **options))
    arguments = AttentionCall.flash_varlen(**call.to(device).args)
    result = attend(arguments, config=Config(16, 32, 4, 1), longest=longest)
    assert_accurate(*result, call.truth())


def test_choose_tiles_is_kept():
    """By numbers alone: a call of the same sizes gets the same tiles, whatever its tensors hold."""
    from torch_paged_attn.backends.triton.common.seqlen_info import key_bound
    from torch_paged_attn.backends.triton.portable.forward.tiles import choose_tiles, traits_of
    from torch_paged_attn.backends.triton.runtime.target import Target

    target = Target.of_arch("sm90", 132)
    problem = PROBLEMS["llama3_8b/decode_b5/bf16"]
    found = []
    for page_seed in (1, 2):
        call = build(dataclasses.replace(problem, page_seed=page_seed))
        call = AttentionCall.flash_varlen(**call.args)
        traits = traits_of(call, target)
        found.append(choose_tiles(traits, call.total_q, call.batch, key_bound(call)))
    assert found[0] is found[1]
    assert found[0].is_split and found[0].pack == call.group_size
