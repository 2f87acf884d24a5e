// What flash_varlen and blocksparse share: their guard, and how a call runs.
#pragma once

#include <tuple>

#include "tensor_view.h"

namespace paged_attn {

struct AttentionArguments {
  TensorView q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, attn_bias, alibi_slopes,
      sinks, q_descale, k_descale, v_descale, out_scale, rng_state;
  TensorView crow_indices, col_indices;  // blocksparse only
  int64_t max_seqlen_q, max_seqlen_k;
  int64_t q_block_size = 0, k_block_size = 0;
  std::optional<double> softmax_scale;
  bool causal;
  int64_t window_size_left, window_size_right;
  double softcap, dropout_p;
  std::optional<torch::headeronly::ScalarType> out_dtype;
};

// Fills in everything but the outputs. False when any rule of the contract is broken; then nothing
// that the arguments point to has been touched beyond what was proven to be there.
bool accept_attention(const AttentionArguments&, Attention&);

std::tuple<Tensor, Tensor> run_attention(Attention&);

}  // namespace paged_attn
