// Gradients of q, k and v: a task is a key tile of one KV head with all queries that see it.
//
// Keys and values are packed once. For each tile of queries, S = Q K^T and dP = dO V^T are
// computed; their rows become P and dX (backward_rows.h), rounded to operands. Then dV += P^T dO
// and dK += dX^T Q are added up by the task alone, and dQ += dX K in memory, after the key tiles
// before this one have added theirs (core/backward_plan.h). These are five products.
#pragma once

#include <sched.h>

#include "../core/matrix.h"
#include "../core/packing.h"
#include "../core/query_rows.h"
#include "backward_rows.h"
#include "backward_tiles.h"
#include "backward_workspace.h"

namespace {

// Operands of rows, along columns: from (row, column) to (column, row). Rows are whole blocks.
template <class Product>
inline void transpose_run(const float* from, int64_t rows, const Columns& run, float* to,
                          int64_t stride_to) {
  constexpr int DEPTH = Product::DEPTH;
  for (int c = run.begin; c < run.end; c += W * DEPTH)
    for (int64_t r = 0; r < rows; r += W * DEPTH) {
      F block[DEPTH][W];
      for (int i = 0; i < W; ++i) {
        F x[DEPTH];
        for (int j = 0; j < DEPTH; ++j)
          x[j] = load(from + (r + i * DEPTH + j) * KEY_TILE + c / DEPTH);
        Product::interleave(x);
        for (int j = 0; j < DEPTH; ++j) block[j][i] = x[j];
      }
      for (int j = 0; j < DEPTH; ++j) {
        transpose(block[j]);
        for (int i = 0; i < W; ++i)
          store(to + (c + j * W + i) * stride_to + r / DEPTH, block[j][i]);
      }
    }
  // the last register tile may reach beyond the run
  const int64_t end = run.begin + round_up(run.end - run.begin, W * DEPTH);
  const int64_t last = run.begin + round_up(run.end - run.begin, Matrix<Product>::ROW_STEP);
  if (last > end) memset(to + end * stride_to, 0, (last - end) * stride_to * sizeof(float));
}

template <class Product>
class BackwardOfTask {
 public:
  PAGED_ATTN_INLINE BackwardOfTask(const Backward& backward, const BackwardTask& backward_task,
                                   const Sequence& sequence, float* memory)
      : b(backward),
        a(backward.forward),
        task(backward_task),
        s(sequence),
        x(backward.sequences[backward_task.sequence]),
        w(backward_workspace<Product>(backward, backward.tile_rows, memory)) {}

  inline void run() {
    if (b.dbias_sums && task.done_before >= 0) wait(b.done + task.done_before, 1);
    keys.begin = int64_t(task.key_tile) * KEY_TILE;
    keys.end = min64(keys.begin + KEY_TILE, s.k_len);
    keys.block.num_columns = KEY_TILE;
    const bool any = find_keys<Product>(b, s, task, keys);
    memset(w.dk, 0, w.stride_dk * KEY_TILE * sizeof(float));
    memset(w.dv, 0, w.stride_dv * KEY_TILE * sizeof(float));
    if (any) pack_keys_and_values();
    for_each_tile(
        b, s, task,
        [&](int64_t group, int64_t i, uint32_t granules, int64_t rank, int64_t count)
            __attribute__((always_inline)) { attend_tile(group, i, granules, rank, count, any); });
    write_keys();
    if (task.key_tile == 0) zero_blind_queries();
    if (b.dbias_sums) __atomic_store_n(b.done + task.done, 1, __ATOMIC_RELEASE);
  }

 protected:
  const Backward& b;
  const Attention& a;
  const BackwardTask& task;
  const Sequence& s;
  const BackwardSequence& x;
  const BackwardWorkspace w;
  KeyTile keys;
  // rows of the present query tile, and these rounded up to whole steps of products across rows and
  // along rows
  int64_t rows, rows_across, rows_along;

  // Waits until *p is `value`. Another thread is at work on it: tasks are taken in their order.
  static PAGED_ATTN_APART void wait(const int32_t* p, int32_t value) {
    for (int i = 0; __atomic_load_n(p, __ATOMIC_ACQUIRE) != value; ++i)
      if (i >= 1024) sched_yield();
  }

