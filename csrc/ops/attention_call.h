// What the ops of attention share: their arguments, their guard, and how a call runs.
#pragma once

#include "arguments.h"

namespace paged_attn {

// The ops, by the arguments that not all of them have.
enum class Form {
  plain,     // flash_varlen
  into_out,  // flash_varlen_out
  layout,    // blocksparse
  lists      // selected_attention
};

// Members are initialised in the order in which they stand here, which is that of the schemas: a
// new argument is one line.
struct AttentionArguments {
  Arguments& next;
  Form form;

  bool has_out = form == Form::into_out, has_layout = form == Form::layout;
  bool has_lists = form == Form::lists;
  TensorView out = has_out ? next.tensor() : TensorView();
  TensorView q = next.tensor();
  TensorView k = next.tensor();
  TensorView v = next.tensor();
  TensorView crow_indices = has_layout ? next.tensor() : TensorView();
  TensorView col_indices = has_layout ? next.tensor() : TensorView();
  TensorView key_indices = has_lists ? next.tensor() : TensorView();
  TensorView cu_seqlens_q = next.tensor();
  TensorView cu_seqlens_k = next.optional_tensor();
  int64_t max_seqlen_q = next.integer();
  int64_t max_seqlen_k = next.integer();
  TensorView seqused_k = next.optional_tensor();
  TensorView block_table = next.optional_tensor();
  TensorView num_selected = has_lists ? next.optional_tensor() : TensorView();
  TensorView attn_bias = has_lists ? TensorView() : next.optional_tensor();
  TensorView alibi_slopes = has_lists ? TensorView() : next.optional_tensor();
  TensorView sinks = next.optional_tensor();
  TensorView q_descale = next.optional_tensor();
  TensorView k_descale = next.optional_tensor();
  TensorView v_descale = next.optional_tensor();
  TensorView out_scale = next.optional_tensor();
  TensorView rng_state = has_lists ? TensorView() : next.optional_tensor();
  TensorView q_latent = next.optional_tensor();
  TensorView tail_mask = has_lists ? TensorView() : next.optional_tensor();
  TensorView k_start = next.optional_tensor();
  TensorView q_position = next.optional_tensor();
  int64_t q_block_size = has_layout ? next.integer() : 0;
  int64_t k_block_size = has_layout ? next.integer() : 0;
  int64_t select_size = has_lists ? next.integer() : 0;
  std::optional<double> softmax_scale = next.optional_number();
  bool causal = next.boolean();
  int64_t window_size_left = next.integer();
  int64_t window_size_right = next.integer();
  double softcap = next.number();
  double dropout_p = has_lists ? 0 : next.number();
  std::optional<DType> out_dtype = has_out ? std::optional<DType>() : next.optional_dtype();
  bool deterministic = next.boolean();  // the backward's alone
  bool batch_invariant = next.boolean();
  int64_t key_ranks = has_lists ? 1 : next.integer();
  int64_t key_rank = has_lists ? 0 : next.integer();
  int64_t key_interleave = has_lists ? 1 : next.integer();

  // Whether k and v may be int4, and have a scale for each token.
  bool takes_token_scales = true;

  // Pages without a table: lists name slots of the cache.
  bool are_slots() const { return has_lists && !block_table && k.dim == 4; }
};

// Fills in everything but the outputs. False if a rule of the contract is broken. No memory is read
// here that was not found to exist before.
bool accept_attention(const AttentionArguments&, Attention&);

// The boxed kernel of an op that returns its output: from the arguments on the stack to the results
// there.
void attention(const char* op, Form form, StableIValue* stack, uint64_t num_args);

// The same for flash_varlen_out, which writes into an argument.
void attention_out(StableIValue* stack, uint64_t num_args);

}  // namespace paged_attn
