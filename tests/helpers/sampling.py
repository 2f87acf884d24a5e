"""What of the conformance suite the suite of each device runs (`pytest tests/backends`), what of
that `make test` runs (`--sample`), and why the rest is left out.

A runner runs every case of every test, but for what stands here. `HYPOTHESIS_PROFILE=thorough` runs
all of them but `NEVER`. A new problem or test runs everywhere until a line here says otherwise.
"""

import dataclasses
import functools
import os

from likenesses import (
    GRADIENTS_LIKE,
    GRADIENTS_LIKE_ON_TPU,
    LIKE,
    LIKE_ON_TPU,
    Reasons,
)

from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    EXTENDED,
    EXTENDED_DIFFERENTIABLE,
    PROBLEMS,
    build,
)

ALL, ALL_DIFFERENTIABLE = PROBLEMS | EXTENDED, DIFFERENTIABLE | EXTENDED_DIFFERENTIABLE
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@dataclasses.dataclass(frozen=True)
class Sample:
    """The cases that a runner runs of some tests, by the test's name without `test_`; none is one
    that it does not run.
    """

    reason: str
    cases: dict[str, tuple[str, ...]]
    # why a problem may be left out of `agrees`, and of `gradients_agree`
    like: Reasons = dataclasses.field(default_factory=dict)
    gradients_like: Reasons = dataclasses.field(default_factory=dict)
    # the runner that runs what is left out
    rest_on: str = ""
    # with `--sample`, the cases of these tests instead
    brief: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def at(self, is_brief: bool) -> dict[str, tuple[str, ...]]:
        return self.cases | self.brief if is_brief else self.cases


# Tests that a runner never runs, thorough or not.
_FUNCTIONS = "the runner calls a backend's functions, which are nothing to the dispatcher"
_OF_THE_DISPATCHER = dict.fromkeys(
    ("gradients_by_autograd", "gradients_refused", "selected_gradients_by_autograd"), _FUNCTIONS
)
_OF_CACHES = dict.fromkeys(
    ("write_megabytes", "quantize_megabytes"),
    "it is about a processor's caches, and an interpreter has none",
)
_OF_OUT = dict.fromkeys(("out", "out_of_no_sequences"), "JAX writes into no argument")
_OF_STRIDES = dict.fromkeys(("gaps", "gradients_gaps"), "an array of JAX has no strides")
NEVER = {
    runner: _OF_CACHES | _OF_THE_DISPATCHER
    for runner in ("triton-interpreter", "neuron-2", "neuron-3", "neuron-4")
} | {
    "tpu": _OF_CACHES | _OF_THE_DISPATCHER | _OF_STRIDES | _OF_OUT,
    "reference": _OF_THE_DISPATCHER | {"write_outside": "the formula checks no slot"},
}

OF_SELECTED = ("same_bits", "page_order", "alone", "unseen_memory", "order_of_a_list")
BITS = ("same_bits", "page_order", "alone", "unseen_memory", "nan_stays", "gaps")

_WRITES = (
    "f32-f32-hnd",
    "bf16-bf16-nhd",
    "f16-f16-packed_last",
    "bf16-e4m3-interleaved",
    "f32-i8-hnd",
)

