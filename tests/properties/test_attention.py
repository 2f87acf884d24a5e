"""Any plan, every option mixed: right by the one rule, the same bits twice and alone."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from same_bits import assert_same_bits
from served import HAS, examples

from torch_paged_attn.testing import Layout, Problem, assert_accurate, build
from torch_paged_attn.testing.strategies import layouts, problems

FEW_ROWS_THAT_CANCEL = Problem(
    "few_rows_that_cancel",
    ((1, 50),),
    num_heads=2,
    num_kv_heads=1,
    head_dim=1,
    kv_dtype=torch.float8_e4m3fn,
    out_dtype=torch.float32,
    padding_rows=2,
    causal=False,
)
ONE_NUMBER_FINER_THAN_ITS_PROBABILITIES = Problem(
    "one_number_finer_than_its_probabilities",
    ((1, 54),),
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    kv_dtype=torch.float8_e4m3fn,
    out_dtype=torch.float32,
    causal=False,
    bias="float",
)
FEW_LOGITS_OF_LONG_SUMS = Problem(
    "few_logits_of_long_sums",
    ((0, 1), (5, 2)),
    num_kv_heads=1,
    head_dim=128,
    head_dim_v=1,
    padding_rows=1,
    causal=False,
    descale="scalar",
    seed=2,
)
DROPOUT_THAT_MAGNIFIES = Problem(
    "dropout_that_magnifies",
    ((0, 162), (5, 3)),
    num_heads=8,
    num_kv_heads=1,
    head_dim=128,
    head_dim_v=1,
    padding_rows=2,
    causal=False,
    dropout_p=0.9,
    seed=32,
)
ALIBI_FAR_AWAY = Problem(
    "alibi_far_away",
    ((1, 11), (34, 95)),
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    head_dim_v=1,
    kv_dtype=torch.float8_e4m3fn,
    causal=False,
    softmax_scale=0.0,
    alibi="heads",
    layout=Layout(16, 16, heads="one", batched=True, density=0.3),
)
ALIBI_ALONE = Problem(
    "alibi_alone",
    ((12, 1), (33, 193)),
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    head_dim_v=1,
    page_size=1,
    causal=False,
    softmax_scale=0.0,
    alibi="heads",
    descale="scalar",
    layout=Layout(256, 16, heads="one", batched=True, density=0.3),
)  # dropout leaves a row of keys that hardly count: their logits' roundings, and the maximum's
LEFT_BY_DROPOUT = Problem(
    "left_by_dropout",
    ((12, -3), (138, 0), (11, -8), (1, 27)),
    num_heads=12,
    num_kv_heads=3,
    head_dim=245,
    page_size=238,
    cache_layout="mla",
    causal=False,
    window_size_right=48,
    softmax_scale=1.0,
    alibi="batch",
    bias="float",
    dropout_p=0.9,
    seed=954,
)
# and here one whose probability float32 rounds as if it were nothing
LOST_BY_FLOAT32 = Problem(
    "lost_by_float32",
    ((18, 0),),
    num_heads=8,
    num_kv_heads=2,
    head_dim=32,
    dtype=torch.bfloat16,
    kv_dtype=torch.int8,
    page_size=176,
    cache_layout="packed_last",
    page_seed=3,
    fused_qkv=True,
    dropout_p=0.9,
    layout=Layout(256, 256, heads="one", batched=True, density=0.7),
    seed=23557,
)
# 8-bit numbers as they are stored: float32 adds up products of thousands
LARGE_LOGITS = Problem(
    "large_logits",
    ((52, 0), (91, 0), (129, 0)),
    num_heads=8,
    num_kv_heads=2,
    head_dim=215,
    dtype=torch.float16,
    kv_dtype=torch.int8,
    page_size=32,
    softmax_scale=1.0,
)
# and a row of hundreds whose one large logit is unlucky
UNLUCKY_LOGIT = Problem(
    "unlucky_logit",
    ((24, 0),),
    num_heads=24,
    num_kv_heads=3,
    head_dim=128,
    head_dim_v=8,
    kv_dtype=torch.int8,
    out_dtype=torch.float32,
    page_size=1,
    causal=False,
    alibi="heads",
    dropout_p=0.1,
    tail=True,
    batch_invariant=True,
)
# the window of the last query is between the keys of this rank
WINDOW_OF_ANOTHER_RANK = Problem(
    "window_of_another_rank",
    ((2, 16),),
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    window_size_left=1,
    key_ranks=2,
    key_interleave=16,
)
WINDOW_PAST_ALL_KEYS = Problem(
    "window_past_all_keys",
    ((2, 14),),
    num_heads=1,
    num_kv_heads=1,
    dtype=torch.bfloat16,
    window_size_left=1,
    q_positions=(16,),
)
# one row whose few keys' probabilities the baseline rounded luckily
ONE_UNLUCKY_ROW_OF_MANY = Problem(
    "one_unlucky_row_of_many",
    ((0, 118), (23, 113)),
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    dtype=torch.bfloat16,
    out_dtype=torch.float32,
    causal=False,
    alibi="heads",
    descale="scalar",
    tail=True,
    k_ranges="apart",
    batch_invariant=True,
    seed=1,
)
# rows of few keys, whose logits' roundings are not averaged
INT4_OF_FEW_KEYS = Problem(
    "int4_of_few_keys",
    ((1, 5), (1, 3)),
    num_heads=1,
    num_kv_heads=1,
    head_dim=128,
    dtype=torch.bfloat16,
    kv_dtype=torch.uint8,
    page_size=16,
    seed=29,
)

LONG_SUMS = Problem("long_sums", ((400, 0),), 2, 1, head_dim=256, causal=False)


@given(problems(optional=HAS))
@example(FEW_ROWS_THAT_CANCEL)
@example(ONE_NUMBER_FINER_THAN_ITS_PROBABILITIES)
@example(FEW_LOGITS_OF_LONG_SUMS)
@example(DROPOUT_THAT_MAGNIFIES)
@example(LONG_SUMS)
@example(LEFT_BY_DROPOUT)
@example(LARGE_LOGITS)
@examples(UNLUCKY_LOGIT, ONE_UNLUCKY_ROW_OF_MANY, WINDOW_OF_ANOTHER_RANK, WINDOW_PAST_ALL_KEYS)
@examples(INT4_OF_FEW_KEYS)
def test_flash_varlen_agrees_with_the_reference(problem):
    call = build(problem)
    assert_accurate(*call.run(), call.truth())


@given(problems(layouts, optional=HAS))
@example(ALIBI_FAR_AWAY)
@example(ALIBI_ALONE)
@example(LOST_BY_FLOAT32)
def test_blocksparse_agrees_with_the_reference(problem):
    call = build(problem)
    assert_accurate(*call.run(), call.truth())


@given(problems(st.one_of(st.none(), layouts), optional=HAS), st.integers(0, 2**20))
def test_bits_depend_on_the_sequence_alone(problem, hint):
    call = build(problem)
    out, lse = call.run()
    again = call.run(max_seqlen_q=hint, max_seqlen_k=hint)
    assert_same_bits((out, lse), (again[0], again[1]))
    if problem.dropout_p:
        return  # a dropout mask depends on the place in the batch
    bounds = call.args["cu_seqlens_q"].tolist()
    for b in range(len(problem.seqs)):
        rows = slice(bounds[b], bounds[b + 1])
        alone_out, alone_lse = call.alone(b).run()
        assert_same_bits((alone_out, alone_lse), (out[rows], lse[:, rows]))
