// The gradients of two merged results and their lse.
#pragma once

#include "merge_states.h"

namespace {

template <class T>
PAGED_ATTN_INLINE void merge_row_backward(const paged_attn::MergeStatesBackward& s,
                                          const paged_attn::MergeStatesBackward::Part& part,
                                          int64_t token, int64_t head) {
  const auto lse_of = [&](const paged_attn::MergeStates::Part& x) __attribute__((always_inline)) {
    return x.lse[head * x.lse_stride_head + token * x.lse_stride_token];
  };
  const auto row_of = [&](const paged_attn::MergeStates::Part& x) __attribute__((always_inline)) {
    return (const T*)x.out + token * x.stride_token + head * x.stride_head;
  };
  const float lse = part_lse(part.state, token, head);
  T* dout = (T*)part.dout + (token * s.num_heads + head) * s.head_dim_v;
  float& dlse = part.dlse[head * s.total_q + token];
  if (lse == -INFINITY) {  // no gradient, whatever else its row has
    memset(dout, 0, s.head_dim_v * sizeof(T));
    dlse = 0;
    return;
  }
  const float weight = expf(lse - lse_of(s.merged));
  F sum = {};
  for (int64_t d = 0; d < s.head_dim_v; d += W) {
    const int n = int(min64(W, s.head_dim_v - d));
    const auto load_row = [&](const paged_attn::MergeStates::Part& x)
                              __attribute__((always_inline)) {
                                return load_strided(row_of(x) + d * x.stride_dim, x.stride_dim, n);
                              };
    const F gradient = load_row(s.gradient);
    sum = fma(gradient, load_row(part.state) - load_row(s.merged), sum);
    store(dout + d, gradient * set1(weight), n);
  }
  dlse = weight * (reduce_add(sum) + (s.gradient.lse ? lse_of(s.gradient) : 0.f));
}

void merge_states_backward(const paged_attn::MergeStatesBackward& s, int64_t token_begin,
                           int64_t token_end) {
  with_type(s.dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    for (int64_t token = token_begin; token < token_end; ++token)
      for (int64_t head = 0; head < s.num_heads; ++head)
        for (const auto& part : s.parts) merge_row_backward<T>(s, part, token, head);
  });
}

}  // namespace
