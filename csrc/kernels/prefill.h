// Many query rows (prefill): two register-tiled matrix products around the running softmax.
//
// A task is a tile of query tokens x the heads of one group. The keys of a block are converted and
// packed once, transposed, and serve every row; so are the values. Per TILE_ROWS rows the scores
// stay in L1: product, softmax, product. Columns past the rows' visible range are not computed.
// What is packed are operands of a Product, each the size of a float.
#pragma once

#include "../core/matrix.h"
#include "../core/packing.h"
#include "../core/query_rows.h"
#include "../core/unpack.h"
#include "../core/workspace.h"

namespace {

// Floats of the memory in which rows of int4 are unpacked.
PAGED_ATTN_INLINE int64_t floats_of_unpacked(const Attention& a) {
  using paged_attn::DType;
  if (a.kv_dtype != DType::int4 && a.v_dtype != DType::int4) return 0;
  return MAX_COLUMNS * max64(a.head_dim, a.head_dim_v) / int64_t(sizeof(float));
}

// Calls f(rows, offset) for the rows of a block under a head: in place, or unpacked to int8.
template <class Product, class Function>
PAGED_ATTN_INLINE void with_rows(const paged_attn::KeyValue& x, paged_attn::DType dtype,
                                 int64_t kv_head, const int64_t* offset, int columns,
                                 int64_t numbers, float* unpacked, Function f) {
  if (dtype == paged_attn::DType::int4) {
    const uint8_t* from = (const uint8_t*)x.data + kv_head * x.stride_head;
    int8_t* rows = (int8_t*)unpacked;
    int64_t offsets[MAX_COLUMNS];
    for (int c = 0; c < columns; ++c) {
      offsets[c] = c * numbers;
      unpack_row(from + offset[c], numbers, rows + offsets[c]);
    }
    f((const int8_t*)rows, offsets);
    return;
  }
  with_type(dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    if constexpr (Product::template accepts<T>)
      f((const T*)x.data + kv_head * x.stride_head, offset);
  });
}

template <class Product, int APART = 1>
PAGED_ATTN_INLINE void pack_block(const Attention& a, int64_t kv_head, const KeyBlock& block,
                                  float* keys, float* values, float* unpacked) {
  with_rows<Product>(a.k, a.kv_dtype, kv_head, block.k_offset, block.num_columns, a.head_dim,
                     unpacked, [&](auto* k, const int64_t* offset) __attribute__((always_inline)) {
                       pack_keys<Product>(k, offset, block.num_columns, a.head_dim,
                                          key_depth<Product>(a), keys);
                     });
  if (a.latent) return;
  with_rows<Product>(a.v, a.kv_dtype, kv_head, block.v_offset, block.num_columns, a.head_dim_v,
                     unpacked, [&](auto* v, const int64_t* offset) __attribute__((always_inline)) {
                       pack_values<Product, APART>(v, offset, block.num_columns, a.head_dim_v,
                                                   MAX_COLUMNS, values);
                     });
}

// Packs values as keys, for latent queries; values may have another dtype than keys.
template <class Product>
inline void pack_latents(const Attention& a, int64_t kv_head, const KeyBlock& block, float* latents,
                         float* values, float* unpacked) {
  with_rows<Product>(a.v, a.v_dtype, kv_head, block.v_offset, block.num_columns, a.head_dim_v,
                     unpacked, [&](auto* v, const int64_t* offset) __attribute__((always_inline)) {
                       pack_keys<Product>(v, offset, block.num_columns, a.head_dim_v,
                                          depth_of<Product>(a.head_dim_v), latents);
                       pack_values<Product>(v, offset, block.num_columns, a.head_dim_v, MAX_COLUMNS,
                                            values);
                     });
}

struct TileWorkspace : SoftmaxWorkspace {
  using SoftmaxWorkspace::SoftmaxWorkspace;

