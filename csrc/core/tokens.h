// What reshape_and_cache and merge_states work on.
#pragma once

#include "attention.h"

namespace paged_attn {

// New keys or values on their way into a cache.
struct CacheWrite {
  const void* from;
  int64_t from_stride_token, from_stride_head;
  void* to;
  int64_t to_stride_page, to_stride_head, to_stride_token;
  DType from_dtype, to_dtype;
  int64_t head_dim;
  Strided<float> scale;  // (1, head)
  bool streamed;         // written around the processor's caches; rows are whole cache lines then
  // where each row's own scale is written, and by which the row is divided; or null
  float* token_scales = nullptr;
  int64_t scale_stride_page = 0, scale_stride_head = 0, scale_stride_token = 0;
};

struct ReshapeAndCache {
  CacheWrite key, value;
  const void* slots;
  int64_t slot_stride;
  bool slots_are_int64;
  int64_t num_tokens, num_heads, page_size, num_slots;
  // There are 2 * residues tasks. Each writes keys or values, of the tokens whose slots have its
  // residue: so tokens with the same slot are written by one task, in order.
  int64_t residues;
};

// The slot of a token, which may have changed since it was checked: callers check it again.
PAGED_ATTN_INLINE int64_t slot_at(const ReshapeAndCache& r, int64_t token) {
  const int64_t i = token * r.slot_stride;
  return r.slots_are_int64 ? read_once(static_cast<const int64_t*>(r.slots) + i)
                           : read_once(static_cast<const int32_t*>(r.slots) + i);
}

struct MergeStates {
  struct Part {
    const void* out;
    int64_t stride_token, stride_head, stride_dim;
    const float* lse;
    int64_t lse_stride_head, lse_stride_token;
  };
  DType dtype, out_dtype;
  int64_t total_q, num_heads, head_dim_v;
  const Part* parts;
  int64_t num_parts;
  void* out;   // contiguous
  float* lse;  // contiguous
};

struct MergeStatesBackward {
  DType dtype;
  int64_t total_q, num_heads, head_dim_v;
  MergeStates::Part gradient;  // dout and dlse, which may be null
  MergeStates::Part merged;    // out and softmax_lse
  struct Part {
    MergeStates::Part state;
    void* dout;   // contiguous
    float* dlse;  // contiguous
  } parts[2];
};

}  // namespace paged_attn
