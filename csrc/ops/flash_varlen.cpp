#include <torch/csrc/stable/library.h>

#include "attention_call.h"
#include "refuse.h"

namespace {

using paged_attn::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor> flash_varlen(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens_q,
    const OptionalTensor& cu_seqlens_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
    const OptionalTensor& seqused_k, const OptionalTensor& block_table,
    const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
    const OptionalTensor& sinks, const OptionalTensor& q_descale, const OptionalTensor& k_descale,
    const OptionalTensor& v_descale, const OptionalTensor& out_scale,
    const OptionalTensor& rng_state, std::optional<double> softmax_scale, bool causal,
    int64_t window_size_left, int64_t window_size_right, double softcap, double dropout_p,
    std::optional<ScalarType> out_dtype) {
  paged_attn::AttentionArguments arguments = {q,
                                              k,
                                              v,
                                              cu_seqlens_q,
                                              cu_seqlens_k,
                                              seqused_k,
                                              block_table,
                                              attn_bias,
                                              alibi_slopes,
                                              sinks,
                                              q_descale,
                                              k_descale,
                                              v_descale,
                                              out_scale,
                                              rng_state,
                                              {},
                                              {},
                                              max_seqlen_q,
                                              max_seqlen_k,
                                              0,
                                              0,
                                              softmax_scale,
                                              causal,
                                              window_size_left,
                                              window_size_right,
                                              softcap,
                                              dropout_p,
                                              out_dtype};
  paged_attn::Attention call = {};
  if (!accept_attention(arguments, call))
    paged_attn::refuse("paged_attn::flash_varlen_error", q, k, v, cu_seqlens_q, cu_seqlens_k,
                       max_seqlen_q, max_seqlen_k, seqused_k, block_table, attn_bias, alibi_slopes,
                       sinks, q_descale, k_descale, v_descale, out_scale, rng_state, softmax_scale,
                       causal, window_size_left, window_size_right, softcap, dropout_p, out_dtype);
  return run_attention(call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("flash_varlen", TORCH_BOX(&flash_varlen)); }
