"""Written through slots, read through a block table: attention over the tokens themselves."""

import dataclasses

import torch
from hypothesis import example, given

import torch_paged_attn
from torch_paged_attn.testing import Problem, assert_accurate, build
from torch_paged_attn.testing.strategies import problems

# all rows of a sequence have one result, and its luck
ROWS_ALIKE = Problem(
    "rows_alike",
    ((1, 0), (27, -20)),
    num_heads=2,
    num_kv_heads=1,
    head_dim=1,
    padding_rows=1,
    causal=False,
    softmax_scale=0.0,
    descale="scalar",
    seed=2482,
)


@given(problems())
@example(ROWS_ALIKE)
def test_what_is_written_is_attended(problem):
    page_size = problem.page_size or 5
    if problem.cache_layout == "mla":  # one storage for keys and values cannot be written twice
        problem = dataclasses.replace(problem, cache_layout="hnd")
    problem = dataclasses.replace(problem, page_size=page_size, kv_dtype=None)
    if problem.dtype.itemsize == 1:
        problem = dataclasses.replace(
            problem, dtype=torch.bfloat16, out_scale=False, out_dtype=None
        )
    if problem.lengths == "none":
        problem = dataclasses.replace(problem, lengths="seqused_k")
    call = build(problem)
    k, v, table = (call.args[name] for name in ("k", "v", "block_table"))
    tokens = [(b, j) for b, n in enumerate(problem.key_lens) for j in range(n)]
    sequence, position = torch.tensor(tokens, dtype=torch.int64).view(-1, 2).unbind(1)
    page, offset = table[sequence, position // page_size].long(), position % page_size
    keys, values = k[page, :, offset].clone(), v[page, :, offset].clone()
    slots = page * page_size + offset
    fresh = {"k": torch.full_like(k, float("nan")), "v": torch.full_like(v, float("nan"))}
    torch_paged_attn.reshape_and_cache(keys, values, (fresh["k"], fresh["v"]), slots)
    assert_accurate(*call.run(**fresh), call.truth())
