// Few query rows (decode): keys and values are read in place, once, in the order of memory.
//
// A task covers a range of keys for several head groups: 16 keys at a time for every head, so that
// a page is read whole in either layout, while the next 16 are prefetched line by line (a burst of
// prefetches would be dropped). The rows of a group share each load and each conversion.
#pragma once

#include "../core/query_rows.h"

namespace {

constexpr int ROW_COLUMNS = 64;  // keys per softmax update

// The next ALIGN columns of every head of a task, asked for line by line in the order of memory:
// a line for every line of this chunk that is read.
struct Ahead {
  const char* data;  // of the first head
  const int64_t* offset;
  int64_t element_bytes, head_bytes, row_bytes;
  int heads;
  bool heads_adjoin;  // a token's heads, rather than a head's tokens
  int column = 0, head = 0;
  int64_t byte = 0;  // of the row

  PAGED_ATTN_INLINE bool fetch() {
    if (column == ALIGN || head == heads) return false;
    __builtin_prefetch(data + head * head_bytes + offset[column] * element_bytes + byte, 0, 2);
    byte += CACHE_LINE;
    if (byte < row_bytes) return true;
    byte = 0;
    if (heads_adjoin) {
      if (++head == heads) head = 0, ++column;
    } else {
      if (++column == ALIGN) column = 0, ++head;
    }
    return true;
  }
};

template <class T>
PAGED_ATTN_INLINE Ahead ahead_of(const paged_attn::KeyValue& x, const T* first_head,
                                 int64_t head_dim, int heads, const int64_t* offset) {
  Ahead ahead;
  ahead.data = (const char*)first_head;
  ahead.offset = offset;
  ahead.element_bytes = sizeof(T);
  ahead.head_bytes = x.stride_head * int64_t(sizeof(T));
  ahead.row_bytes = head_dim * int64_t(sizeof(T));
  ahead.heads = heads;
  ahead.heads_adjoin = x.stride_head < x.stride_token;
  return ahead;
}

// scores (rows, ALIGN columns) = scale * q (rows, head_dim) . k; ROWS x KEYS dot products at a
// time, enough to hide the latency of one, W of them summed over the lanes in one transpose
template <class Product, class T, int ROWS>
inline void dot_keys(const T* k, const int64_t* offset, Ahead& ahead, const float* q,
                     int64_t stride_q, int64_t rows, int64_t head_dim, float scale, float* scores) {
  constexpr int DOTS = W < 8 ? 8 : W, KEYS = DOTS / ROWS, PER_LINE = CACHE_LINE / int(sizeof(T));
  constexpr int STEP = W * Product::DEPTH;
  for (int c = 0; c < ALIGN; c += KEYS) {
    const T* key[KEYS];
    for (int i = 0; i < KEYS; ++i) key[i] = k + offset[c + i];
    for (int64_t r = 0; r < rows; r += ROWS) {
      F acc[DOTS] = {};
      const float* x = q + r * stride_q;
      const auto step = [&](int64_t d, auto load_key) __attribute__((always_inline)) {
        F row[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) row[i] = load(x + i * stride_q + d / Product::DEPTH);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; ++j) {
          const F y = load_key(key[j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i)
            acc[i * KEYS + j] = Product::multiply_add(y, row[i], acc[i * KEYS + j]);
        }
      };
      int64_t d = 0;
      for (; d + STEP <= head_dim; d += STEP) {
        if (r == 0 && d % PER_LINE == 0)
          for (int j = 0; j < KEYS; ++j) ahead.fetch();
        step(d,
             [](const T* p) __attribute__((always_inline)) { return Product::load_operands(p); });
      }
      if (d < head_dim) {
        const int n = int(head_dim - d);
        step(d, [n](const T* p)
                    __attribute__((always_inline)) { return Product::load_operands(p, n); });
      }
      float sums[DOTS];
      for (int i = 0; i < DOTS; i += W) store(sums + i, sum_lanes(acc + i) * set1(scale));
      for (int i = 0; i < ROWS; ++i)
        memcpy(scores + (r + i) * ROW_COLUMNS + c, sums + i * KEYS, KEYS * sizeof(float));
    }
  }
}

// acc (ROWS, VECS * W) += p (ROWS, ALIGN columns) @ v (ALIGN, VECS * W); with `n`, fewer dims
template <class Product, class T, int ROWS, int VECS, bool WHOLE>
PAGED_ATTN_INLINE void add_values(const T* v, const int64_t* offset, Ahead& ahead, bool prefetch,
                                  int64_t d, int n, const float* p, float* acc,
                                  int64_t stride_acc) {
  constexpr int DEPTH = Product::DEPTH;
  F sum[ROWS][VECS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) sum[r][j] = load(acc + r * stride_acc + d + j * W);
  for (int c = 0; c < ALIGN; c += DEPTH) {
    F x[VECS];
#pragma GCC unroll 2
    for (int i = 0; i < DEPTH; ++i) {
      if (prefetch)
        for (int b = 0; b < VECS * W * int(sizeof(T)); b += CACHE_LINE) ahead.fetch();
      const T* row = v + offset[c + i] + d;
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j += DEPTH)
        x[i + j] = WHOLE ? Product::load_operands(row + j * W) : Product::load_operands(row, n);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j += DEPTH) Product::interleave(x + j);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const F weight = set1(p[r * ROW_COLUMNS + c / DEPTH]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) sum[r][j] = Product::multiply_add(x[j], weight, sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) store(acc + r * stride_acc + d + j * W, sum[r][j]);
}

template <class Product, class T, int ROWS>
inline void weigh_values(const T* v, const int64_t* offset, Ahead& ahead, const float* p,
                         int64_t rows, int64_t head_dim, float* acc, int64_t stride_acc) {
  // no more accumulators than the products keep, and enough to hide the latency of one
  constexpr int VECS = ROWS == 4 ? TILE_VECS : 4;
  constexpr int FEW = Product::DEPTH, STEP = W * FEW;
  for (int64_t r = 0; r < rows; r += ROWS) {
    const float* weights = p + r * ROW_COLUMNS;
    float* to = acc + r * stride_acc;
    const bool first = r == 0;
    int64_t d = 0;
    for (; d + VECS * W <= head_dim; d += VECS * W)
      add_values<Product, T, ROWS, VECS, true>(v, offset, ahead, first, d, STEP, weights, to,
                                               stride_acc);
    for (; d + STEP <= head_dim; d += STEP)
      add_values<Product, T, ROWS, FEW, true>(v, offset, ahead, first, d, STEP, weights, to,
                                              stride_acc);
    if (d < head_dim)
      add_values<Product, T, ROWS, FEW, false>(v, offset, ahead, first, d, int(head_dim - d),
                                               weights, to, stride_acc);
  }
}

struct RowsWorkspace {
  int64_t rows;  // of a group, rounded up to whole register blocks
  int64_t stride_q, stride_acc;
  float *q, *acc, *m, *l, *scores;
  float* scale;  // of a group's dot products
  int64_t floats;
};

template <class Product>
PAGED_ATTN_INLINE RowsWorkspace rows_workspace(const Attention& a, int64_t rows, int64_t groups,
                                               float* memory) {
  RowsWorkspace w;
  w.floats = 0;
  const auto take = [&](int64_t floats) __attribute__((always_inline)) {
    float* p = memory ? memory + w.floats : nullptr;
    w.floats += round_up(floats, 16);
    return p;
  };
  w.rows = rows <= 2 ? rows : round_up(rows, 4);
  w.stride_q = round_up(key_depth<Product>(a), W);
  w.stride_acc = round_up(a.head_dim_v, W * Product::DEPTH);
  w.q = take(groups * w.rows * w.stride_q);
  w.acc = take(groups * w.rows * w.stride_acc);
  w.m = take(groups * w.rows);
  w.l = take(groups * w.rows);
  w.scores = take(groups * w.rows * ROW_COLUMNS);
  w.scale = take(groups);
  return w;
}

// One block of keys for every group of the task.
template <class Product, class T, int ROWS>
inline void attend_rows_block(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                              const KeyBlock& block, const KeyBlock& next, const RowsWorkspace& w) {
  const int groups = task.group_end - task.group_begin;
  const int columns = block.num_columns;
  const auto head_of = [&](const paged_attn::KeyValue& x, int g) __attribute__((always_inline)) {
    const int64_t kv_head = int64_t(task.group_begin + g) * a.num_kv_heads / a.num_groups;
    return (const T*)x.data + kv_head * x.stride_head;
  };
  const auto keys = [&](const int64_t* offset) __attribute__((always_inline)) {
    return ahead_of(a.k, head_of(a.k, 0), a.head_dim, groups, offset);
  };
  const auto values = [&](const int64_t* offset) __attribute__((always_inline)) {
    return ahead_of(a.v, head_of(a.v, 0), a.head_dim_v, groups, offset);
  };
  for (int c = 0; c < columns; c += ALIGN) {
    // after the last keys of a block come its first values
    Ahead ahead = c + ALIGN < columns ? keys(block.k_offset + c + ALIGN) : values(block.v_offset);
    for (int g = 0; g < groups; ++g) {
      float* scores = w.scores + g * w.rows * ROW_COLUMNS + c;
      dot_keys<Product, T, ROWS>(head_of(a.k, g), block.k_offset + c, ahead,
                                 w.q + g * w.rows * w.stride_q, w.stride_q, w.rows, a.head_dim,
                                 w.scale[g], scores);
    }
    while (ahead.fetch()) {
    }
  }
  const int64_t rows = (task.token_end - task.token_begin) * a.group_size;
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = g * w.rows + r;
      const ScoreRow row = score_row(a, s, task.token_begin + r / a.group_size,
                                     (task.group_begin + g) * a.group_size + r % a.group_size);
      const float rescale = softmax_row<Product>(a, s, row, block, 0, columns,
                                                 w.scores + i * ROW_COLUMNS, w.m[i], w.l[i]);
      if (rescale == 1) continue;
      float* acc = w.acc + i * w.stride_acc;
      for (int64_t d = 0; d < w.stride_acc; d += W) store(acc + d, load(acc + d) * set1(rescale));
    }
  for (int c = 0; c < columns; c += ALIGN) {
    Ahead ahead = c + ALIGN < columns ? values(block.v_offset + c + ALIGN) : keys(next.k_offset);
    for (int g = 0; g < groups; ++g) {
      const float* p = w.scores + g * w.rows * ROW_COLUMNS + c / Product::DEPTH;
      weigh_values<Product, T, ROWS>(head_of(a.v, g), block.v_offset + c, ahead, p, w.rows,
                                     a.head_dim_v, w.acc + g * w.rows * w.stride_acc, w.stride_acc);
    }
    while (ahead.fetch()) {
    }
  }
}

