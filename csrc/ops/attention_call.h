// What the ops of attention share: their arguments, their guard, and how a call runs.
#pragma once

#include "arguments.h"

namespace paged_attn {

// The ops, by the arguments that not all of them have.
enum class Form {
  plain,     // flash_varlen
  into_out,  // flash_varlen_out
  layout,    // blocksparse
  lists,     // selected_attention
  masses,    // selected_mass
  units      // select_keys
};

// The arguments of an op, or of its backward. Members are initialised in the order in which they
// stand here, which is that of the schemas: a new argument is one line.
struct AttentionArguments {
  Arguments& next;
  Form form;
  bool is_backward = false;

  bool has_out = form == Form::into_out, has_layout = form == Form::layout;
  bool has_units = form == Form::units, has_values = !has_units && form != Form::masses;
  bool has_lists = form == Form::lists || form == Form::masses;
  bool is_dense = has_values && !has_lists, has_results = has_values && !is_backward;
  TensorView dout = is_backward ? next.tensor() : TensorView();
  TensorView dlse = is_backward ? next.optional_tensor() : TensorView();
  TensorView out = has_out ? next.tensor() : TensorView();
  TensorView q = next.tensor();
  TensorView k = next.tensor();
  TensorView v = has_values ? next.tensor() : k;
  TensorView weights = has_units ? next.optional_tensor() : TensorView();
  TensorView lse_of_masses = form == Form::masses ? next.tensor() : TensorView();
  TensorView crow_indices = has_layout ? next.tensor() : TensorView();
  TensorView col_indices = has_layout ? next.tensor() : TensorView();
  TensorView key_indices = has_lists ? next.tensor() : TensorView();
  TensorView forward_out = is_backward ? next.tensor() : TensorView();
  TensorView softmax_lse = is_backward ? next.tensor() : TensorView();
  TensorView cu_seqlens_q = next.tensor();
  TensorView cu_seqlens_k = next.optional_tensor();
  int64_t max_seqlen_q = next.integer();
  int64_t max_seqlen_k = next.integer();
  TensorView seqused_k = next.optional_tensor();
  TensorView block_table = is_backward ? TensorView() : next.optional_tensor();
  TensorView num_selected = has_lists ? next.optional_tensor() : TensorView();
  TensorView attn_bias = is_dense ? next.optional_tensor() : TensorView();
  TensorView alibi_slopes = is_dense ? next.optional_tensor() : TensorView();
  TensorView sinks = has_values ? next.optional_tensor() : TensorView();
  TensorView q_descale = is_backward ? TensorView() : next.optional_tensor();
  TensorView k_descale = is_backward ? TensorView() : next.optional_tensor();
  TensorView v_descale = has_results ? next.optional_tensor() : TensorView();
  TensorView out_scale = has_results ? next.optional_tensor() : TensorView();
  TensorView rng_state = is_dense ? next.optional_tensor() : TensorView();
  TensorView q_latent = has_results ? next.optional_tensor() : TensorView();
  TensorView tail_mask = is_dense ? next.optional_tensor() : TensorView();
  TensorView k_start = has_units ? TensorView() : next.optional_tensor();
  TensorView q_position = next.optional_tensor();
  int64_t q_block_size = has_layout ? next.integer() : 0;
  int64_t k_block_size = has_layout ? next.integer() : 0;
  int64_t num_units = has_units ? next.integer() : 0;
  int64_t select_size = has_lists || has_units ? next.integer() : 0;
  std::string score = has_units ? next.text() : std::string();
  std::string pool = has_units ? next.text() : std::string();
  std::optional<double> softmax_scale =
      has_units ? std::optional<double>() : next.optional_number();
  bool causal = next.boolean();
  int64_t force_first = has_units ? next.integer() : 0;
  int64_t force_last = has_units ? next.integer() : 0;
  int64_t window_size_left = has_units ? -1 : next.integer();
  int64_t window_size_right = has_units ? -1 : next.integer();
  double softcap = has_units ? 0 : next.number();
  double dropout_p = is_dense ? next.number() : 0;
  std::optional<DType> out_dtype =
      has_results && !has_out ? next.optional_dtype() : std::optional<DType>();
  bool deterministic = has_values ? next.boolean() : true;  // the backward's alone
  bool batch_invariant = has_results ? next.boolean() : false;
  int64_t key_ranks = is_dense ? next.integer() : 1;
  int64_t key_rank = is_dense ? next.integer() : 0;
  int64_t key_interleave = is_dense ? next.integer() : 1;
  std::array<bool, 5> output_mask = is_backward ? next.mask() : std::array<bool, 5>();

  // Whether k and v may be int4, and have a scale for each token.
  bool takes_token_scales = has_values;

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
