// Few query rows (decode): keys and values are read in place, once, in the order of memory.
//
// A task covers a range of keys for several head groups: a chunk of keys at a time for every head,
// so that a page is read whole in either layout.
#pragma once

#include "../core/cache_rows.h"
#include "../core/workspace.h"
#include "decode_invariant.h"
#include "decode_products.h"

namespace {

// Rows of a group, at most, for which keys are not packed. Beside latent queries they are floats
// then, which pairs multiply faster; and no sums have the order of tiles.
PAGED_ATTN_INLINE int64_t few_rows(const Attention& a) {
  if (!a.latent) return 16;
#if defined(PAGED_ATTN_PAIR_PRODUCT)
  return a.batch_invariant ? 0 : 4;
#else
  return a.batch_invariant ? 0 : 16;
#endif
}

struct RowsWorkspace : SoftmaxWorkspace {
  using SoftmaxWorkspace::SoftmaxWorkspace;

  float* scale;  // of a group's dot products
  // sums over a block, in fixed point or where sums have to be those of prefill.h; and there
  // transposed keys
  float *sums, *turned;
  // where sums are over a block alone, the factors by which its sums, and the earlier ones, become
  // relative to the new maximum
  float *weight, *rescale;
  // in fixed point: the scales of a row's lanes, what rounding took away from queries as integers
  // and its scales; what its logits lose of what they may for keys of scale 1, and whether it is
  // multiplied, too, in a block
  float *lane_scales, *low, *low_scales, *loss, *is_corrected;
  float* unpacked;  // rows of int4 as int8
};

template <class Product>
PAGED_ATTN_INLINE RowsWorkspace rows_workspace(const Attention& a, int64_t rows, int64_t groups,
                                               float* memory) {
  RowsWorkspace w(memory);
  w.rows = rows <= 2 ? rows : round_up(rows, 4);
  w.stride_q = padded<Product>(a.head_dim) / Product::DEPTH;
  w.stride_acc = padded<Product>(a.head_dim_v);
  w.take_rows(groups, w.rows * w.stride_acc, 1, groups * w.rows * ROW_COLUMNS);
  w.scale = w.take(groups);
  w.lane_scales = w.take(Product::FIXED ? groups * w.rows * W : 0);
  w.low = w.take(Product::FIXED ? groups * w.rows * w.stride_q : 0);
  w.low_scales = w.take(Product::FIXED ? groups * w.rows * W : 0);
  w.loss = w.take(groups);
  w.is_corrected = w.take(groups);
  w.weight = w.take(groups * w.rows);
  w.rescale = w.take(groups * w.rows);
  w.sums = w.take(Product::FIXED || a.batch_invariant ? groups * w.rows * w.stride_acc : 0);
  w.turned = w.take(a.batch_invariant ? w.stride_q * W : 0);
  const bool is_packed = a.kv_dtype == paged_attn::DType::int4 && Product::PACKED == 1;
  w.unpacked = w.take(is_packed ? UnpackedRows::floats(a, MOST_HEADS_IN_ORDER) : 0);
  return w;
}

// Columns of a chunk. Where a token's heads are contiguous, it is prefetched in another order
// than it is read in: so a chunk must stay in L1 until the last head has read its part.
template <class T>
PAGED_ATTN_INLINE int chunk_columns(const Attention& a, int heads, int fewest) {
  constexpr int64_t BYTES = 8192;  // of two chunks and everything else in 32 KiB
  int columns = ALIGN;
  if (a.k.stride_head >= a.k.stride_token) return columns;
  const int64_t dims = max64(a.head_dim, a.head_dim_v);
  const int64_t row = paged_attn::elements_of(a.kv_dtype, dims) * int64_t(sizeof(T));
  while (columns > fewest && columns * heads * row > BYTES) columns /= 2;
  return columns;
}

// Scores of all heads for a chunk of keys, with the same bits as tiles' scores.
template <class Product, class Rows, int ROWS>
PAGED_ATTN_APART void score_in_order(const Attention& a, const paged_attn::Task& task,
                                     const int64_t* offset, int column, int columns, Rows& rows,
                                     const RowsWorkspace& w) {
  typedef typename Rows::Element T;
  const int groups = task.group_end - task.group_begin;
  const auto some = [&](int g, auto heads) __attribute__((always_inline)) {
    constexpr int HEADS = decltype(heads)::value;
    const T* k[HEADS];
    for (int h = 0; h < HEADS; ++h)
      k[h] =
          rows.rows(a.k, kv_head_of(a, task.group_begin + g + h), offset, columns, a.head_dim, h);
    dot_keys_in_order<Product, HEADS, T, ROWS>(
        k, rows.offsets(offset), columns, rows.ahead, w.q + g * w.rows * w.stride_q, w.rows,
        a.head_dim, w.scale + g, w.scores + g * w.rows * ROW_COLUMNS + column, w.turned);
    return HEADS;
  };
  constexpr int HEADS = HEADS_IN_ORDER<Product, T, ROWS>;
  for (int g = 0; g < groups;)
    g += groups - g >= HEADS ? some(g, Count<HEADS>()) : some(g, Count<1>());
}

// The scores of a group's rows become probabilities. It reads no keys: one function for every type
// of them compiles in less time.
template <class Product, int ROWS>
PAGED_ATTN_APART void softmax_of_group(const Attention& a, const Sequence& s,
                                       const paged_attn::Task& task, const KeyBlock& block,
                                       const KeyBlock& next, int g, bool finished, bool apart,
                                       const RowsWorkspace& w) {
  const int64_t rows = rows_of(a, task);
  const int64_t group = task.group_begin + g;
  const int columns = block.num_columns;
  // those of its keys decide, when the next block begins, how it is multiplied
  fetch_column_scales(a, kv_head_of(a, group), next);
  ColumnScales scales;
  load_column_scales(a, kv_head_of(a, group), block, scales);
  if (scales.of_keys)
    scale_columns(w.scores + g * w.rows * ROW_COLUMNS, ROW_COLUMNS, int(w.rows), 0, columns,
                  scales.of_keys);
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    const auto row_at = [&](int r) __attribute__((always_inline)) {
      return row_of(a, s, task, group, r0 + r);
    };
    const int64_t i = g * w.rows + r0;
    float rescale[ROWS];
    softmax_rows<Product, ROWS>(a, s, block, 0, columns, finished, int(min64(ROWS, rows - r0)),
                                row_at, w.scores + i * ROW_COLUMNS, ROW_COLUMNS, w.m + i, w.l + i,
                                rescale, w.weight + i, scales.of_values);
    for (int r = 0; r < ROWS; ++r) {
      if (apart) w.rescale[i + r] = rescale[r];
      if (apart || rescale[r] == 1) continue;
      float* acc = w.acc + (i + r) * w.stride_acc;
      for (int64_t d = 0; d < w.stride_acc; d += W)
        store(acc + d, load(acc + d) * set1(rescale[r]));
    }
  }
}

