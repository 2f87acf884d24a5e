"""Named problems with gradients: those of problems.py that have them, and problems of training."""

from torch_paged_attn.testing.problem import Layout, Problem
from torch_paged_attn.testing.problems import (
    DEALT,
    EXTENDED,
    NEWEST,
    PROBLEMS,
    RANGES,
    SHARDS,
    bf16,
    f16,
)

SHORT = ((5, 0), (67, 0), (0, 9), (1, 33), (30, 14))

# further problems with gradients: packed keys, and short enough for the slowest device
TRAINING = {
    p.name: p
    for p in (
        Problem("training/long/bf16", ((40, 2000), (500, 0)), 2, 1, 64, dtype=bf16),
        Problem("training/mqa_window/f16", SHORT, 4, 1, 64, dtype=f16, window_size_left=20),
        Problem("training/head_dim_80/bf16", SHORT, 4, 4, 80, dtype=bf16, padding_rows=3),
        Problem(
            "training/gemma2/bf16",
            SHORT,
            4,
            2,
            256,
            dtype=bf16,
            softcap=5.0,
            window_size_left=24,
            softmax_scale=0.08,
        ),
        Problem(
            "training/gpt_oss/bf16",
            SHORT,
            8,
            1,
            64,
            dtype=bf16,
            sinks=True,
            window_size_left=16,
            lengths="none",
        ),
        Problem(
            "training/sinks_of_rows_without_keys/f32",
            ((9, -4), (20, 0), (3, -3)),
            4,
            2,
            32,
            sinks=True,
        ),
        Problem(
            "training/one_bias/bf16",
            SHORT,
            4,
            2,
            64,
            dtype=bf16,
            bias="float",
            softcap=7.0,
            causal=False,
        ),
        Problem("training/bias_of_heads/f32", SHORT, 4, 2, 40, bias="float", bias_heads="all"),
        Problem(
            "training/bool_bias/f16",
            SHORT,
            2,
            2,
            64,
            dtype=f16,
            bias="bool",
            bias_heads="all",
            fused_qkv=True,
        ),
        Problem("training/alibi/bf16", SHORT, 4, 2, 64, dtype=bf16, alibi="heads", causal=False),
        Problem(
            "training/everything/f32",
            SHORT,
            4,
            2,
            24,
            40,
            padding_rows=2,
            window_size_left=40,
            window_size_right=5,
            causal=False,
            softcap=4.0,
            alibi="batch",
            bias="float",
            sinks=True,
            dropout_p=0.25,
        ),
        Problem("training/dropout/bf16", SHORT, 4, 2, 128, dtype=bf16, dropout_p=0.1),
        Problem(
            "training/blocksparse/bf16",
            SHORT,
            4,
            2,
            64,
            dtype=bf16,
            layout=Layout(16, 32, "all", density=0.5),
        ),
        Problem(
            "training/blocksparse_wide/f32",
            ((70, 0), (5, 130)),
            4,
            2,
            32,
            layout=Layout(64, 128, "kv", density=0.6),
            softcap=3.0,
            window_size_left=90,
        ),
    )
}


def trains(problem: Problem) -> bool:
    """Whether a problem has gradients: its keys are packed, without 8 bits and q_latent."""
    floats = {problem.kv_dtype, problem.out_dtype} <= {None, problem.dtype}
    is_packed = problem.page_size is None and not problem.latent
    return is_packed and problem.dtype.itemsize > 1 and floats


# all problems with gradients, except one whose reference takes a minute
DIFFERENTIABLE = {p.name: p for p in PROBLEMS.values() if trains(p)} | TRAINING
del DIFFERENTIABLE["llama3_8b/prefill_2048/f32"]

# problems of `EXTENDED` that have gradients, and further ones
EXTENDED_DIFFERENTIABLE = {p.name: p for p in EXTENDED.values() if trains(p)} | {
    p.name: p
    for p in (
        Problem(
            "training/zigzag/bf16",
            RANGES,
            4,
            2,
            64,
            dtype=bf16,
            k_ranges="shared",
            q_positions=SHARDS,
            window_size_left=60,
        ),
        Problem(
            "training/dealt/f32",
            DEALT,
            4,
            2,
            32,
            q_positions=NEWEST,
            key_ranks=3,
            key_rank=1,
            key_interleave=4,
            alibi="heads",
        ),
        Problem("training/tail_mask/f16", SHORT, 4, 2, 64, dtype=f16, tail=True, causal=False),
    )
}
