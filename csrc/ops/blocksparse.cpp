#include <torch/csrc/stable/library.h>

#include "attention_call.h"
#include "refuse.h"

namespace {

using paged_attn::Tensor;
using OptionalTensor = std::optional<Tensor>;
using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor> blocksparse(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& crow_indices,
    const Tensor& col_indices, const Tensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    int64_t max_seqlen_q, int64_t max_seqlen_k, const OptionalTensor& seqused_k,
    const OptionalTensor& block_table, const OptionalTensor& attn_bias,
    const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
    const OptionalTensor& q_descale, const OptionalTensor& k_descale,
    const OptionalTensor& v_descale, const OptionalTensor& out_scale,
    const OptionalTensor& rng_state, int64_t q_block_size, int64_t k_block_size,
    std::optional<double> softmax_scale, bool causal, int64_t window_size_left,
    int64_t window_size_right, double softcap, double dropout_p,
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
                                              crow_indices,
                                              col_indices,
                                              max_seqlen_q,
                                              max_seqlen_k,
                                              q_block_size,
                                              k_block_size,
                                              softmax_scale,
                                              causal,
                                              window_size_left,
                                              window_size_right,
                                              softcap,
                                              dropout_p,
                                              out_dtype};
  paged_attn::Attention call = {};
  if (!accept_attention(arguments, call))
    paged_attn::refuse("paged_attn::blocksparse_error", q, k, v, crow_indices, col_indices,
                       cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k,
                       block_table, attn_bias, alibi_slopes, sinks, q_descale, k_descale, v_descale,
                       out_scale, rng_state, q_block_size, k_block_size, softmax_scale, causal,
                       window_size_left, window_size_right, softcap, dropout_p, out_dtype);
  return run_attention(call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("blocksparse", TORCH_BOX(&blocksparse)); }
