// The probability mass of each unit that a token's list names, summed over the heads of the list.
#pragma once

#include "../core/matrix.h"
#include "../core/packing.h"
#include "../core/query_rows.h"
#include "../core/selected_mass.h"
#include "../core/workspace.h"

namespace {

using paged_attn::SelectedMass;

struct MassWorkspace : Workspace {
  using Workspace::Workspace;

  int64_t rows, stride_q;
  float *q, *keys, *scores;
};

template <class Product>
PAGED_ATTN_INLINE MassWorkspace mass_workspace(const Attention& a, float* memory) {
  MassWorkspace w(memory);
  w.rows = round_up(a.group_size, Product::ROWS);
  w.stride_q = round_up(key_depth<Product>(a), W);
  w.q = w.take(w.rows * w.stride_q);
  w.keys = w.take(key_depth<Product>(a) * MAX_COLUMNS);
  w.scores = w.take(Product::ROWS * MAX_COLUMNS);
  return w;
}

// Adds the probabilities of a group's rows to `sums`, a number for each column of a block of packed
// keys. `s` has the listed keys as its own.
template <class Product>
inline void add_probabilities(const SelectedMass& m, const Sequence& s,
                              const paged_attn::Task& task, const KeyBlock& block,
                              const MassWorkspace& w, float* sums) {
  constexpr int ROWS = Product::ROWS, PANEL = Product::PANEL;
  const Attention& a = m.forward;
  const float scale = logit_scale(a, s, kv_head_of(a, task.group_begin));
  const int64_t depth = key_depth<Product>(a);
  const int end = block.num_columns;
  float all[ROWS];
  for (float& x : all) x = 1.f;
  for (int64_t r0 = 0; r0 < a.group_size; r0 += ROWS) {
    for (int c = 0, n; c < end; c += n) {
      n = int(min64(PANEL, end - c));
      const float* keep = nullptr;
      for (int64_t d = 0; d < depth; d += MAX_CHAIN, keep = all)
        multiply<Product>(n / W, w.q + r0 * w.stride_q + d, w.stride_q,
                          w.keys + c * depth + d * PANEL, w.scores + c, MAX_COLUMNS,
                          min64(MAX_CHAIN, depth - d), scale, keep);
    }
    for (int64_t r = r0; r < min64(r0 + ROWS, a.group_size); ++r) {
      const ScoreRow row = row_of(a, s, task, task.group_begin, r);
      const float lse = m.lse(row.head, s.q_start + row.token);
      if (lse == -INFINITY) continue;
      float* scores = w.scores + (r - r0) * MAX_COLUMNS;
      finish_row(a, row, block, 0, end, scores);
      // the lse is rounded once, in the difference
      for (int c = 0; c < end; c += W) {
        const F x = fma(set1(-lse), set1(LOG2_E), load(scores + c));
        store(sums + c, load(sums + c) + exp2(x));
      }
    }
  }
}

template <class Product>
inline void mass_of_list(const SelectedMass& m, int64_t sequence, int64_t token, int64_t list,
                         float* memory) {
  const Attention& a = m.forward;
  const paged_attn::Selection& x = a.selection;
  const MassWorkspace w = mass_workspace<Product>(a, memory);
  Sequence s = sequence_at(a, sequence);
  const int64_t row = s.q_start + token;
  float* mass = m.mass + (row * x.num_lists + list) * x.num_entries;
  const ListedKeys names = listed_keys(a, s, token, list, 0, list_length(a, row, list));
  s.k_len = count_keys(names);
  if (s.k_len == 0) return;
  memset(w.q, 0, w.rows * w.stride_q * sizeof(float));
  const int64_t groups = a.num_groups / x.num_lists;
  for (int64_t group = list * groups; group < (list + 1) * groups; ++group) {
    paged_attn::Task task = {};
    task.token_begin = int32_t(token);
    task.token_end = int32_t(token + 1);
    task.group_begin = int32_t(group);
    task.group_end = int32_t(group + 1);
    load_queries<Product>(a, s, task, group, w.q, w.stride_q);
    KeyWalk walk = walk_listed(a, s, names, MAX_COLUMNS);
    ListedKeys column = names;
    for (KeyBlock block; next_listed_block(walk, block);) {
      with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
        typedef typename decltype(tag)::type T;
        if constexpr (Product::template accepts<T>)
          pack_keys<Product>((const T*)a.k.data + kv_head_of(a, group) * a.k.stride_head,
                             block.k_offset, block.num_columns, a.head_dim, key_depth<Product>(a),
                             w.keys);
      });
      float sums[MAX_COLUMNS] = {};
      add_probabilities<Product>(m, s, task, block, w, sums);
      const int64_t count = walk.part - block.segments[0].key;
      for (int64_t c = 0; c < count; ++c, ++column.keys.begin) {
        if (column.keys.begin >= column.keys.end && !next_unit(column)) return;
        mass[column.entry - 1] += sums[c];
      }
    }
  }
}

}  // namespace
