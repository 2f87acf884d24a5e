// Many query rows (prefill): two register-tiled matrix products around the running softmax.
//
// A task is a tile of query tokens x the heads of one group. The keys of a block are converted and
// packed once, transposed, and serve every row; so are the values. Per TILE_ROWS rows the scores
// stay in L1: product, softmax, product. Columns past the rows' visible range are not computed.
#pragma once

#include "../core/query_rows.h"

namespace {

constexpr int PANEL = TILE_VECS * W;  // packed operands lie in panels of this many columns

// A (TILE_ROWS, depth) @ B (depth, one panel): C (TILE_ROWS, VECS * W) is that times scale[0], or,
// to accumulate, that plus diag(scale) C.
template <int VECS, bool ACCUMULATE>
inline void multiply_tile(const float* a, int64_t stride_a, const float* b, float* c,
                          int64_t stride_c, int64_t depth, const float* scale) {
  // a sum of its own for every block: one chain over all keys would round too often
  F acc[TILE_ROWS][VECS] = {};
  for (int64_t k = 0; k < depth; ++k, b += PANEL) {
    F column[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) column[j] = load(b + j * W);
#pragma GCC unroll 8
    for (int r = 0; r < TILE_ROWS; ++r) {
      const F x = set1(a[r * stride_a + k]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) acc[r][j] = fma(column[j], x, acc[r][j]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < TILE_ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      float* to = c + r * stride_c + j * W;
      store(to, ACCUMULATE ? fma(load(to), set1(scale[r]), acc[r][j]) : acc[r][j] * set1(scale[0]));
    }
}

template <bool ACCUMULATE>
PAGED_ATTN_INLINE void multiply(int vecs, const float* a, int64_t stride_a, const float* b,
                                float* c, int64_t stride_c, int64_t depth, const float* scale) {
  if constexpr (TILE_VECS == 4) {
    if (vecs == 4) return multiply_tile<4, ACCUMULATE>(a, stride_a, b, c, stride_c, depth, scale);
    if (vecs == 3) return multiply_tile<3, ACCUMULATE>(a, stride_a, b, c, stride_c, depth, scale);
  }
  switch (vecs) {
    case 2: return multiply_tile<2, ACCUMULATE>(a, stride_a, b, c, stride_c, depth, scale);
    default: return multiply_tile<1, ACCUMULATE>(a, stride_a, b, c, stride_c, depth, scale);
  }
}

// (column / PANEL, head_dim, column % PANEL)
template <class T>
inline void pack_keys(const T* k, const KeyBlock& block, int64_t head_dim, float* packed) {
  for (int c = 0; c < block.num_columns; c += W) {
    float* panel = packed + c / PANEL * head_dim * PANEL + c % PANEL;
    for (int64_t d = 0; d < head_dim; d += W) {
      const int n = int(min64(W, head_dim - d));
      F rows[W];
      if (n == W) {
        for (int i = 0; i < W; ++i) rows[i] = load(k + block.k_offset[c + i] + d);
      } else {
        for (int i = 0; i < W; ++i) rows[i] = load(k + block.k_offset[c + i] + d, n);
      }
      transpose(rows);
      for (int i = 0; i < n; ++i) store(panel + (d + i) * PANEL, rows[i]);
    }
  }
}

// (head_dim_v / PANEL, column, head_dim_v % PANEL)
template <class T>
inline void pack_values(const T* v, const KeyBlock& block, int64_t head_dim, float* packed) {
  for (int c = 0; c < block.num_columns; ++c) {
    const T* row = v + block.v_offset[c];
    for (int64_t d = 0; d < head_dim; d += W) {
      const int64_t n = head_dim - d;
      float* to = packed + (d / PANEL * MAX_COLUMNS + c) * PANEL + d % PANEL;
      store(to, n >= W ? load(row + d) : load(row + d, int(n)));
    }
  }
}

struct TileWorkspace {
  int64_t rows, stride_q, stride_acc;
  float *q, *acc, *m, *l, *keys, *values, *scores;
  int64_t floats;
};

PAGED_ATTN_INLINE TileWorkspace tile_workspace(const Attention& a, int64_t rows, float* memory) {
  TileWorkspace w;
  w.floats = 0;
  const auto take = [&](int64_t floats) __attribute__((always_inline)) {
    float* p = memory ? memory + w.floats : nullptr;
    w.floats += round_up(floats, 16);
    return p;
  };
  w.rows = round_up(rows, TILE_ROWS);
  w.stride_q = round_up(a.head_dim, W);
  w.stride_acc = round_up(a.head_dim_v, W);
  w.q = take(w.rows * w.stride_q);
  w.acc = take(w.rows * w.stride_acc);
  w.m = take(w.rows);
  w.l = take(w.rows);
  w.keys = take(a.head_dim * MAX_COLUMNS);
  w.values = take(round_up(a.head_dim_v, PANEL) * MAX_COLUMNS);
  w.scores = take(TILE_ROWS * MAX_COLUMNS);
  return w;
}

// Columns of a block that rows with this range can see, in whole vectors.
PAGED_ATTN_INLINE void visible_columns(const KeyBlock& block, KeyRange range, int* begin,
                                       int* end) {
  *begin = 0, *end = block.num_columns;
  if (range.end == 0) {
    *end = 0;
  } else if (block.num_segments == 1) {
    const int64_t key = block.segments[0].key;
    *begin = int(max64(0, range.begin - key) / ALIGN * ALIGN);
    *end = int(min64(*end, round_up(max64(0, range.end - key), ALIGN)));
  }
}

// Attention of all rows of a tile to one packed block.
inline void attend_block(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                         const KeyBlock& block, const TileWorkspace& w) {
  const float scale = logit_scale(a, s, int64_t(task.group_begin) * a.num_kv_heads / a.num_groups);
  const int64_t rows = (task.token_end - task.token_begin) * a.group_size;
  for (int64_t r0 = 0; r0 < rows; r0 += TILE_ROWS) {
    const int64_t last = min64(r0 + TILE_ROWS, rows) - 1;
    const KeyRange range = visible_keys(a, s, task.token_begin + r0 / a.group_size,
                                        task.token_begin + last / a.group_size);
    int begin, end;
    visible_columns(block, range, &begin, &end);
    if (begin >= end) continue;

    for (int c = begin, n; c < end; c += n) {
      n = int(min64(PANEL - c % PANEL, end - c));
      const float* panel = w.keys + c / PANEL * a.head_dim * PANEL + c % PANEL;
      multiply<false>(n / W, w.q + r0 * w.stride_q, w.stride_q, panel, w.scores + c, MAX_COLUMNS,
                      a.head_dim, &scale);
    }
    float rescale[TILE_ROWS] = {};
    for (int64_t r = r0; r <= last; ++r) {
      const ScoreRow row = score_row(a, s, task.token_begin + r / a.group_size,
                                     task.group_begin * a.group_size + r % a.group_size);
      rescale[r - r0] = softmax_row(a, s, row, block, begin, end, w.scores + (r - r0) * MAX_COLUMNS,
                                    w.m[r], w.l[r]);
    }
    for (int64_t d = 0; d < a.head_dim_v; d += PANEL) {
      const int64_t n = min64(PANEL, w.stride_acc - d);
      multiply<true>(int(n / W), w.scores + begin, MAX_COLUMNS,
                     w.values + d * MAX_COLUMNS + begin * PANEL, w.acc + r0 * w.stride_acc + d,
                     w.stride_acc, end - begin, rescale);
    }
  }
}

inline void attend_tile(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                        float* memory) {
  const int64_t tokens = task.token_end - task.token_begin, rows = tokens * a.group_size;
  const int64_t kv_head = int64_t(task.group_begin) * a.num_kv_heads / a.num_groups;
  const TileWorkspace w = tile_workspace(a, rows, memory);
  load_queries(a, s, task, task.group_begin, w.q, w.stride_q);
  // rows that only fill the last register tile see zeros
  memset(w.q + rows * w.stride_q, 0, (w.rows - rows) * w.stride_q * sizeof(float));
  memset(w.acc, 0, w.rows * w.stride_acc * sizeof(float));
  for (int64_t r = 0; r < w.rows; ++r) w.m[r] = -INFINITY, w.l[r] = 0;

  KeyBlock block;
  KeyWalk walk = walk_keys(a, s, task, MAX_COLUMNS);
  while (next_block(walk, block)) {
    if (a.bias && !borrow_hidden_values(a, s, task, block)) continue;
    with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      pack_keys((const T*)a.k.data + kv_head * a.k.stride_head, block, a.head_dim, w.keys);
      pack_values((const T*)a.v.data + kv_head * a.v.stride_head, block, a.head_dim_v, w.values);
    });
    attend_block(a, s, task, block, w);
  }
  for (int64_t r = 0; r < rows; ++r)
    finish(a, s, task, task.group_begin, r, w.acc + r * w.stride_acc, w.m[r], w.l[r]);
}

}  // namespace