SAMPLES: dict[str, Sample] = {
    "triton-interpreter": Sample(
        "an interpreted call takes seconds",
        {
            "agrees": (
                "llama3_8b/prefill_ragged/bf16",
                "llama3_8b/decode_b5/bf16",
                "llama3_8b/mixed/kv_e4m3",
                "llama3_8b/mixed/kv_int8",
                "llama3_8b/prefill/out_e4m3",
                "llama3_8b/speculative/bf16",
                "mistral/window_both/f32",
                "gpt_oss/sinks_window/bf16",
                "mpt/alibi_batch/f32",
                "sglang/page1/f16",
                "training/dropout/f32",
                "more_queries_than_keys/f32",
                "odd_sizes/f32",
                "deepseek_mla/decode/bf16",
                "blocksparse/shared_layout/f32",
                "blocksparse/batched/f32",
                "eagle/tree_verify/bf16",
                "ring/window_alibi/bf16",
                "dcp/window_alibi/f32",
                "cp/blocksparse/bf16",
                "deepseek_mla/latent_columns/bf16",
                "deepseek_mla/latent_e4m3/bf16",
                "vllm/tokens_int8/bf16",
                "vllm/tokens_int4/bf16",
            ),
            "same_bits": ("sglang/page1/f16", "more_queries_than_keys/f32"),
            "out": ("sglang/page1/f16",),
            "page_order": ("sglang/page1/f16",),
            "alone": ("sglang/page1/f16",),
            "unseen_memory": ("sglang/page1/f16",),
            "nan_stays": ("sglang/page1/f16",),
            "hidden_scales": ("vllm/tokens_int8/bf16", "deepseek_mla/latent_columns/bf16"),
            # of each tensor that is copied one
            "gaps": (
                "gpt_oss/sinks_window/bf16",
                "mpt/alibi_batch/f32",
                "training/dropout/f32",
                "ring/window_alibi/bf16",
            ),
            "write": (*_WRITES, "f16-e5m2-packed_last"),
            "write_every_bfloat16": ("e4m3-0.3",),
            "gradients_agree": (
                "training/everything/f32",
                "training/blocksparse/bf16",
                "training/zigzag/bf16",
            ),
            "gradients_same_bits": (),
            "gradients_at_any_order": (),
            "gradients_alone": ("more_queries_than_keys/f32",),
            "gradients_unseen_memory": ("more_queries_than_keys/f32",),
            "gradients_any_strides": (),
            "gradients_asked_for": (),
            "gradients_of_out_alone": (),
            "gradients_beside_a_large_sink": (),
            "gradients_only_read": (),
            "selected_agrees": (
                "flashmla/slots/bf16",
                "minimax_m3/kv_e4m3/bf16",
                "deepseek_v3_2/latent_e4m3/bf16",
                "quest/decode/f16",
                "selected/nothing/f32",
                "selected/no_entries/f32",
                "selected/everything/f32",
                "selected/out_e4m3/bf16",
                "selected/many_keys/bf16",
            ),
            "selected_same_bits": ("quest/decode/f16",),
            "selected_page_order": ("quest/decode/f16",),
            "selected_alone": ("quest/decode/f16",),
            "selected_unseen_memory": ("quest/decode/f16", "flashmla/slots/bf16"),
            "selected_gaps": ("selected/everything/f32",),
            "selected_order_of_a_list": (),
            "selected_gradients_agree": ("selected/training_shared_list/f32",),
            "selected_gradients_unseen_memory": ("selected/training_shared_list/f32",),
        },
        LIKE,
        GRADIENTS_LIKE,
        brief={
            "agrees": (
                "llama3_8b/mixed/kv_e4m3",
                "llama3_8b/speculative/bf16",
                "gpt_oss/sinks_window/bf16",
                "training/dropout/f32",
                "odd_sizes/f32",
                "deepseek_mla/decode/bf16",
                "blocksparse/batched/f32",
                "eagle/tree_verify/bf16",
                "dcp/window_alibi/f32",
                "deepseek_mla/latent_e4m3/bf16",
            ),
            "same_bits": ("more_queries_than_keys/f32",),
            "gaps": ("ring/window_alibi/bf16",),
            # two calls and a merge, each of which others have
            "merge_prefix": (),
            "selected_nothing": (),
            # tests/triton/test_backward.py has layouts
            "gradients_agree": ("training/everything/f32",),
            "gradients_unseen_memory": (),
            "gradients_gaps": (),
            # no sum of a sequence depends on others: tests/triton/test_invariance.py
            "gradients_alone": (),
            "gradients_of_nothing": (),
            # page_order has them
            "selected_same_bits": (),
            "selected_unseen_memory": ("flashmla/slots/bf16",),
            "selected_agrees": (
                "flashmla/slots/bf16",
                "minimax_m3/kv_e4m3/bf16",
                "deepseek_v3_2/latent_e4m3/bf16",
                "selected/many_keys/bf16",
            ),
            "selected_gaps": (),
            # tests/triton/test_reshape_and_cache.py has all formats and the other layouts
            "quantize": ("bf16-i4-nhd",),
            # tests/triton/test_selected_parts.py, test_selected_units.py: shared lists and float32
            "selected_gradients_asked_for": ("selected/training/bf16",),
            # the slowest of all: more than 30 seconds
            "selected_gradients_agree": (),
            "selected_gradients_unseen_memory": (),
        },
    ),
    "tpu": Sample(
        "a case is seconds of compiling",
        {
            "agrees": (
                "llama3_8b/mixed/kv_e4m3",
                "gpt_oss/sinks_window/bf16",
                "mpt/alibi_batch/f32",
                "deepseek_mla/decode/bf16",
                "more_queries_than_keys/f32",
                "odd_sizes/f32",
                "vllm/tokens_int8/bf16",
            ),
            "same_bits": ("sglang/page1/f16",),
            "page_order": ("sglang/page1/f16",),
            "alone": ("sglang/page1/f16",),
            "unseen_memory": ("sglang/page1/f16",),
            "nan_stays": ("sglang/page1/f16",),
            # tests/tpu has training/everything/f32
            "gradients_agree": ("training/gpt_oss/bf16",),
            "gradients_same_bits": (),
            "gradients_at_any_order": (),
            "gradients_alone": (),
            "gradients_unseen_memory": ("training/gpt_oss/bf16",),
            "gradients_any_strides": (),
            "gradients_asked_for": (),
            "gradients_of_out_alone": (),
            "gradients_of_parts": (),
            "gradients_beside_a_large_sink": (),
            "gradients_only_read": (),
            "gradients_of_nothing": (),
            "merge_prefix": (),
            # tests/tpu/test_reshape_and_cache.py writes float32, past the slots, twice to one slot
            "write": ("f16-f16-packed_last", "f32-e4m3-hnd"),
            "write_every_bfloat16": ("e4m3-0.3", "e5m2-0.3", "i8-0.3"),
            "write_slots": (),
            "write_padding": (),
            "write_twice": (),
            # whole pages, by the kernel of all other calls
            "selected_agrees": ("selected/pages/f32", "quest/decode/f16"),
            **dict.fromkeys((f"selected_{promise}" for promise in OF_SELECTED), ()),
            "selected_unseen_memory": ("selected/pages/f32",),
        },
        LIKE_ON_TPU,
        GRADIENTS_LIKE_ON_TPU,
        brief={
            # hidden_scales is accurate with scales by token; its suite has heads of MLA
            "agrees": ("llama3_8b/mixed/kv_e4m3", "odd_sizes/f32"),
            # tests/tpu has sinks, windows and gradients of everything, and slots outside
            "same_bits": (),
            "page_order": (),
            "alone": (),
            "unseen_memory": (),
            "gradients_agree": (),
            "gradients_unseen_memory": (),
            # write_every_bfloat16 has 8 bits, tests/tpu float32
            "write": (),
            "write_every_bfloat16": ("e4m3-0.3",),
            "write_outside": (),
            # selected/pages/f32 has padding, by the kernel of all other calls
            "padding_rows": (),
            # one load of scales for all their types, one fold for any number of states
            "hidden_scales": ("vllm/tokens_int8/bf16",),
            "merge_of_many_agrees": ("three", "nine"),
            "selected_agrees": ("selected/pages/f32",),
            "selected_unseen_memory": (),
        },
    ),
    "neuron-3": Sample(
        "an emulated call takes a second",
        {
            "out": ("sglang/page1/f16", "llama3_8b/prefill/out_e4m3"),
            # page_order runs blocks for each head twice
            "same_bits": ("llama3_8b/mixed/bf16",),
            "page_order": (
                "llama3_8b/decode_b5/bf16",
                "mistral/window/f32",
                "phi3_small/local_strided/bf16",
            ),
            "alone": (
                "llama3_8b/mixed/bf16",
                "mpt/alibi_batch/f32",
                "blocksparse/batched/f32",
                "t5/bias/f32",
            ),
            "unseen_memory": ("llama3_8b/decode_b5/bf16", "blocksparse/batched/f32"),
            "nan_stays": ("llama3_8b/mixed/f32",),
            "gaps": ("llama3_8b/speculative/bf16", "blocksparse/batched/f32"),
            "write_every_bfloat16": ("e5m2-2.0",),
            "gradients_agree": (
                "mistral/window_both/f32",
                "more_queries_than_keys/f32",
                "tiny_head/bf16",
                "training/everything/f32",
                "training/gpt_oss/bf16",
                "training/bias_of_heads/f32",
                "training/long/bf16",
            ),
            "gradients_same_bits": ("more_queries_than_keys/f32",),
            "gradients_at_any_order": (),
            "gradients_alone": ("more_queries_than_keys/f32",),
            "gradients_unseen_memory": ("training/gpt_oss/bf16",),
            "gradients_any_strides": ("more_queries_than_keys/f32",),
            "gradients_asked_for": ("more_queries_than_keys/f32",),
            "gradients_of_out_alone": (),
            "gradients_only_read": (),
            "gradients_of_nothing": ("training/everything/f32",),
            **dict.fromkeys((f"selected_{promise}" for promise in OF_SELECTED), ()),
            "selected_page_order": ("selected/pages/f32",),
            "selected_alone": ("selected/pages/f32",),
            "selected_unseen_memory": ("selected/pages/f32",),
        },
        gradients_like=GRADIENTS_LIKE,
        brief={
            "agrees": (
                "llama3_8b/prefill_ragged/bf16",
                "llama3_8b/decode_b5/bf16",
                "llama3_8b/mixed/kv_e4m3",
                "llama3_8b/mixed/kv_int8",
                "llama3_8b/prefill/out_e4m3",
                "llama3_8b/speculative/bf16",
                "gemma2/window_softcap/bf16",
                "gpt_oss/sinks_window/bf16",
                "mpt/alibi_batch/f32",
                "t5/bias/f32",
                "sglang/page1/f16",
                "training/dropout/f32",
                "more_queries_than_keys/f32",
                "odd_sizes/f32",
                "deepseek_mla/decode/bf16",
                "phi3_small/local_strided/bf16",
                "blocksparse/batched/f32",
            ),
            "selected_agrees": ("selected/pages/f32", "selected/slots_of_pages/f32"),
            # unseen_memory shows the same kernel memory that no row sees
            "selected_unseen_memory": (),
            # each is two calls, of which agrees has one, and of these promises the quickest
            "same_bits": (),
            "page_order": ("llama3_8b/decode_b5/bf16", "mistral/window/f32"),
            "alone": ("mpt/alibi_batch/f32", "blocksparse/batched/f32"),
            "unseen_memory": ("llama3_8b/decode_b5/bf16",),
            "gaps": ("llama3_8b/speculative/bf16",),
            "hidden_scales": ("vllm/tokens_int8/bf16",),
            # agrees has 8 bits of result: `out` copies whatever the kernel's result is
            "out": ("sglang/page1/f16",),
            "gradients_agree": (
                "more_queries_than_keys/f32",
                "tiny_head/bf16",
                "training/everything/f32",
                "training/gpt_oss/bf16",
            ),
            # gradients_agree has training/everything/f32, whose sinks and strides these change
            "gradients_beside_a_large_sink": (),
            "gradients_gaps": (),
            "gradients_any_strides": (),
            # tests/neuron/test_backward.py has dq alone, and dk with dv
            "gradients_of_parts": (),
            # alone and page_order show the same
            "selected_alone": (),
            "gradients_unseen_memory": (),
        },
    ),
}
_OF_GRADIENTS = (
    *("same_bits", "at_any_order", "alone", "unseen_memory", "any_strides", "gaps"),
    *("asked_for", "of_out_alone", "of_parts", "only_read", "of_nothing", "beside_a_large_sink"),
)
# what differs between the generations: gathers, transpositions, copies by ScalarE, the room in SBUF
_OTHER_GENERATIONS = Sample(
    "the generations differ in a few instructions: neuron-3 runs the others",
    {
        "agrees": (
            "llama3_8b/decode_b5/bf16",
            "llama3_8b/mixed/kv_e4m3",
            "llama3_8b/mixed/kv_int8",
            "llama3_8b/prefill/e4m3",
            "llama3_8b/speculative/bf16",
            "gemma2/window_softcap/bf16",
            "deepseek_mla/decode/bf16",
            "t5/bias/f32",
            "training/dropout/f32",
            "odd_sizes/f32",
            "phi3_small/local_strided/bf16",
            "blocksparse/batched/f32",
        ),
        **dict.fromkeys((*BITS, "out", "merge_prefix"), ()),
        "write": _WRITES,
        "write_every_bfloat16": (),
        **dict.fromkeys((f"gradients_{promise}" for promise in _OF_GRADIENTS), ()),
        "gradients_agree": ("training/sinks_of_rows_without_keys/f32", "tiny_head/bf16"),
        "selected_agrees": ("selected/pages/f32",),
        **dict.fromkeys((f"selected_{promise}" for promise in OF_SELECTED), ()),
    },
    rest_on="neuron-3",
    brief={
        "agrees": (
            "llama3_8b/mixed/kv_e4m3",
            "llama3_8b/speculative/bf16",
            "odd_sizes/f32",
        ),
        "gradients_agree": ("training/sinks_of_rows_without_keys/f32",),
        # masked by the same instruction on all of them
        "hidden_scales": (),
        # of plans, which are the same for all of them
        "padding_rows": (),
        "selected_agrees": (),
    },
)
# dropout draws alike on all of them, and blocks for each head are more rows to gather, each of them
# a DMA of its own on the second
_SECOND_GENERATION = tuple(
    name
    for name in _OTHER_GENERATIONS.cases["agrees"]
    if name not in ("training/dropout/f32", "phi3_small/local_strided/bf16")
)
SAMPLES |= {
    "neuron-2": dataclasses.replace(
        _OTHER_GENERATIONS, cases=_OTHER_GENERATIONS.cases | {"agrees": _SECOND_GENERATION}
    ),
    "neuron-4": _OTHER_GENERATIONS,
}