// One block of keys for every group of the task.
template <class Product, class Rows, int ROWS>
inline void decode_block(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                         const KeyBlock& block, const KeyBlock& next, const RowsWorkspace& w) {
  typedef typename Rows::Element T;
  const int groups = task.group_end - task.group_begin;
  const int columns = block.num_columns;
  const auto head_of_group = [&](int g) __attribute__((always_inline)) {
    return kv_head_of(a, task.group_begin + g);
  };
  // a chunk of keys fills the lanes, or else the sums, of a dot product
  const bool invariant = !Product::FIXED && a.batch_invariant;
  const bool apart = Product::FIXED || invariant;
  const int step = chunk_columns<T>(a, groups, invariant ? W : DOTS / ROWS);
  // where a token's heads are contiguous, all of a chunk is prefetched before its last head is read
  const int64_t chunk = step * groups * max64(a.head_dim, a.head_dim_v) * int64_t(sizeof(T));
  const bool beside = invariant && a.k.stride_head < a.k.stride_token;
  // of a group's keys in the block
  const auto largest_scale = [&](int g) __attribute__((always_inline)) {
    return a.k_scales ? largest_key_scale(a, head_of_group(g), block) : 1.f;
  };
  // errors of few keys' logits are not averaged
  const float most_loss = s.k_len < 64 ? 0.125f : 1.f;
  Rows cache(a, head_of_group(0), groups, step, AHEAD_BYTES + (beside ? chunk : 0), w.unpacked);
  cache.seek(block, next);
  for (int c = 0; c < columns; c += step) {
    if constexpr (!Product::FIXED)
      if (invariant) {
        score_in_order<Product, Rows, ROWS>(a, task, block.k_offset + c, c, step, cache, w);
        continue;
      }
    for (int g = 0; g < groups; ++g) {
      // not earlier: the block's keys would push them out of a first-level cache
      if (c + step >= columns) fetch_column_scales(a, head_of_group(g), block);
      float* scores = w.scores + g * w.rows * ROW_COLUMNS + c;
      with_head_dim(a.head_dim, [&](int64_t head_dim) __attribute__((always_inline)) {
        const int64_t* in_memory = block.k_offset + c;
        const T* k = cache.rows(a.k, head_of_group(g), in_memory, step, head_dim);
        const int64_t* offset = cache.offsets(in_memory);
        dot_keys<Product, T, ROWS>(k, offset, step, cache.ahead, w.q + g * w.rows * w.stride_q,
                                   w.lane_scales + g * w.rows * W, w.rows, head_dim, w.scale[g],
                                   scores);
        if (Product::FIXED && c == 0) w.is_corrected[g] = w.loss[g] * largest_scale(g) > most_loss;
        if (Product::FIXED && w.is_corrected[g] > 0)
          dot_keys<Product, T, ROWS, true>(
              k, offset, step, cache.ahead, w.low + g * w.rows * w.stride_q,
              w.low_scales + g * w.rows * W, w.rows, head_dim, w.scale[g], scores);
      });
    }
  }
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  float* to = apart ? w.sums : w.acc;
  const int64_t floats = groups * w.rows * w.stride_acc;
  if (apart) memset(w.sums, 0, floats * sizeof(float));
  for (int c = 0; c < columns; c += step) {
    for (int g = 0; g < groups; ++g) {
      // not of all groups at once: no memory would be read meanwhile
      if (c == 0) softmax_of_group<Product, ROWS>(a, s, task, block, next, g, finished, apart, w);
      const float* p = w.scores + g * w.rows * ROW_COLUMNS + c / Product::DEPTH;
      with_head_dim(a.head_dim_v, [&](int64_t head_dim) __attribute__((always_inline)) {
        const int64_t* in_memory = block.v_offset + c;
        const T* v = cache.rows(a.v, head_of_group(g), in_memory, step, head_dim);
        weigh_values<Product, T, ROWS>(v, cache.offsets(in_memory), step, cache.ahead, p, w.rows,
                                       head_dim, to + g * w.rows * w.stride_acc);
      });
    }
  }
  for (int64_t row = 0; apart && row < groups * w.rows; ++row) {
    const F rescale = set1(w.rescale[row]), weight = set1(Product::FIXED ? w.weight[row] : 1.f);
    for (int64_t i = row * w.stride_acc; i < (row + 1) * w.stride_acc; i += W)
      store(w.acc + i,
            fma(load(w.acc + i), rescale, Product::as_floats(load(w.sums + i)) * weight));
  }
}