template <class Product>
inline void attend_rows(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                        float* memory) {
  const int64_t rows = (task.token_end - task.token_begin) * a.group_size;
  const int groups = task.group_end - task.group_begin;
  const RowsWorkspace w = rows_workspace<Product>(a, rows, groups, memory);
  memset(w.q, 0, groups * w.rows * w.stride_q * sizeof(float));
  memset(w.acc, 0, groups * w.rows * w.stride_acc * sizeof(float));
  for (int64_t i = 0; i < groups * w.rows; ++i) w.m[i] = -INFINITY, w.l[i] = 0;
  for (int g = 0; g < groups; ++g) {
    w.scale[g] = logit_scale(a, s, int64_t(task.group_begin + g) * a.num_kv_heads / a.num_groups);
    load_queries<Product>(a, s, task, task.group_begin + g, w.q + g * w.rows * w.stride_q,
                          w.stride_q);
  }

  KeyBlock blocks[2];
  KeyWalk walk = walk_keys(a, s, task, ROW_COLUMNS);
  bool more = next_block(walk, blocks[0]);
  for (int i = 0; more; i ^= 1) {
    KeyBlock &block = blocks[i], &next = blocks[i ^ 1];
    more = next_block(walk, next);
    if (a.bias && !borrow_hidden_values(a, s, task, block)) continue;
    with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      const KeyBlock& upcoming = more ? next : block;
      if constexpr (Product::template accepts<T>) {
        switch (w.rows) {
          case 1: return attend_rows_block<Product, T, 1>(a, s, task, block, upcoming, w);
          case 2: return attend_rows_block<Product, T, 2>(a, s, task, block, upcoming, w);
          default: return attend_rows_block<Product, T, 4>(a, s, task, block, upcoming, w);
        }
      }
    });
  }
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = g * w.rows + r;
      finish(a, s, task, task.group_begin + g, r, w.acc + i * w.stride_acc, w.m[i], w.l[i]);
    }
}

}  // namespace
