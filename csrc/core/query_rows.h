// How an engine loads the rows of a task and stores their results. Row r of a group is the task's
// query token r / group_size under the group's head r % group_size.
#pragma once

#include "key_loop.h"
#include "online_softmax.h"
#include "product.h"

namespace {

// How many operands hold a row of head_dim numbers.
template <class Product>
PAGED_ATTN_INLINE int64_t depth_of(int64_t head_dim) {
  return round_up(head_dim, Product::DEPTH * Product::GRAIN) / Product::DEPTH;
}

template <class Product>
PAGED_ATTN_INLINE int64_t key_depth(const Attention& a) {
  return depth_of<Product>(a.head_dim);
}

// Stores a row's numbers as operands.
template <class Product, class T>
PAGED_ATTN_INLINE void load_row(const T* from, int64_t head_dim, float* to) {
  constexpr int STEP = W * Product::DEPTH;
  for (int64_t d = 0; d < head_dim; d += STEP) {
    const int64_t n = head_dim - d;
    const F operands =
        n >= STEP ? Product::load_operands(from + d) : Product::load_operands(from + d, int(n));
    store(to + d / Product::DEPTH, operands);
  }
}

// Rows of one group as operands, of q or of the latent queries; `to` has a row stride of whole
// vectors.
template <class Product>
inline void load_queries(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                         int64_t group, float* to, int64_t stride, bool is_latent = false) {
  const void* data = is_latent ? a.latent : a.q;
  const int64_t stride_token = is_latent ? a.latent_stride_token : a.q_stride_token;
  const int64_t stride_head = is_latent ? a.latent_stride_head : a.q_stride_head;
  const int64_t head_dim = is_latent ? a.head_dim_v : a.head_dim;
  constexpr int STEP = W * Product::DEPTH;
  const int64_t rows = rows_of(a, task);
  with_type(a.q_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = s.q_start + token_of(a, task, r), head = head_of(a, group, r);
      const T* from = (const T*)data + token * stride_token + head * stride_head;
      if constexpr (Product::template accepts<T>)
        for (int64_t d = 0; d < head_dim; d += STEP) {
          const int64_t n = head_dim - d;
          __builtin_prefetch(from + TOKENS_AHEAD * stride_token + d);
          const F operands = n >= STEP ? Product::load_operands(from + d)
                                       : Product::load_operands(from + d, int(n));
          store(to + r * stride + d / Product::DEPTH, operands);
        }
    }
  });
}

// Writes the result of row r of a group or, if the task is one of several splits, its sums for the
// merge.
PAGED_ATTN_APART void finish(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                             int64_t group, int64_t r, const float* acc, float m, float l) {
  if (task.partial < 0) {
    write_row(a, s, token_of(a, task, r), head_of(a, group, r), acc, m, l);
    return;
  }
  const int64_t rows = rows_of(a, task);
  const int64_t floats = partial_row_floats(a);
  float* to = a.partials + task.partial + ((group - task.group_begin) * rows + r) * floats;
  memcpy(to, acc, a.head_dim_v * sizeof(float));
  to[floats - 2] = m;
  to[floats - 1] = l;
}

}  // namespace