// The queries of a task in fixed point. False if one is not finite.
template <class Product>
PAGED_ATTN_INLINE bool fix_queries(const Attention& a, const paged_attn::Task& task,
                                   const RowsWorkspace& w) {
  // the error of a logit that is allowed, and the root mean square of keys that it is estimated
  // with: keys spread evenly over the range of int8, or of int4
  constexpr float LOSS = 2e-5f, KEY = Product::PACKED == 2 ? 4.6f : 73.9f;
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  memset(w.lane_scales, 0, groups * w.rows * W * sizeof(float));
  memset(w.low_scales, 0, groups * w.rows * W * sizeof(float));
  for (int g = 0; g < groups; ++g) {
    // logits, or logits over a softcap
    const float scale = w.scale[g] * KEY * (a.softcap > 0 ? a.softcap : LN_2);
    w.loss[g] = 0;
    for (int64_t i = g * w.rows; i < g * w.rows + rows; ++i) {
      const int64_t first = i * w.stride_q;
      const float lost = Product::quantize_row(w.q + first, w.stride_q, w.lane_scales + i * W,
                                               w.low + first, w.low_scales + i * W);
      if (!(lost < INFINITY)) return false;
      const float loss = sqrtf(lost) * fabsf(scale) / LOSS;
      w.loss[g] = loss > w.loss[g] ? loss : w.loss[g];
    }
  }
  return true;
}