def chosen(
    runner: str, test: str, cases: tuple[str, ...], *, is_brief: bool = False
) -> tuple[str, ...]:
    """The cases of a test that a runner runs now."""
    if test in NEVER.get(runner, {}):
        return ()
    sample = SAMPLES.get(runner)
    if IS_THOROUGH or sample is None or test not in (some := sample.at(is_brief)):
        return cases
    return tuple(case for case in cases if case in some[test])


@functools.cache
def no_gradients(runner, problem):
    """Why a backend has no gradients of a problem, or None."""
    return runner.unsupported_backward(build(problem))


@functools.cache
def refused(runner, problem):
    """Why a backend refuses a problem whose arguments it has, or None."""
    return runner.refused(problem)


def lacked(runner, case):
    """The arguments of a problem that a runner refuses, or its op; other cases have none."""
    if hasattr(case, "op") and not runner.has(case.op):
        return {case.op}
    found = getattr(case, "optional", frozenset()) & set(runner.lacks())
    return found or ({case.op} if hasattr(case, "op") and refused(runner, case) else found)


# tests of which every problem that there is runs, or has a reason in this field of `Sample`
REASONS = {"agrees": "like", "gradients_agree": "gradients_like"}


def there_are(runner, test):
    """The names of the problems of one of these tests that a runner does not refuse."""
    if test == "agrees":
        return [name for name, problem in ALL.items() if not lacked(runner, problem)]
    return [name for name, p in ALL_DIFFERENTIABLE.items() if no_gradients(runner, p) is None]
