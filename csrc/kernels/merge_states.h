// Attention over the union of two disjoint key sets, from the two results and their lse.
#pragma once

#include "../core/mask.h"
#include "../core/tokens.h"

namespace {

template <class T>
PAGED_ATTN_INLINE F load_strided(const T* p, int64_t stride, int n) {
  if (stride == 1) return n == W ? load(p) : load(p, n);
  T gathered[W] = {};
  for (int i = 0; i < n; ++i) gathered[i] = p[i * stride];
  return load(gathered, W);
}

inline void merge_row(const paged_attn::MergeStates& s, int64_t token, int64_t head) {
  const paged_attn::MergeStates::Part &a = s.a, &b = s.b;
  const float lse_a = a.lse[head * a.lse_stride_head + token * a.lse_stride_token];
  const float lse_b = b.lse[head * b.lse_stride_head + token * b.lse_stride_token];
  const float top = lse_a > lse_b ? lse_a : lse_b;
  const float shift = top == -INFINITY ? 0.f : top;
  const float weight_a = expf(lse_a - shift), weight_b = expf(lse_b - shift);
  const float sum = weight_a + weight_b;
  s.lse[head * s.total_q + token] = sum == 0 ? -INFINITY : shift + logf(sum);
  const F part_a = set1(weight_a / sum), part_b = set1(weight_b / sum);
  with_type(s.dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    const T* from_a = (const T*)a.out + token * a.stride_token + head * a.stride_head;
    const T* from_b = (const T*)b.out + token * b.stride_token + head * b.stride_head;
    T* out = (T*)s.out + (token * s.num_heads + head) * s.head_dim_v;
    for (int64_t d = 0; d < s.head_dim_v; d += W) {
      const int n = int(min64(W, s.head_dim_v - d));
      // a side without keys has no weight, whatever it holds
      F x = {};
      if (weight_a != 0) x = load_strided(from_a + d * a.stride_dim, a.stride_dim, n) * part_a;
      if (weight_b != 0)
        x = fma(load_strided(from_b + d * b.stride_dim, b.stride_dim, n), part_b, x);
      store(out + d, x, n);
    }
  });
}

void merge_states(const paged_attn::MergeStates& s, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token)
    for (int64_t head = 0; head < s.num_heads; ++head) merge_row(s, token, head);
}

}  // namespace