  int64_t depth_latent;  // 0 without latent queries, which stand behind those of keys
  float *keys, *latents, *values;
  // where latents have scales by token: their own part of scores, and later probabilities times
  // scales; the scales, if a token has several
  float *by_latents, *latent_scales;
  float* unpacked;  // rows of int4 as int8
};

template <class Product>
PAGED_ATTN_INLINE TileWorkspace tile_workspace(const Attention& a, int64_t rows, float* memory) {
  TileWorkspace w(memory);
  w.rows = round_up(rows, Product::ROWS);
  w.depth_latent = a.latent ? depth_of<Product>(a.head_dim_v) : 0;
  w.stride_q = round_up(key_depth<Product>(a), W) + round_up(w.depth_latent, W);
  w.stride_acc = round_up(a.head_dim_v, W);
  w.take_rows(1, w.rows * w.stride_acc, 1, Product::ROWS * MAX_COLUMNS);
  w.keys = w.take(key_depth<Product>(a) * MAX_COLUMNS);
  w.latents = w.take(w.depth_latent * MAX_COLUMNS);
  w.values = w.take(round_up(a.head_dim_v, Product::PANEL) * (MAX_COLUMNS / Product::DEPTH));
  w.by_latents = w.take(a.latent && a.v_scales ? Product::ROWS * MAX_COLUMNS : 0);
  w.latent_scales = w.take(a.v_scales.count > 1 ? a.v_scales.count * MAX_COLUMNS : 0);
  w.unpacked = w.take(floats_of_unpacked(a));
  return w;
}

// Rows of a tile whose queries, sums and scores fit a cache with room to spare: `most` of them at
// head_dim 128.
PAGED_ATTN_INLINE int64_t rows_in_cache(const Attention& a, int64_t most) {
  return max64(16, min64(most, 384 * most / (a.head_dim + a.head_dim_v + 64)));
}

// Columns of a block that some rows can see: whole vectors [begin, end), of which only the first
// `depth` columns can be anything but 0.
struct VisibleColumns {
  int begin, end, depth;
};

PAGED_ATTN_INLINE VisibleColumns visible_columns(const KeyBlock& block, KeyRange range) {
  VisibleColumns x = {0, block.num_columns, block.num_columns};
  if (range.end == 0) {
    x.end = 0;
  } else if (block.num_segments == 1) {
    const int64_t key = block.segments[0].key;
    const int64_t end = min64(x.end, max64(0, range.end - key));
    x.begin = int(max64(0, range.begin - key) / ALIGN * ALIGN);
    x.end = int(round_up(end, ALIGN));
    x.depth = int(end) - x.begin;
  }
  return x;
}

// Prefetches the rows of a block's columns [begin, end), which will be packed next.
PAGED_ATTN_INLINE void fetch_columns(const Attention& a, int64_t kv_head, const KeyBlock& block,
                                     int64_t begin, int64_t end) {
  const int64_t bytes = bytes_of(a.kv_dtype), bytes_v = bytes_of(a.v_dtype);
  const int64_t row = elements_of(a.kv_dtype, a.head_dim) * bytes;
  const int64_t row_v = elements_of(a.v_dtype, a.head_dim_v) * bytes_v;
  const char* k = (const char*)a.k.data + kv_head * a.k.stride_head * bytes;
  const char* v = (const char*)a.v.data + kv_head * a.v.stride_head * bytes_v;
  for (int64_t c = begin; c < min64(end, block.num_columns); ++c) {
    for (int64_t b = 0; b < row; b += CACHE_LINE)
      __builtin_prefetch(k + block.k_offset[c] * bytes + b, 0, 2);
    for (int64_t b = 0; b < row_v; b += CACHE_LINE)
      __builtin_prefetch(v + block.v_offset[c] * bytes_v + b, 0, 2);
  }
}

