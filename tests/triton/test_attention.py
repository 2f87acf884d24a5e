"""What is Triton's own in attention: 8-bit decode by pairs, and fuzzed plans, in the interpreter or
on a GPU. `tests/backends` has the named problems.
"""

import dataclasses
import itertools
import os

import hypothesis
import pytest
import torch
from covering import every_row
from hypothesis import strategies as st

from torch_paged_attn import reference
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.ops.checks import QUANTISED
from torch_paged_attn.ops.lacking import in_all
from torch_paged_attn.testing import PROBLEMS, Problem, assert_accurate, build
from torch_paged_attn.testing.accuracy import Truth
from torch_paged_attn.testing.inputs import cumulative
from torch_paged_attn.testing.strategies import layouts, problems

HAS_GPU = torch.cuda.is_available()
HAS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)

# fuzzed plans, in parts that several processes share: on a GPU nearly every plan compiles a kernel.
# Of the interpreter's seed no plan has 2000 keys under 16 wide heads, which take it 16 seconds
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
SUPPORTED = in_all(BACKEND.lacks, ("flash_varlen", "blocksparse"))
SEEDS, PLANS = (range(10), 10) if HAS_GPU or IS_THOROUGH else ((7,), 3)

DECODE = PROBLEMS["llama3_8b/decode_b5/bf16"]
EXPONENTS = (-40, 0, 40)
# an interpreted call takes seconds: each format once, and each exponent
PAIRS = [*(itertools.product if HAS_GPU or IS_THOROUGH else zip)(EXPONENTS, QUANTISED)]


@pytest.mark.parametrize("exponent, kv_dtype", every_row(2, PAIRS))
def test_decode_reads_pairs_of_8_bit_numbers(exponent, kv_dtype, run, device):
    """Also for queries beyond the range of the products' float16."""
    problem = dataclasses.replace(DECODE, kv_dtype=kv_dtype, descale="heads")
    call = build(problem)
    call.args["q"] *= 2.0**exponent
    call.args["softmax_scale"] = 2.0**-exponent * problem.head_dim**-0.5
    assert_accurate(*run(call.to(device)), call.truth())


FEW = ((1, 149), (1, 70), (1, 0))
# bytes of large numbers: 127, 448, and 7 in the low bits
LARGE = {torch.int8: 0x7F, torch.float8_e4m3fn: 0x7E, torch.uint8: 0x07}


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_decode_with_scales_by_token(kv_dtype, run, device):
    """Half of the tokens have scales that are 2**20 times as large, but no weight. In units of the
    largest scale, nothing would be left of the others.
    """
    problem = Problem(
        "by token", FEW, 4, 2, 64, dtype=torch.bfloat16, kv_dtype=kv_dtype, page_size=16,
        cache_layout="rows", descale="tokens",
    )  # fmt: skip
    call = build(problem)
    is_odd = torch.arange(16) % 2 == 1
    call.args["k_descale"][..., is_odd] *= 2.0**-10
    call.args["v_descale"][..., is_odd] *= 2.0**20
    # keys of the other tokens: the first number of each is large, and queries look for it
    k = call.args["k"]
    k[..., 0] = k[..., 0].view(torch.uint8).new_full((), LARGE[kv_dtype]).view(k.dtype)
    call.args["q"][..., 0], call.args["softmax_scale"] = 64.0, 1.0
    assert_accurate(*run(call.to(device)), call.truth())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(st.none(), id="flash_varlen"),
        pytest.param(layouts, id="blocksparse", marks=pytest.mark.device_suite),
    ],
)
def test_fuzzed_plans_agree_with_the_reference(layout, seed, run, device):
    """Every option mixed. On a GPU there is no time to shrink them."""
    phases = [hypothesis.Phase.generate] if HAS_GPU else list(hypothesis.Phase)

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=PLANS, derandomize=False, database=None, deadline=None, phases=phases
    )
    @hypothesis.given(problems(layout, optional=SUPPORTED))
    def check(problem):
        call = build(problem)
        assert_accurate(*run(call.to(device)), call.truth(cuts_off=HAS_HOPPER))

    check()


# found by the test above on an H200: logits of a few in a softcap of 50
CAPPED = Problem(
    "capped",
    ((21, -10), (6, -2), (20, -4), (9, -9)),
    12,
    3,
    96,
    dtype=torch.float16,
    out_dtype=torch.float32,
    page_size=32,
    cache_layout="packed_last",
    page_seed=2,
    lengths="cu_seqlens_k",
    window_size_left=48,
    softcap=50.0,
    bias="bool",
    dropout_p=0.9,
    dropout_base=(8, 5, 6),
    q_positions=(37, 87, 455, 369),
    key_ranks=5,
    key_rank=3,
    key_interleave=16,
    seed=2503,
)


def test_small_logits_keep_their_bits_in_a_large_softcap(run, device):
    """tanh by exponentials is off by a part of 1, not of itself: 1.36e-6 in the mean lse, of 1.2e-6
    that are allowed, even if each step is rounded as IEEE asks."""
    call = build(CAPPED)
    assert_accurate(*run(call.to(device)), call.truth())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(2, 3), *[(700, 300)] * HAS_GPU])
def test_sinks_of_any_finite_size(dtype, lengths, kernels, device):
    """In base two, those past 2.36e38 would be infinite. On Hopper the longer batch is its own."""
    torch.manual_seed(0)
    total = sum(lengths)
    q, k, v = (torch.randn(total, heads, 64).to(dtype) for heads in (4, 2, 2))
    largest = torch.finfo(torch.float32).max
    sinks = torch.tensor([3e38, -3e38, largest, -largest])
    bounds = cumulative(lengths)
    truth = Truth.of(reference.flash_varlen, q, k, v, bounds, sinks=sinks, causal=True)
    tensors = (None if x is None else x.to(device) for x in (q, k, v, bounds, None))
    args = *tensors, 0, 0, None, None, None, None, sinks.to(device)
    assert_accurate(*kernels.flash_varlen(*args, causal=True), truth)