  template <class Function>
  PAGED_ATTN_INLINE void with_dtype(Function f) const {
    with_type(a.q_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      if constexpr (Product::template accepts<T>) f(T());
    });
  }

  inline void pack_keys_and_values() {
    with_dtype([&](auto type) __attribute__((always_inline)) {
      typedef decltype(type) T;
      const T* k = (const T*)a.k.data + task.kv_head * a.k.stride_head;
      const T* v = (const T*)a.v.data + task.kv_head * a.v.stride_head;
      const KeyBlock& block = keys.block;
      const int count = int(round_up(keys.end - keys.begin, RUN_STEP<Product>));
      pack_keys<Product>(k, block.k_offset, count, a.head_dim, w.depth_q, w.keys);
      pack_keys<Product>(v, block.v_offset, count, a.head_dim_v, w.depth_o, w.values);
      if (b.dq) pack_values<Product>(k, block.k_offset, count, a.head_dim, KEY_TILE, w.keys_across);
    });
  }

  // Loads the rows of a tile as operands. In place of a row that sees no key, one that sees some is
  // loaded: its probabilities are 0, but its own numbers may be NaN. False if no row sees any.
  inline bool load_tile(const QueryTile& tile, int64_t group) {
    rows_across = round_up(rows, Matrix<Product>::ROW_STEP);
    rows_along = round_up(rows, W * Product::DEPTH);
    const int64_t all_rows = max64(rows_across, rows_along);
    int64_t donor = -1;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t token = s.q_start + tile.token_begin + r / a.group_size;
      const int64_t head = group * a.group_size + r % a.group_size;
      w.lse_2[r] = b.lse_2[head * a.total_q + token];
      w.delta[r] = b.delta[head * a.total_q + token];
      w.q_offset[r] = token * a.q_stride_token + head * a.q_stride_head;
      w.o_offset[r] = token * b.dout_stride_token + head * b.dout_stride_head;
      if (donor < 0 && w.lse_2[r] != INFINITY) donor = r;
    }
    if (donor < 0) return false;
    for (int64_t r = 0; r < all_rows; ++r) {
      if (r < rows && w.lse_2[r] != INFINITY) continue;
      w.lse_2[r] = INFINITY;
      w.delta[r] = 0;
      w.q_offset[r] = w.q_offset[donor];
      w.o_offset[r] = w.o_offset[donor];
    }
    with_dtype([&](auto type) __attribute__((always_inline)) {
      typedef decltype(type) T;
      const T *q = (const T*)a.q, *o = (const T*)b.dout;
      for (int64_t r = 0; r < rows_across; ++r) {
        load_row<Product>(q + w.q_offset[r], a.head_dim, w.q + r * w.stride_q);
        load_row<Product>(o + w.o_offset[r], a.head_dim_v, w.o + r * w.stride_o);
      }
      const int n = int(rows_along);
      if (b.dk) pack_values<Product>(q, w.q_offset, n, a.head_dim, w.rows, w.q_across);
      if (b.dv) pack_values<Product>(o, w.o_offset, n, a.head_dim_v, w.rows, w.o_across);
    });
    return true;
  }

  inline void attend_tile(int64_t group, int64_t i, uint32_t granules, int64_t rank, int64_t count,
                          bool any) {
    const QueryTile& tile = b.tiles[x.tiles + i];
    float* sums = b.dq_sums + (x.sums + group * x.rows + tile.first_row) * w.stride_dk;
    rows = (tile.token_end - tile.token_begin) * a.group_size;
    any = any && see_columns<Product>(a, s, tile, granules, keys) && load_tile(tile, group);
    if (any) {
      multiply_rows(i > 0 ? &tile - 1 : nullptr, group);
      finish_rows(tile, group);
      for (int64_t r = rows; r < max64(rows_across, rows_along); ++r) {
        memset(w.scores + r * KEY_TILE, 0, KEY_TILE * sizeof(float));
        memset(w.gradients + r * KEY_TILE, 0, KEY_TILE * sizeof(float));
      }
      add_to_keys(sums);
    }
    if (!b.dq) return;
    int32_t* turn = b.turns + x.turns + group * x.num_tiles + i;
    if (rank > 0) wait(turn, int32_t(rank));
    if (any) {
      for (int j = 0; j < keys.num_runs; ++j) {
        const Columns& run = keys.runs[j];
        const float* columns = w.keys_across + run.begin / Product::DEPTH * Product::PANEL;
        Matrix<Product>::multiply(w.gradients + run.begin / Product::DEPTH, KEY_TILE, rows_across,
                                  columns, KEY_TILE / Product::DEPTH * Product::PANEL, 0,
                                  w.stride_dk, sums, w.stride_dk,
                                  (run.end - run.begin) / Product::DEPTH, rank > 0 || j > 0);
      }
    } else if (rank == 0) {
      memset(sums, 0, rows * w.stride_dk * sizeof(float));
    }
    if (rank + 1 == count) write_queries(tile, group, sums);
    __atomic_store_n(turn, int32_t(rank) + 1, __ATOMIC_RELEASE);
  }

  // A tile's rows of queries or of dout, which lie far apart.
  PAGED_ATTN_INLINE Fetch fetch_rows(const QueryTile* tile, int64_t group, const void* data,
                                     int64_t stride_token, int64_t stride_head,
                                     int64_t head_dim) const {
    Fetch fetch;
    if (tile == nullptr) return fetch;
    const int64_t bytes = bytes_of(a.q_dtype);
    const int64_t first = (s.q_start + tile->token_begin) * stride_token;
    fetch.at = (const char*)data + (first + group * a.group_size * stride_head) * bytes;
    fetch.row_bytes = head_dim * bytes;
    fetch.group = a.group_size;
    fetch.step = stride_head * bytes;
    fetch.jump = (stride_token - (a.group_size - 1) * stride_head) * bytes;
    fetch.rows = (tile->token_end - tile->token_begin) * a.group_size;
    return fetch;
  }

  // scores = Q K^T, gradients = dO V^T. Meanwhile the rows of the tile before this one, which is
  // computed next, are prefetched
  PAGED_ATTN_INLINE void multiply_rows(const QueryTile* next, int64_t group) {
    for (int j = 0; j < keys.num_runs; ++j) {
      const Columns& run = keys.runs[j];
      if (j > 0) next = nullptr;
      const Fetch q = fetch_rows(next, group, a.q, a.q_stride_token, a.q_stride_head, a.head_dim);
      const Fetch o =
          fetch_rows(next, group, b.dout, b.dout_stride_token, b.dout_stride_head, a.head_dim_v);
      Matrix<Product>::multiply(w.q, w.stride_q, rows_across, w.keys, w.depth_q * Product::PANEL,
                                run.begin, run.end, w.scores, KEY_TILE, w.depth_q, false, q);
      Matrix<Product>::multiply(w.o, w.stride_o, rows_across, w.values, w.depth_o * Product::PANEL,
                                run.begin, run.end, w.gradients, KEY_TILE, w.depth_o, false, o);
    }
  }

  // scores become P, gradients dX
  PAGED_ATTN_INLINE void finish_rows(const QueryTile& tile, int64_t group) {
    const float scale = logit_scale(a, s, task.kv_head);
    const bool plain = is_plain(a) && !a.dropout.enabled;
    for (int j = 0; j < keys.num_runs; ++j) {
      const Columns& run = keys.runs[j];
      const bool finished = plain && all_visible(a, s, tile.token_begin, tile.token_end - 1,
                                                 keys.block, run.begin, run.end);
      for (int64_t r = 0; r < rows; ++r) {
        float *scores = w.scores + r * KEY_TILE, *gradients = w.gradients + r * KEY_TILE;
        GradientRow g = {scale, w.lse_2[r], w.delta[r]};
        if (finished) {
          gradient_row<Product>(run, g, scores, gradients);
          continue;
        }
        const ScoreRow row = score_row(a, s, tile.token_begin + r / a.group_size,
                                       group * a.group_size + r % a.group_size);
        if (!plain) {
          gradient_row_of_logits<Product>(b, s, row, keys.block, run, g, scores, gradients);
          continue;
        }
        for (int c = run.begin; c < run.end; c += W)
          store(scores + c, load(scores + c) * set1(g.scale));
        finish_row(a, row, keys.block, run.begin, run.end, scores);
        g.scale = 1.f;
        gradient_row<Product>(run, g, scores, gradients);
      }
    }
  }

  // dV += P^T dO, dK += dX^T Q. Meanwhile the sums of dQ are prefetched
  PAGED_ATTN_INLINE void add_to_keys(const float* sums) {
    for (int j = 0; j < keys.num_runs; ++j) {
      const Columns& run = keys.runs[j];
      Fetch fetch;
      if (j == 0 && b.dq) {
        fetch.at = (const char*)sums;
        fetch.row_bytes = fetch.step = fetch.jump = w.stride_dk * sizeof(float);
        fetch.rows = rows;
      }
      if (b.dv) {
        transpose_run<Product>(w.scores, rows_along, run, w.scores_t, w.stride_t);
        add_to_sums(run, w.scores_t, w.o_across, w.dv, w.stride_dv, b.dk ? Fetch() : fetch);
      }
      if (b.dk) {
        transpose_run<Product>(w.gradients, rows_along, run, w.gradients_t, w.stride_t);
        add_to_sums(run, w.gradients_t, w.q_across, w.dk, w.stride_dk, fetch);
      }
    }
  }
  PAGED_ATTN_INLINE void add_to_sums(const Columns& run, const float* left, const float* right,
                                     float* sums, int64_t stride, const Fetch& fetch) {
    Matrix<Product>::multiply(left + run.begin * w.stride_t, w.stride_t, run.end - run.begin, right,
                              w.stride_t * Product::PANEL, 0, stride, sums + run.begin * stride,
                              stride, rows_along / Product::DEPTH, true, fetch);
  }

  template <class T>
  static PAGED_ATTN_INLINE void write_row(const float* from, float factor, int64_t head_dim,
                                          T* to) {
    for (int64_t d = 0; d < head_dim; d += W)
      store(to + d, load(from + d) * set1(factor), int(min64(W, head_dim - d)));
  }

  inline void write_queries(const QueryTile& tile, int64_t group, const float* sums) {
    const int64_t count = (tile.token_end - tile.token_begin) * a.group_size;
    with_dtype([&](auto type) __attribute__((always_inline)) {
      typedef decltype(type) T;
      for (int64_t r = 0; r < count; ++r) {
        const int64_t token = s.q_start + tile.token_begin + r / a.group_size;
        const int64_t head = group * a.group_size + r % a.group_size;
        T* to = (T*)b.dq + (token * a.num_heads + head) * a.head_dim;
        if (sums)
          write_row(sums + r * w.stride_dk, float(a.softmax_scale), a.head_dim, to);
        else
          memset(to, 0, a.head_dim * sizeof(T));
      }
    });
  }

  // Sets dQ of queries to zero to which no key tile adds.
  inline void zero_blind_queries() {
    if (!b.dq) return;
    const int64_t groups = a.num_groups / a.num_kv_heads;
    for (int64_t group = task.kv_head * groups; group < (task.kv_head + 1) * groups; ++group)
      for (int64_t i = 0; i < x.num_tiles; ++i) {
        const QueryTile& tile = b.tiles[x.tiles + i];
        bool is_blind;
        if (a.layout.crow) {
          const int64_t head = group * a.layout.num_heads / a.num_groups;
          is_blind = tile.row < 0 || tile.row >= x.num_rows ||
                     b.row_counts[x.row_counts + head * x.num_rows + tile.row] == 0;
        } else {
          is_blind = visible_keys(a, s, tile.token_begin, tile.token_end - 1).end == 0;
        }
        if (is_blind) write_queries(tile, group, nullptr);
      }
  }

  inline void write_keys() {
    const float factor_v = a.dropout.enabled ? a.dropout.keep_scale : 1.f;
    const int64_t first = b.part_rows ? b.part_rows[s.index] : s.k_start;
    const auto write = [&](auto type) __attribute__((always_inline)) {
      typedef decltype(type) T;
      for (int64_t key = keys.begin; key < keys.end; ++key) {
        const int64_t row = (first + key) * a.num_kv_heads + task.kv_head, c = key - keys.begin;
        if (b.dk)
          write_row(w.dk + c * w.stride_dk, float(a.softmax_scale), a.head_dim,
                    (T*)b.dk + row * a.head_dim);
        if (b.dv)
          write_row(w.dv + c * w.stride_dv, factor_v, a.head_dim_v, (T*)b.dv + row * a.head_dim_v);
      }
    };
    if (b.part_rows)
      write(float());
    else
      with_dtype(write);
  }
};

}  // namespace
