// The attention kernels as the rest of the library calls them.
#pragma once

#include "backward_of_lists.h"
#include "decode.h"
#include "decode_latents.h"
#include "prefill.h"
#include "select_keys.h"
#include "selected_mass.h"

namespace {

// Calls f with the product that serves queries and keys of these dtypes.
template <class Function>
PAGED_ATTN_INLINE auto with_product(paged_attn::DType q, paged_attn::DType kv, Function f) {
#if defined(PAGED_ATTN_PAIR_PRODUCT)
  if (paged_attn::multiply_as_pairs(q, kv)) return f(PairProduct());
#endif
  return f(FloatProduct());
}
template <class Function>
PAGED_ATTN_INLINE auto with_product(const Attention& a, Function f) {
  return with_product(a.q_dtype, a.kv_dtype, f);
}

#if defined(PAGED_ATTN_FIXED_PRODUCT)

// Whether few rows are multiplied in fixed point. Not with dropout, which rounds probabilities in
// another place, and not if results have to be those of tiles, which add up in another order.
PAGED_ATTN_INLINE bool suits_fixed(const Attention& a) {
  const bool is_integer =
      a.kv_dtype == paged_attn::DType::int8 || a.kv_dtype == paged_attn::DType::int4;
  return is_integer && !a.dropout.enabled && !a.batch_invariant &&
         a.head_dim <= FixedProduct::MOST_DIMS &&
         paged_attn::multiply_as_pairs(a.q_dtype, a.kv_dtype);
}

// A group whose queries do not fit fixed point is done in floating point, each group alone: no
// result may depend on which groups share a task.
template <class Product>
void attend_rows_in_fixed_point(const Attention& a, const Sequence& s, paged_attn::Task task,
                                float* workspace) {
  if (decode<Product>(a, s, task, workspace)) return;
  const int32_t end = task.group_end;
  const int64_t rows = rows_of(a, task);
  const bool alone = end - task.group_begin == 1;
  for (; task.group_begin < end; ++task.group_begin) {
    task.group_end = task.group_begin + 1;
    if (alone || !decode<Product>(a, s, task, workspace))
      decode<typename Product::Otherwise>(a, s, task, workspace);
    if (task.partial >= 0) task.partial += rows * partial_row_floats(a);
  }
}

#endif

// The more rows a tile has, the more of them a packed block of keys serves: as many as leave a
// second-level cache of 1 MiB room for the keys.
paged_attn::RowLimits row_limits(const Attention& a) {
  return {few_rows(a), rows_in_cache(a, 512)};
}

int64_t workspace_floats(const Attention& a, int64_t few_rows, int64_t groups, int64_t tile_rows) {
  const int64_t latent =
      a.latent && few_rows ? latent_rows_workspace(a, few_rows, nullptr).floats() : 0;
  return with_product(a, [&](auto product) __attribute__((always_inline)) {
    typedef decltype(product) Product;
    int64_t few = few_rows ? rows_workspace<Product>(a, few_rows, groups, nullptr).floats() : 0;
#if defined(PAGED_ATTN_FIXED_PRODUCT)
    const auto need = [&](auto fixed) __attribute__((always_inline)) {
      if (few_rows)
        few = max64(few, rows_workspace<decltype(fixed)>(a, few_rows, groups, nullptr).floats());
    };
    need(FixedProduct());
    need(NibbleProduct());
#endif
    const int64_t tile = tile_rows ? tile_workspace<Product>(a, tile_rows, nullptr).floats() : 0;
    return max64(max64(few, latent), tile);
  });
}

void attend(const Attention& a, const paged_attn::Task& task, float* workspace) {
  const Sequence s = sequence_of(a, task);
  if (task.few_rows && a.latent) return decode_latents(a, s, task, workspace);
#if defined(PAGED_ATTN_FIXED_PRODUCT)
  if (task.few_rows && suits_fixed(a)) {
    if (a.kv_dtype == paged_attn::DType::int4)
      return attend_rows_in_fixed_point<NibbleProduct>(a, s, task, workspace);
    return attend_rows_in_fixed_point<FixedProduct>(a, s, task, workspace);
  }
#endif
  with_product(a, [&](auto product) __attribute__((always_inline)) {
    typedef decltype(product) Product;
    if (task.few_rows)
      decode<Product>(a, s, task, workspace);
    else
      prefill_tile<Product>(a, s, task, workspace);
  });
}

// Adds up the splits of a sequence in their order, row by row.
void merge_splits(const Attention& a, const paged_attn::MergeTask& task, float* acc) {
  const Sequence s = sequence_at(a, task.sequence);
  const int64_t heads = (task.group_end - task.group_begin) * a.group_size;
  const int64_t rows = (task.token_end - task.token_begin) * heads;
  const int64_t floats = partial_row_floats(a), width = round_up(a.head_dim_v, W);
  const int64_t group_rows = rows_of(a, task);
  for (int64_t r = 0; r < rows; ++r) {
    const float* part = a.partials + task.partial + r * floats;
    float m = -INFINITY, l = 0;
    for (int i = 0; i < task.num_splits; ++i) {
      const float part_m = part[i * task.partial_stride + floats - 2];
      m = part_m > m ? part_m : m;
    }
    memset(acc, 0, width * sizeof(float));
    for (int i = 0; i < task.num_splits; ++i) {
      const float* from = part + i * task.partial_stride;
      const float part_l = from[floats - 1];
      if (part_l == 0) continue;
      const float weight = exp2(from[floats - 2] - m);
      l += part_l * weight;
      for (int64_t d = 0; d < a.head_dim_v; d += W)
        store(acc + d, fma(load(from + d), set1(weight), load(acc + d)));
    }
    const int64_t group = task.group_begin + r / group_rows, in_group = r % group_rows;
    write_row(a, s, token_of(a, task, in_group), head_of(a, group, in_group), acc, m, l);
  }
}

int64_t backward_floats(const Backward& b) {
  return with_product(b.forward, [&](auto product) __attribute__((always_inline)) {
    return floats_of_backward_task<decltype(product)>(b);
  });
}

void attend_backward(const Backward& b, const BackwardTask& task, float* memory) {
  with_product(b.forward, [&](auto product) __attribute__((always_inline)) {
    run_backward_task<decltype(product)>(b, task, memory);
  });
}

int64_t mass_floats(const SelectedMass& m) {
  return with_product(m.forward, [&](auto product) __attribute__((always_inline)) {
    return mass_workspace<decltype(product)>(m.forward, nullptr).floats();
  });
}

void selected_mass(const SelectedMass& m, int64_t sequence, int64_t token, int64_t list,
                   float* memory) {
  with_product(m.forward, [&](auto product) __attribute__((always_inline)) {
    mass_of_list<decltype(product)>(m, sequence, token, list, memory);
  });
}

int64_t select_floats(const SelectKeys& x, int64_t tokens) {
  return with_product(x.forward, [&](auto product) __attribute__((always_inline)) {
    return select_workspace<decltype(product)>(x.forward, tokens, nullptr).floats();
  });
}

void score_units(const SelectKeys& x, const SelectTask& task, int64_t count, float* units,
                 float* memory) {
  with_product(x.forward, [&](auto product) __attribute__((always_inline)) {
    score_units_of<decltype(product)>(x, task, count, units, memory);
  });
}

// Multiplies bfloat16 numbers from a first-level cache, as tiles do; dispatch.cpp times it.
void multiply_sample(const float* left, const float* right, float* result) {
  constexpr auto BFLOAT16 = paged_attn::DType::bfloat16;
  with_product(BFLOAT16, BFLOAT16, [&](auto product) __attribute__((always_inline)) {
    typedef decltype(product) Product;
    constexpr int DEPTH = paged_attn::SAMPLE_DIMS / Product::DEPTH;
    multiply<Product>(TILE_VECS, left, DEPTH, right, result, Product::PANEL, DEPTH, 1.f, nullptr);
  });
}

}  // namespace