// Leaves probabilities of rows from `first` on as floats, which scales by column are to multiply.
template <int ROWS>
PAGED_ATTN_APART void softmax_in_floats(const Attention& a, const Sequence& s,
                                        const paged_attn::Task& task, const KeyBlock& block,
                                        int begin, int end, bool finished, int64_t first, int count,
                                        float* scores, const TileWorkspace& w, float* rescale) {
  const auto row_at = [&](int r) __attribute__((always_inline)) {
    return row_of(a, s, task, task.group_begin, first + r);
  };
  softmax_rows<FloatProduct, ROWS>(a, s, block, begin, end, finished, count, row_at, scores,
                                   MAX_COLUMNS, w.m + first, w.l + first, rescale);
}

// Attention of all rows of a tile to one packed block, while the next one is fetched.
template <class Product>
PAGED_ATTN_INLINE void attend_block(const Attention& a, const Sequence& s,
                                    const paged_attn::Task& task, const KeyBlock& block,
                                    const KeyBlock& next, const TileWorkspace& w) {
  const int64_t kv_head = kv_head_of(a, task.group_begin);
  const float scale = logit_scale(a, s, kv_head);
  const float scale_latent = product_scale(a, s, kv_head, a.v_descale);
  const int64_t rows = rows_of(a, task);
  constexpr int DEPTH = Product::DEPTH, ROWS = Product::ROWS, PANEL = Product::PANEL;
  constexpr int TOGETHER = ROWS < 8 ? ROWS : 8;  // rows whose softmax fits the registers
  static_assert(paged_attn::LATENT_COLUMNS % PANEL == 0 &&
                paged_attn::LATENT_COLUMNS / DEPTH <= MAX_CHAIN);
  const int64_t depth = key_depth<Product>(a);
  // scales of a token's latents, and how many numbers and operands each belongs to
  const int64_t parts = a.v_scales.count;
  const int64_t part_dims = parts > 1 ? paged_attn::LATENT_COLUMNS : a.head_dim_v;
  const int64_t part_depth = parts > 1 ? paged_attn::LATENT_COLUMNS / DEPTH : w.depth_latent;
  float all[ROWS];
  for (float& x : all) x = 1.f;
  ColumnScales scales;
  load_column_scales(a, kv_head, block, scales, w.latent_scales);
  for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
    fetch_columns(a, kv_head, next, r0 * MAX_COLUMNS / w.rows, (r0 + ROWS) * MAX_COLUMNS / w.rows);
    const int64_t last = min64(r0 + ROWS, rows) - 1;
    const int64_t first_token = token_of(a, task, r0), last_token = token_of(a, task, last);
    const KeyRange range = visible_keys(a, s, first_token, last_token);
    const VisibleColumns visible = visible_columns(block, range);
    const int begin = visible.begin, end = visible.end;
    if (begin >= end) continue;

    for (int c = begin, n; c < end; c += n) {
      n = int(min64(PANEL - c % PANEL, end - c));
      const float *q = w.q + r0 * w.stride_q, *keep = nullptr;
      const float* panel = w.keys + c / PANEL * depth * PANEL + c % PANEL;
      for (int64_t d = 0; d < depth; d += MAX_CHAIN, keep = all)
        multiply<Product>(n / W, q + d, w.stride_q, panel + d * PANEL, w.scores + c, MAX_COLUMNS,
                          min64(MAX_CHAIN, depth - d), scale, keep);
      if (scales.of_keys) scale_columns(w.scores, MAX_COLUMNS, ROWS, c, c + n, scales.of_keys);
      if (w.depth_latent == 0) continue;
      q += round_up(depth, W);
      panel = w.latents + c / PANEL * w.depth_latent * PANEL + c % PANEL;
      float* to = scales.of_values ? w.by_latents : w.scores;
      for (int64_t i = 0; i < parts; ++i, q += part_depth, panel += part_depth * PANEL) {
        keep = scales.of_values ? nullptr : all;
        for (int64_t d = 0; d < part_depth; d += MAX_CHAIN, keep = all)
          multiply<Product>(n / W, q + d, w.stride_q, panel + d * PANEL, to + c, MAX_COLUMNS,
                            min64(MAX_CHAIN, part_depth - d), scale_latent, keep);
        if (scales.of_values)
          add_scaled_columns(w.by_latents, w.scores, MAX_COLUMNS, ROWS, c, c + n,
                             scales.of_values + i * MAX_COLUMNS);
      }
    }
    const bool finished =
        is_plain(a) && all_visible(a, s, first_token, last_token, block, begin, end);
    float rescale[ROWS];
    for (int i = 0; i < ROWS; i += TOGETHER) {
      const int64_t first = r0 + i;
      const auto row_at = [&](int r) __attribute__((always_inline)) {
        return row_of(a, s, task, task.group_begin, first + r);
      };
      const int count = int(min64(TOGETHER, last + 1 - first));
      float* scores = w.scores + i * MAX_COLUMNS;
      if (parts > 1)
        softmax_in_floats<TOGETHER>(a, s, task, block, begin, end, finished, first, count, scores,
                                    w, rescale + i);
      else
        softmax_rows<Product, TOGETHER>(a, s, block, begin, end, finished, count, row_at, scores,
                                        MAX_COLUMNS, w.m + first, w.l + first, rescale + i, nullptr,
                                        scales.of_values);
    }
    const int64_t seen = round_up((visible.depth + DEPTH - 1) / DEPTH, Product::GRAIN);
    for (int64_t i = 0; i < parts; ++i) {
      const float* probabilities = w.scores;
      if (parts > 1) {
        scale_rows<Product>(w.scores, w.by_latents, MAX_COLUMNS, ROWS, begin, end,
                            scales.of_values + i * MAX_COLUMNS);
        probabilities = w.by_latents;
      }
      for (int64_t d = i * part_dims; d < (i + 1) * part_dims; d += PANEL) {
        const int64_t n = min64(PANEL, w.stride_acc - d);
        const float* panel = w.values + d * (MAX_COLUMNS / DEPTH) + begin / DEPTH * PANEL;
        multiply<Product>(int(n / W), probabilities + begin / DEPTH, MAX_COLUMNS, panel,
                          w.acc + r0 * w.stride_acc + d, w.stride_acc, seen, 1.f, rescale);
      }
    }
  }
}

