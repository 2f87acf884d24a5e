// Gradients through lists of selected keys.
//
// A task is some query tokens of a KV head, for dQ, or some rows of packed keys under a KV head,
// for dK and dV. Both compute S and dP, so that no task waits for another. As in the forward, the
// keys that a token's list names are gathered and count as a sequence of their own. The gradient of
// a key is the sum over tokens in their order, so that no bit depends on how tasks divide the keys.
#pragma once

#include "attention_backward.h"

namespace {

PAGED_ATTN_INLINE int64_t list_sums(const Backward& b, const BackwardWorkspace& w) {
  return max64(w.rows * w.stride_dk, b.listed_rows * (w.stride_dk + w.stride_dv));
}

template <class Product>
class BackwardOfLists : BackwardOfTask<Product> {
  typedef BackwardOfTask<Product> Base;
  using Base::a, Base::b, Base::keys, Base::rows, Base::rows_across, Base::rows_along, Base::task,
      Base::w;

 public:
  PAGED_ATTN_INLINE BackwardOfLists(const Backward& backward, const BackwardTask& backward_task,
                                    float* memory)
      : Base(backward, backward_task, listed, memory),
        of_queries(backward_task.rows_begin == backward_task.rows_end),
        dq(memory + w.floats()),
        dk(dq),
        dv(dk + backward.listed_rows * w.stride_dk) {}

  inline void run() {
    rows = a.group_size;
    if (of_queries) return run_tokens(task.sequence, task.token_begin, task.token_end);
    const int64_t count = task.rows_end - task.rows_begin;
    memset(dk, 0, count * w.stride_dk * sizeof(float));
    memset(dv, 0, count * w.stride_dv * sizeof(float));
    for (int64_t i = 0; i < a.batch; ++i) run_tokens(i, 0, sequence_at(a, i).q_len);
    this->with_dtype([&](auto type) __attribute__((always_inline)) {
      typedef decltype(type) T;
      for (int64_t i = 0; i < count; ++i) {
        const int64_t row = (task.rows_begin + i) * a.num_kv_heads + task.kv_head;
        if (b.dk)
          Base::write_row(dk + i * w.stride_dk, float(a.softmax_scale), a.head_dim,
                          (T*)b.dk + row * a.head_dim);
        if (b.dv)
          Base::write_row(dv + i * w.stride_dv, 1.f, a.head_dim_v, (T*)b.dv + row * a.head_dim_v);
      }
    });
  }

 private:
  Sequence listed;  // with a token's listed keys as its own; what the base class works on
  const bool of_queries;
  float *dq, *dk, *dv;  // sums

  inline void run_tokens(int64_t sequence, int64_t begin, int64_t end) {
    const Sequence s = sequence_at(a, sequence);
    KeyRange within = {0, s.k_len};
    if (!of_queries)
      within = {max64(task.rows_begin - s.k_start, 0), min64(task.rows_end - s.k_start, s.k_len)};
    if (within.begin < within.end || of_queries)
      for (int64_t token = begin; token < end; ++token) run_token(s, token, within);
  }

  // One token, with those of its keys that are `within` a range.
  inline void run_token(const Sequence& s, int64_t token, KeyRange within) {
    const int64_t list = list_of(a, task.kv_head), length = list_length(a, s.q_start + token, list);
    ListedKeys names = listed_keys(a, s, token, list, 0, length);
    names.visible.begin = max64(names.visible.begin, within.begin);
    names.visible.end = min64(names.visible.end, within.end);
    listed = s;
    listed.k_len = count_keys(names);
    QueryTile tile = {};
    tile.token_begin = int32_t(token);
    tile.token_end = int32_t(token + 1);
    const bool any = listed.k_len > 0 && this->load_tile(tile, task.kv_head);
    if (any) {
      KeyWalk walk = walk_listed(a, listed, names, KEY_TILE);
      for (bool first = true; next_listed_block(walk, keys.block); first = false) {
        const int64_t count = walk.part - keys.block.segments[0].key;
        multiply_block(tile);
        if (of_queries)
          add_to_queries(first);
        else
          add_to_sums_of_keys(s, names, count);
      }
    }
    if (of_queries) this->write_queries(tile, task.kv_head, any ? dq : nullptr);
  }

  // P and dX of a block of keys.
  inline void multiply_block(const QueryTile& tile) {
    KeyBlock& block = keys.block;
    const int end = int(round_up(block.num_columns, RUN_STEP<Product>));
    for (int c = block.num_columns; c < end; ++c) {
      block.k_offset[c] = block.k_offset[c - 1];
      block.v_offset[c] = block.v_offset[c - 1];
    }
    keys.begin = 0;
    keys.end = end;
    keys.runs[0] = {0, end, uint32_t((uint64_t(1) << block.num_columns / ALIGN) - 1)};
    keys.num_runs = 1;
    this->pack_keys_and_values();
    this->multiply_rows(nullptr, task.kv_head);
    this->finish_rows(tile, task.kv_head);
    for (int64_t r = rows; r < max64(rows_across, rows_along); ++r) {
      memset(w.scores + r * KEY_TILE, 0, KEY_TILE * sizeof(float));
      memset(w.gradients + r * KEY_TILE, 0, KEY_TILE * sizeof(float));
    }
  }

  inline void add_to_queries(bool first) {
    Matrix<Product>::multiply(w.gradients, KEY_TILE, rows_across, w.keys_across,
                              KEY_TILE / Product::DEPTH * Product::PANEL, 0, w.stride_dk, dq,
                              w.stride_dk, keys.runs[0].end / Product::DEPTH, !first);
  }

  // Adds a block's part of dK and dV to the sums of its keys, which `names` goes through.
  inline void add_to_sums_of_keys(const Sequence& s, ListedKeys& names, int64_t count) {
    const int64_t columns = keys.runs[0].end + ROWS_AFTER;
    memset(w.dk, 0, columns * w.stride_dk * sizeof(float));
    memset(w.dv, 0, columns * w.stride_dv * sizeof(float));
    this->add_to_keys(nullptr);
    for (int64_t c = 0; c < count; ++c) {
      if (names.keys.begin >= names.keys.end && !next_unit(names)) return;
      const int64_t row = s.k_start + names.keys.begin++ - task.rows_begin;
      add(w.dk + c * w.stride_dk, w.stride_dk, dk + row * w.stride_dk);
      add(w.dv + c * w.stride_dv, w.stride_dv, dv + row * w.stride_dv);
    }
  }
  static PAGED_ATTN_INLINE void add(const float* from, int64_t floats, float* to) {
    for (int64_t i = 0; i < floats; i += W) store(to + i, load(to + i) + load(from + i));
  }
};

template <class Product>
inline int64_t floats_of_backward_task(const Backward& b) {
  const BackwardWorkspace w = backward_workspace<Product>(b, b.tile_rows, nullptr);
  return w.floats() + (b.forward.selection.enabled ? list_sums(b, w) : 0);
}

template <class Product>
PAGED_ATTN_INLINE void run_backward_task(const Backward& b, const BackwardTask& task,
                                         float* memory) {
  if (b.forward.selection.enabled) {
    // a task computes one kind of gradients
    const bool of_queries = task.rows_begin == task.rows_end;
    Backward part = b;
    if (of_queries)
      part.dk = part.dv = nullptr;
    else
      part.dq = nullptr;
    BackwardOfLists<Product>(part, task, memory).run();
    return;
  }
  const Sequence s = sequence_at(b.forward, task.sequence);
  BackwardOfTask<Product>(b, task, s, memory).run();
}

}  // namespace
