"""Why `make test` may leave a problem out on a slow runner: it is like one that runs there, or
another test judges it. `test_sampling.py` follows each reason to a problem that runs.
"""

from typing import NamedTuple


class Like(NamedTuple):
    """Another problem, which runs or has a reason of its own, and what is different here."""

    problem: str
    difference: str

    def __str__(self) -> str:
        return f"as {self.problem.rpartition('/')[0]}, {self.difference}"


class JudgedBy(NamedTuple):
    """A test that judges the problem's results on this backend."""

    test: str

    def __str__(self) -> str:
        return f"{self.test} has it"


Reasons = dict[str, Like | JudgedBy]

LIKE: Reasons = {
    "minilm/packed/f32": Like("llama3_8b/prefill_ragged/bf16", "without a mask"),
    "llama3_8b/prefill_ragged/bf16": Like("llama3_8b/mixed/bf16", "packed"),
    "llama3_8b/mixed/f32": Like("odd_sizes/f32", "even ones"),
    "llama3_8b/mixed/bf16": Like(
        "llama3_8b/decode_b5/bf16", "prompts as in prefill_ragged beside them"
    ),
    "llama3_8b/mixed/f16": Like("sglang/page1/f16", "larger pages"),
    "llama3_8b/mixed/kv_e5m2": Like("llama3_8b/mixed/kv_e4m3", "another format"),
    "llama3_8b/prefill/e4m3": Like("llama3_8b/mixed/kv_e4m3", "queries in 8 bits too"),
    "llama3_8b/prefill/out_e4m3": Like("llama3_8b/prefill_ragged/bf16", "another store"),
    "llama3_70b_tp8/decode/bf16": Like("llama3_8b/decode_b5/bf16", "more keys"),
    "llama3_8b/prefill_2048/f32": Like("llama3_8b/prefill_ragged/bf16", "longer sums"),
    "gemma2/window_softcap/bf16": Like("gpt_oss/sinks_window/bf16", "with softcap"),
    "mistral/window/f32": Like("gpt_oss/sinks_window/bf16", "without sinks"),
    "mistral/window_both/f32": Like("gpt_oss/sinks_window/bf16", "on both sides"),
    "bloom/alibi/f16": Like("mpt/alibi_batch/f32", "slopes for all sequences"),
    "t5/bias/f32": Like("llama3_8b/speculative/bf16", "a bias of floats"),
    "deepseek/prefill/bf16": Like("llama3_8b/prefill_ragged/bf16", "narrower values"),
    "vllm_cache/mixed/bf16": Like("llama3_8b/decode_b5/bf16", "other strides"),
    "transformers_cache/mixed/f32": Like("llama3_8b/decode_b5/bf16", "other strides"),
    "vllm/tokens_e4m3/f16": Like("vllm/tokens_int8/bf16", "another format"),
    "tokens/packed_int8/f32": Like("vllm/tokens_int8/bf16", "packed"),
    "tokens/sparse_e5m2/f32": Like("vllm/tokens_int8/bf16", "another format, and a layout"),
    "tokens/int4_window/f32": Like("vllm/tokens_int4/bf16", "with a window"),
    "int4/one_scale/f32": Like("vllm/tokens_int4/bf16", "a scale for each head"),
    "nano_vllm/cu_seqlens_k/bf16": Like("llama3_8b/decode_b5/bf16", "lengths in cu_seqlens_k"),
    "torch_varlen/packed_seqused/f32": Like("more_queries_than_keys/f32", "more keys"),
    "tiny_head/bf16": Like("odd_sizes/f32", "in 16 bits"),
    "phi3_small/local_strided/bf16": Like(
        "blocksparse/shared_layout/f32", "a layout for each head"
    ),
    "blocksparse/wide_blocks/f16": Like("blocksparse/shared_layout/f32", "larger blocks"),
    "ring/zigzag/f32": Like("ring/window_alibi/bf16", "ranges that overlap"),
    "dcp/speculative/bf16": Like("dcp/window_alibi/f32", "without a window"),
    "dcp/blocksparse/f32": Like("cp/blocksparse/bf16", "a cache that is dealt out"),
    "deepseek_mla/latent/bf16": Like("deepseek_mla/latent_e4m3/bf16", "latents in 16 bits"),
    "latent/grouped/f32": Like("deepseek_mla/latent_e4m3/bf16", "several KV heads"),
    "latent/columns/f32": Like("deepseek_mla/latent_columns/bf16", "packed, with softcap"),
    "latent/sparse_columns/f16": Like("deepseek_mla/latent_columns/bf16", "a layout, in float16"),
    "deepseek_mla/latent_columns_int4/bf16": Like(
        "deepseek_mla/latent_columns/bf16", "two latents a byte"
    ),
    "latent/sparse_columns_int4/f16": Like(
        "deepseek_mla/latent_columns_int4/bf16", "a layout, in float16"
    ),
    "rl/invariant/f16": Like("llama3_8b/mixed/bf16", "whose bits may depend on more"),
    "tp/dropout_base/f32": Like("training/dropout/f32", "another part of the mask"),
}