template <class Product>
inline void prefill_tile(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                         float* memory) {
  static_assert(is_product<Product>());
  const int64_t rows = rows_of(a, task);
  const int64_t kv_head = kv_head_of(a, task.group_begin);
  const TileWorkspace w = tile_workspace<Product>(a, rows, memory);
  load_queries<Product>(a, s, task, task.group_begin, w.q, w.stride_q);
  if (a.latent)
    load_queries<Product>(a, s, task, task.group_begin,
                          w.q + w.stride_q - round_up(w.depth_latent, W), w.stride_q, true);
  // rows that only fill the last register tile are zeros
  memset(w.q + rows * w.stride_q, 0, (w.rows - rows) * w.stride_q * sizeof(float));
  memset(w.acc, 0, w.rows * w.stride_acc * sizeof(float));
  for (int64_t r = 0; r < w.rows; ++r) w.m[r] = -INFINITY, w.l[r] = 0;

  for_each_block(a, s, task, MAX_COLUMNS,
                 [&](const KeyBlock& block, const KeyBlock& next, bool)
                     __attribute__((always_inline)) {
                       pack_block<Product>(a, kv_head, block, w.keys, w.values, w.unpacked);
                       if (a.latent)
                         pack_latents<Product>(a, kv_head, block, w.latents, w.values, w.unpacked);
                       attend_block<Product>(a, s, task, block, next, w);
                     });
  for (int64_t r = 0; r < rows; ++r)
    finish(a, s, task, task.group_begin, r, w.acc + r * w.stride_acc, w.m[r], w.l[r]);
}

}  // namespace