// False, and nothing is written, if the queries do not fit a product in fixed point.
template <class Product>
inline bool decode(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                   float* memory) {
  static_assert(is_product<Product>());
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  const RowsWorkspace w = rows_workspace<Product>(a, rows, groups, memory);
  memset(w.q, 0, groups * w.rows * w.stride_q * sizeof(float));
  memset(w.acc, 0, groups * w.rows * w.stride_acc * sizeof(float));
  for (int64_t i = 0; i < groups * w.rows; ++i) w.m[i] = -INFINITY, w.l[i] = 0;
  for (int g = 0; g < groups; ++g) {
    w.scale[g] = logit_scale(a, s, kv_head_of(a, task.group_begin + g));
    load_queries<typename Product::Queries>(a, s, task, task.group_begin + g,
                                            w.q + g * w.rows * w.stride_q, w.stride_q);
    if constexpr (Product::PACKED == 2)
      for (int64_t r = 0; r < rows; ++r)
        Product::deal_out(w.q + (g * w.rows + r) * w.stride_q, w.stride_q);
  }
  if constexpr (Product::FIXED)
    if (!fix_queries<Product>(a, task, w)) return false;

  for_each_block(a, s, task, ROW_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool more)
                     __attribute__((always_inline)) {
                       const KeyBlock& upcoming = more ? next : block;
                       const auto attend = [&](auto rows) __attribute__((always_inline)) {
                         typedef typename decltype(rows)::type Rows;
                         switch (w.rows) {
                           case 1:
                             return decode_block<Product, Rows, 1>(a, s, task, block, upcoming, w);
                           case 2:
                             return decode_block<Product, Rows, 2>(a, s, task, block, upcoming, w);
                           default:
                             return decode_block<Product, Rows, 4>(a, s, task, block, upcoming, w);
                         }
                       };
                       if constexpr (Product::PACKED == 2)
                         return attend(TypeTag<RowsInPlace<int4x2>>());
                       if constexpr (Product::template accepts<int8_t>)
                         if (a.kv_dtype == paged_attn::DType::int4)
                           return attend(TypeTag<UnpackedRows>());
                       with_type(a.kv_dtype, [&](auto tag) __attribute__((always_inline)) {
                         typedef typename decltype(tag)::type T;
                         if constexpr (Product::template accepts<T>)
                           attend(TypeTag<RowsInPlace<T>>());
                       });
                     });
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = g * w.rows + r;
      if constexpr (Product::PACKED == 2) Product::gather(w.acc + i * w.stride_acc, w.stride_acc);
      finish(a, s, task, task.group_begin + g, r, w.acc + i * w.stride_acc, w.m[i], w.l[i]);
    }
  return true;
}

}  // namespace