GRADIENTS_LIKE: Reasons = {
    "minilm/packed/f32": Like("more_queries_than_keys/f32", "no causal mask"),
    "llama3_8b/prefill_ragged/bf16": Like("training/gpt_oss/bf16", "several KV heads"),
    "mistral/window_both/f32": Like("training/everything/f32", "a window alone"),
    "mpt/alibi_batch/f32": Like("training/everything/f32", "slopes alone"),
    "t5/bias/f32": Like("training/everything/f32", "a bias for each head"),
    "deepseek/prefill/bf16": Like("training/everything/f32", "values narrower than keys"),
    "torch_varlen/packed_seqused/f32": Like("more_queries_than_keys/f32", "more keys"),
    "training/dropout/f32": Like("training/everything/f32", "dropout alone"),
    "more_queries_than_keys/f32": Like("training/everything/f32", "most rows without keys"),
    "tiny_head/bf16": Like("training/gpt_oss/bf16", "a head_dim of 1"),
    "blocksparse/batched/f32": Like("training/blocksparse/bf16", "a layout for each sequence"),
    "training/long/bf16": Like("training/gpt_oss/bf16", "many tiles of keys"),
    "training/mqa_window/f16": Like("training/gpt_oss/bf16", "in float16"),
    "training/head_dim_80/bf16": Like("training/gpt_oss/bf16", "another head_dim, rows of padding"),
    "training/gemma2/bf16": Like("training/everything/f32", "a head_dim of 256 in 16 bits"),
    "training/gpt_oss/bf16": Like("training/everything/f32", "in 16 bits"),
    "training/sinks_of_rows_without_keys/f32": Like("training/everything/f32", "sinks alone"),
    "training/one_bias/bf16": Like("training/everything/f32", "a bias in 16 bits"),
    "training/bias_of_heads/f32": Like("training/everything/f32", "a bias for each head"),
    "training/bool_bias/f16": Like("training/everything/f32", "a mask for each head"),
    "training/alibi/bf16": Like("training/everything/f32", "slopes alone"),
    "training/dropout/bf16": Like("training/everything/f32", "dropout alone, in 16 bits"),
    "training/blocksparse_wide/f32": Like("training/blocksparse/bf16", "larger blocks"),
    "ring/zigzag/f32": Like("training/zigzag/bf16", "in float32"),
    "ring/window_alibi/bf16": Like("training/zigzag/bf16", "ranges of keys apart, slopes"),
    "cp/blocksparse/bf16": Like("training/blocksparse/bf16", "ranges of keys that overlap"),
    "tp/dropout_base/f32": Like("training/everything/f32", "another part of the dropout's mask"),
    "training/dealt/f32": Like("training/zigzag/bf16", "keys that are dealt out"),
    "training/tail_mask/f16": Like(
        "training/everything/f32", "a mask among new tokens instead of a bias"
    ),
}

_IN_STEPS = JudgedBy("tests/tpu/test_attention.py::test_steps_of_several_pieces_agree_too")
_FROM_TORCH = JudgedBy("tests/tpu/test_binding.py::test_attention")
LIKE_ON_TPU: Reasons = LIKE | {
    "llama3_8b/decode_b5/bf16": _FROM_TORCH,
    "sglang/page1/f16": JudgedBy("tests/backends/test_attention.py::test_alone"),
    "llama3_8b/mixed/bf16": Like("llama3_8b/mixed/kv_e4m3", "a cache of 16 bits"),
    "llama3_8b/mixed/kv_int8": Like("llama3_8b/mixed/kv_e4m3", "a cache of integers"),
    "gemma2/window_softcap/bf16": _IN_STEPS,
    "t5/bias/f32": _FROM_TORCH,
    "llama3_8b/speculative/bf16": Like("t5/bias/f32", "a bias of booleans, and pages"),
    "training/dropout/f32": _FROM_TORCH,
    "blocksparse/batched/f32": _IN_STEPS,
    "blocksparse/shared_layout/f32": Like("blocksparse/batched/f32", "one layout for all"),
}
GRADIENTS_LIKE_ON_TPU: Reasons = GRADIENTS_LIKE | {
    "training/everything/f32": JudgedBy(
        "tests/tpu/test_gradients.py::test_either_way_of_the_dmas_and_two_cores_give_the_same_bits"
    ),
}
