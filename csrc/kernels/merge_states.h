// Attention over the union of disjoint key sets, from the results for each and their lse.
#pragma once

#include "../core/mask.h"
#include "../core/tokens.h"

namespace {

constexpr int64_t MERGED = 128;  // numbers of a row that are added up at a time
constexpr int64_t KEPT = 8;

template <class T>
PAGED_ATTN_INLINE F load_strided(const T* p, int64_t stride, int n) {
  if (stride == 1) return n == W ? load(p) : load(p, n);
  T gathered[W] = {};
  for (int i = 0; i < n; ++i) gathered[i] = p[i * stride];
  return load(gathered, W);
}

// -inf of a row that saw no key, for which FlashAttention-2 has +inf.
PAGED_ATTN_INLINE float part_lse(const paged_attn::MergeStates::Part& part, int64_t token,
                                 int64_t head) {
  const float lse = part.lse[head * part.lse_stride_head + token * part.lse_stride_token];
  return lse == INFINITY ? -INFINITY : lse;
}

inline void merge_row(const paged_attn::MergeStates& s, int64_t token, int64_t head) {
  float top = -INFINITY, sum = 0;
  for (int64_t i = 0; i < s.num_parts; ++i) {
    const float lse = part_lse(s.parts[i], token, head);
    top = lse > top ? lse : top;
  }
  const float shift = top == -INFINITY ? 0.f : top;
  float weights[KEPT];  // of the first parts; those of others are computed again
  const auto weight_of = [&](int64_t i) { return expf(part_lse(s.parts[i], token, head) - shift); };
  for (int64_t i = 0; i < s.num_parts; ++i) {
    const float weight = weight_of(i);
    if (i < KEPT) weights[i] = weight;
    sum += weight;
  }
  s.lse[head * s.total_q + token] = sum == 0 ? -INFINITY : shift + logf(sum);
  const int64_t row = (token * s.num_heads + head) * s.head_dim_v;
  for (int64_t begin = 0; begin < s.head_dim_v; begin += MERGED) {
    const int64_t count = min64(MERGED, s.head_dim_v - begin);
    F merged[MERGED / W] = {};
    for (int64_t i = 0; i < s.num_parts; ++i) {
      const paged_attn::MergeStates::Part& part = s.parts[i];
      const float weight = i < KEPT ? weights[i] : weight_of(i);
      if (weight == 0) continue;  // a part without keys has no weight, whatever it holds
      const F share = set1(weight / sum);
      with_type(s.dtype, [&](auto tag) __attribute__((always_inline)) {
        typedef typename decltype(tag)::type T;
        const T* from = (const T*)part.out + token * part.stride_token + head * part.stride_head +
                        begin * part.stride_dim;
        for (int64_t d = 0; d < count; d += W) {
          const int n = int(min64(W, count - d));
          merged[d / W] = fma(load_strided(from + d * part.stride_dim, part.stride_dim, n), share,
                              merged[d / W]);
        }
      });
    }
    with_type(s.out_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      T* out = (T*)s.out + row + begin;
      for (int64_t d = 0; d < count; d += W)
        store(out + d, merged[d / W], int(min64(W, count - d)));
    });
  }
}

void merge_states(const paged_attn::MergeStates& s, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token)
    for (int64_t head = 0; head < s.num_heads; ++head) merge_row(s, token, head);
}

}  // namespace
