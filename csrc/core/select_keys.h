// What select_keys works on.
#pragma once

#include "attention.h"

namespace paged_attn {

enum class Pool { max, mean, sum };

struct SelectKeys {
  Attention forward;  // index queries and keys; without results, and its values are its keys
  bool has_relu;
  const void* weights;  // (token, head), or null
  DType weights_dtype;
  int64_t weights_stride_token, weights_stride_head;
  Pool pool;
  int64_t unit_size, num_units, force_first, force_last;
};

// Query tokens of a sequence under a head of index keys.
struct SelectTask {
  int64_t sequence, group, token_begin, token_end;
};

}  // namespace paged_attn
