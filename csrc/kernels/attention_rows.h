// Few query rows (decode): keys and values are read in place, once, in the order of memory.
//
// A task covers a range of keys for several head groups: a chunk of keys at a time for every head,
// so that a page is read whole in either layout. The rows of a group share each load and each
// conversion.
#pragma once

#include "../core/query_rows.h"
#include "../core/read_ahead.h"
#include "../core/workspace.h"

namespace {

// Rows of a group that are better served without packing keys; latents have one engine.
PAGED_ATTN_INLINE int64_t few_rows(const Attention& a) { return a.latent ? 0 : 16; }

constexpr int ROW_COLUMNS = 128;  // keys per softmax update
static_assert(ROW_COLUMNS == MAX_COLUMNS, "rows add up what tiles do");

// The dot products that are under way together, enough to hide the latency of one.
constexpr int DOTS = W < 8 ? 8 : W;

// A row's numbers in whole vectors of operands.
template <class Product>
PAGED_ATTN_INLINE int64_t padded(int64_t head_dim) {
  return round_up(head_dim, W * Product::DEPTH);
}

// scores (rows, columns) = scale * q (rows, head_dim) . k; ROWS x KEYS dot products at a
// time, W of them summed over the lanes in one transpose. With ADD scores become more by that, and
// nothing is asked for.
template <class Product, class T, int ROWS, bool ADD = false>
PAGED_ATTN_INLINE void dot_keys(const T* k, const int64_t* offset, int columns, ReadAhead<T>& ahead,
                                const float* q, const float* units, int64_t rows,
                                int64_t head_dim, float scale, float* scores) {
  constexpr int KEYS = DOTS / ROWS;
  constexpr int STEP = W * Product::DEPTH;
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  const int64_t row_bytes = head_dim * int64_t(sizeof(T));
  // one claim for all columns where they adjoin, else one for each step of the loop
  const bool whole = !ADD && ahead.has(columns * row_bytes);
  const T* first_later = whole ? (const T*)ahead.claim(columns * row_bytes) : nullptr;
  for (int c = 0; c < columns; c += KEYS) {
    const T* key[KEYS];
    for (int i = 0; i < KEYS; ++i) key[i] = k + offset[c + i];
    const T* later = nullptr;
    if (!ADD) later = whole ? first_later + c * head_dim : (const T*)ahead.claim(KEYS * row_bytes);
    for (int64_t r = 0; r < rows; r += ROWS) {
      typename Product::Sum acc[DOTS] = {};
      const float* x = q + r * stride_q;
      const auto step = [&](int64_t d, int n, auto load_key) __attribute__((always_inline)) {
        F row[ROWS];
#pragma GCC unroll 4
        for (int i = 0; i < ROWS; ++i) row[i] = load(x + i * stride_q + d / Product::DEPTH);
#pragma GCC unroll 16
        for (int j = 0; j < KEYS; ++j) {
          if (!ADD && r == 0) ahead.ask(later, d * KEYS + j * n, n);
          const F y = load_key(key[j] + d);
#pragma GCC unroll 4
          for (int i = 0; i < ROWS; ++i)
            acc[i * KEYS + j] = Product::multiply_add(y, row[i], acc[i * KEYS + j]);
        }
      };
      int64_t d = 0;
#pragma GCC unroll 4
      for (; d + STEP <= head_dim; d += STEP) {
        step(d, STEP,
             [](const T* p) __attribute__((always_inline)) { return Product::load_operands(p); });
      }
      if (d < head_dim) {
        const int n = int(head_dim - d);
        step(d, n, [n](const T* p) __attribute__((always_inline)) {
          return Product::load_operands(p, n);
        });
      }
      float sums[DOTS];
      for (int i = 0; ADD && i < ROWS; ++i)
        memcpy(sums + i * KEYS, scores + (r + i) * ROW_COLUMNS + c, KEYS * sizeof(float));
      F dots[DOTS];
#pragma GCC unroll 16
      for (int i = 0; i < DOTS; ++i) dots[i] = Product::dots(acc[i], units + (r + i / KEYS) * W);
      for (int i = 0; i < DOTS; i += W) {
        const F total = sum_lanes(dots + i) * set1(scale);
        store(sums + i, ADD ? total + load(sums + i) : total);
      }
      for (int i = 0; i < ROWS; ++i)
        memcpy(scores + (r + i) * ROW_COLUMNS + c, sums + i * KEYS, KEYS * sizeof(float));
    }
  }
}

// Calls f(head, first operand, W operands of W keys) with the dims of the keys across them, which
// attention_tile.h packs; for HEADS heads in turns.
template <class Product, int HEADS, class T, class Function>
PAGED_ATTN_INLINE void turn_keys(const T* const* k, const int64_t* offset, ReadAhead<T>& ahead,
                                 int64_t head_dim, Function f) {
  constexpr int STEP = W * Product::DEPTH;
  const T* later[HEADS];
  for (int h = 0; h < HEADS; ++h)
    later[h] = (const T*)ahead.claim(W * head_dim * int64_t(sizeof(T)));
  const auto turn = [&](int64_t d, int n, auto load_key) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int h = 0; h < HEADS; ++h) {
      F keys[W];
#pragma GCC unroll 16
      for (int j = 0; j < W; ++j) {
        ahead.ask(later[h], d * W + j * n, n);
        keys[j] = load_key(k[h] + offset[j] + d);
      }
      transpose(keys);
      f(h, d / Product::DEPTH, keys);
    }
  };
  int64_t d = 0;
  for (; d + STEP <= head_dim; d += STEP)
    turn(d, STEP,
         [](const T* p) __attribute__((always_inline)) { return Product::load_operands(p); });
  if (d < head_dim) {
    const int n = int(head_dim - d);
    turn(d, n, [n](const T* p) __attribute__((always_inline)) {
      return Product::load_operands(p, n);
    });
  }
}

// Dot products of ROWS queries with W keys, a lane each, to the last bit as tiles have them.
template <class Product, int ROWS>
struct DotsInOrder {
  F acc[ROWS] = {};

  PAGED_ATTN_INLINE void add(F operands, const float* q, int64_t stride_q) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
      acc[r] = Product::multiply_add(operands, set1(q[r * stride_q]), acc[r]);
  }
  // after each chain of `MAX_CHAIN` operands, and the last one
  PAGED_ATTN_INLINE void close(bool first, float scale, float* scores) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      float* to = scores + r * ROW_COLUMNS;
      const F product = acc[r] * set1(scale);
      store(to, first ? product : fma(load(to), set1(1.f), product));
      acc[r] = F{};
    }
  }
};

template <class Product, int ROWS>
inline void dot_turned(const float* turned, const float* q, int64_t stride_q, int64_t depth,
                       float scale, float* scores) {
  DotsInOrder<Product, ROWS> dots;
  for (int64_t first = 0; first < depth; first += MAX_CHAIN) {
    const int64_t end = min64(depth, first + MAX_CHAIN);
#pragma GCC unroll 4
    for (int64_t i = first; i < end; ++i) dots.add(load(turned + i * W), q + i, stride_q);
    dots.close(first == 0, scale, scores);
  }
}

// Keys that wait in `turned` for more rows than their registers leave room for.
template <class Product, class T>
PAGED_ATTN_APART void dot_many(const T* k, const int64_t* offset, ReadAhead<T>& ahead,
                               const float* q, int64_t rows, int64_t head_dim, float scale,
                               float* scores, float* turned) {
  const int64_t depth = depth_of<Product>(head_dim);
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  turn_keys<Product, 1>(&k, offset, ahead, head_dim, [&](int, int64_t i, const F* keys)
                                                         __attribute__((always_inline)) {
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) store(turned + (i + j) * W, keys[j]);
  });
  for (int64_t r = 0; r < rows;) {
    const auto some = [&](auto count) __attribute__((always_inline)) {
      constexpr int ROWS = decltype(count)::value;
      dot_turned<Product, ROWS>(turned, q + r * stride_q, stride_q, depth, scale,
                                scores + r * ROW_COLUMNS);
      r += ROWS;
    };
    rows - r >= 8 ? some(Count<8>()) : rows - r >= 4 ? some(Count<4>()) : some(Count<1>());
  }
}

// The same for few enough rows of HEADS heads: their keys stay in registers.
template <class Product, int ROWS, int HEADS, class T>
PAGED_ATTN_INLINE void dot_few(const T* const* k, const int64_t* offset, ReadAhead<T>& ahead,
                               const float* q, int64_t head_dim, const float* scale,
                               float* scores) {
  const int64_t depth = depth_of<Product>(head_dim);
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  DotsInOrder<Product, ROWS> dots[HEADS];
  turn_keys<Product, HEADS>(k, offset, ahead, head_dim, [&](int h, int64_t first, const F* keys)
                                                            __attribute__((always_inline)) {
    const float* x = q + h * ROWS * stride_q + first;
#pragma GCC unroll 16
    for (int j = 0; j < W; ++j) dots[h].add(keys[j], x + j, stride_q);
    const int64_t end = first + W;
    if (end % MAX_CHAIN == 0 || end >= depth)
      dots[h].close(end <= MAX_CHAIN, scale[h], scores + h * ROWS * ROW_COLUMNS);
  });
}

// Heads whose dot products are under way together. One head's are a chain of sums for each row,
// and each sum waits for the one before it.
template <class Product, class T, int ROWS>
constexpr int HEADS_IN_ORDER = W < 16 || Product::DEPTH == 1 || sizeof(T) == 1 ? 1
                               : ROWS == 4                                     ? 2
                                                                               : 4;

// dot_keys where each score is a lane's sum over the dims in their order, for HEADS heads.
template <class Product, int HEADS, class T, int ROWS>
PAGED_ATTN_INLINE void dot_keys_in_order(const T* const* k, const int64_t* offset, int columns,
                                         ReadAhead<T>& ahead, const float* q, int64_t rows,
                                         int64_t head_dim, const float* scale, float* scores,
                                         float* turned) {
  const int64_t stride_q = padded<Product>(head_dim) / Product::DEPTH;
  for (int c = 0; c < columns; c += W) {
    if (ROWS == 4 ? rows == 4 : HEADS > 1) {
      dot_few<Product, ROWS, HEADS>(k, offset + c, ahead, q, head_dim, scale, scores + c);
      continue;
    }
    for (int h = 0; h < HEADS; ++h)
      dot_many<Product>(k[h], offset + c, ahead, q + h * rows * stride_q, rows, head_dim, scale[h],
                        scores + h * rows * ROW_COLUMNS + c, turned);
  }
}

// acc (ROWS, VECS * W) += p (ROWS, columns) @ v (columns, VECS * W); or the first n dims of them
template <class Product, class T, int ROWS, int VECS>
PAGED_ATTN_INLINE void add_values(const T* v, const int64_t* offset, int columns,
                                  ReadAhead<T>& ahead, bool first, int n, const float* p,
                                  const float* weight, float* acc, int64_t stride_acc) {
  constexpr int DEPTH = Product::DEPTH;
  const T* later = first ? (const T*)ahead.claim(columns * n * int64_t(sizeof(T))) : nullptr;
  typename Product::Sum sum[ROWS][VECS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j)
      sum[r][j] = Product::begin(load(acc + r * stride_acc + j * W));
  for (int c = 0; c < columns; c += DEPTH, p += 1) {
    F x[VECS];
#pragma GCC unroll 2
    for (int i = 0; i < DEPTH; ++i) {
      const T* row = v + offset[c + i];
#pragma GCC unroll 4
      for (int j = 0; j < VECS; j += DEPTH)
        x[i + j] =
            n == VECS * W ? Product::load_operands(row + j * W) : Product::load_operands(row, n);
    }
#pragma GCC unroll 4
    for (int j = 0; j < VECS; j += DEPTH) Product::interleave(x + j);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      constexpr int SHARE = DEPTH * VECS * W / ROWS;
      if (first) ahead.ask(later, c * n + r * SHARE, SHARE);
      const F weight = set1(p[r * ROW_COLUMNS]);
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) sum[r][j] = Product::multiply_add(x[j], weight, sum[r][j]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) {
      float* to = acc + r * stride_acc + j * W;
      store(to, Product::add_up(sum[r][j], load(to), weight[r]));
    }
}

template <class Product, class T, int ROWS>
PAGED_ATTN_INLINE void weigh_values(const T* v, const int64_t* offset, int columns,
                                    ReadAhead<T>& ahead, const float* p, const float* weight,
                                    int64_t rows, int64_t head_dim, float* acc) {
  // no more accumulators than the products keep, and enough to hide the latency of one
  constexpr int VECS = ROWS == 4 ? TILE_VECS : 4;
  constexpr int FEW = Product::DEPTH, STEP = W * FEW;
  const int64_t stride_acc = padded<Product>(head_dim);
  for (int64_t r = 0; r < rows; r += ROWS) {
    const float* weights = p + r * ROW_COLUMNS;
    float* to = acc + r * stride_acc;
    const bool first = r == 0;
    int64_t d = 0;
    for (; d + VECS * W <= head_dim; d += VECS * W)
      add_values<Product, T, ROWS, VECS>(v + d, offset, columns, ahead, first, VECS * W, weights,
                                         weight + r, to + d, stride_acc);
    for (; d + STEP <= head_dim; d += STEP)
      add_values<Product, T, ROWS, FEW>(v + d, offset, columns, ahead, first, STEP, weights,
                                        weight + r, to + d, stride_acc);
    if (d < head_dim)
      add_values<Product, T, ROWS, FEW>(v + d, offset, columns, ahead, first, int(head_dim - d),
                                        weights, weight + r, to + d, stride_acc);
  }
}

// Calls f(head_dim), which is inlined apart for the head_dim that most models have: as a constant
// it leaves loops without counters and addresses without arithmetic.
template <class Function>
PAGED_ATTN_INLINE void with_head_dim(int64_t head_dim, Function f) {
  if (head_dim == 128)
    f(128);
  else
    f(head_dim);
}

struct RowsWorkspace {
  int64_t rows;  // of a group, rounded up to whole register blocks
  int64_t stride_q, stride_acc;
  float *q, *acc, *m, *l, *scores;
  float* scale;  // of a group's dot products
  // where sums are those of attention_tile.h: of a block's values alone, and keys that were turned
  float *sums, *turned;
  // the units of a row's probabilities in a block (in fixed point), or what brings its earlier sums
  // to the new maximum (where sums are of a block alone)
  float* weight;
  // in fixed point: the units of a row's lanes, what the queries have lost, and whether that counts
  float *units, *low, *low_units, *loses;
  int64_t floats;
};

template <class Product>
PAGED_ATTN_INLINE RowsWorkspace rows_workspace(const Attention& a, int64_t rows, int64_t groups,
                                               float* memory) {
  RowsWorkspace w;
  Workspace space(memory);
  w.rows = rows <= 2 ? rows : round_up(rows, 4);
  w.stride_q = padded<Product>(a.head_dim) / Product::DEPTH;
  w.stride_acc = padded<Product>(a.head_dim_v);
  w.q = space.take(groups * w.rows * w.stride_q);
  w.acc = space.take(groups * w.rows * w.stride_acc);
  w.m = space.take(groups * w.rows);
  w.l = space.take(groups * w.rows);
  w.scores = space.take(groups * w.rows * ROW_COLUMNS);
  w.scale = space.take(groups);
  w.units = space.take(Product::FIXED ? groups * w.rows * W : 0);
  w.low = space.take(Product::FIXED ? groups * w.rows * w.stride_q : 0);
  w.low_units = space.take(Product::FIXED ? groups * w.rows * W : 0);
  w.loses = space.take(groups);
  w.weight = space.take(groups * w.rows);
  w.sums = space.take(a.batch_invariant ? groups * w.rows * w.stride_acc : 0);
  w.turned = space.take(a.batch_invariant ? w.stride_q * W : 0);
  w.floats = space.floats();
  return w;
}

// Columns of a chunk. Where a token's heads adjoin, memory is asked for in another order than it is
// read in: what has been asked for must stay in L1 until the last head has read its part.
template <class T>
PAGED_ATTN_INLINE int chunk_columns(const Attention& a, int heads, int fewest) {
  constexpr int64_t BYTES = 8192;  // of two chunks and everything else in 32 KiB
  int columns = ALIGN;
  if (a.k.stride_head >= a.k.stride_token) return columns;
  const int64_t row = max64(a.head_dim, a.head_dim_v) * int64_t(sizeof(T));
  while (columns > fewest && columns * heads * row > BYTES) columns /= 2;
  return columns;
}

// Scores of all heads for a chunk of keys, to the last bit as tiles have them.
template <class Product, class T, int ROWS>
PAGED_ATTN_APART void score_in_order(const Attention& a, const paged_attn::Task& task,
                                     const int64_t* offset, int column, int columns,
                                     ReadAhead<T>& ahead, const RowsWorkspace& w) {
  const int groups = task.group_end - task.group_begin;
  const auto some = [&](int g, auto heads) __attribute__((always_inline)) {
    constexpr int HEADS = decltype(heads)::value;
    const T* k[HEADS];
    for (int h = 0; h < HEADS; ++h)
      k[h] = (const T*)a.k.data + kv_head_of(a, task.group_begin + g + h) * a.k.stride_head;
    dot_keys_in_order<Product, HEADS, T, ROWS>(
        k, offset, columns, ahead, w.q + g * w.rows * w.stride_q, w.rows, a.head_dim, w.scale + g,
        w.scores + g * w.rows * ROW_COLUMNS + column, w.turned);
    return HEADS;
  };
  constexpr int HEADS = HEADS_IN_ORDER<Product, T, ROWS>;
  for (int g = 0; g < groups;)
    g += groups - g >= HEADS ? some(g, Count<HEADS>()) : some(g, Count<1>());
}

// One block of keys for every group of the task.
template <class Product, class T, int ROWS>
inline void attend_rows_block(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                              const KeyBlock& block, const KeyBlock& next, const RowsWorkspace& w) {
  const int groups = task.group_end - task.group_begin;
  const int columns = block.num_columns;
  const auto data_of = [&](const paged_attn::KeyValue& x, int g) __attribute__((always_inline)) {
    return (const T*)x.data + kv_head_of(a, task.group_begin + g) * x.stride_head;
  };
  // a chunk of keys fills the lanes, or else the sums, of a dot product
  const bool in_order = !Product::FIXED && a.batch_invariant;
  const int step = chunk_columns<T>(a, groups, in_order ? W : DOTS / ROWS);
  // where a token's heads adjoin, all of a chunk is asked for before its last head is read
  const int64_t chunk = step * groups * max64(a.head_dim, a.head_dim_v) * int64_t(sizeof(T));
  const bool beside = in_order && a.k.stride_head < a.k.stride_token;
  ReadAhead<T> ahead(a, kv_head_of(a, task.group_begin), groups, step,
                     AHEAD_BYTES + (beside ? chunk : 0));
  ahead.enter(block, next);
  for (int c = 0; c < columns; c += step) {
    if constexpr (!Product::FIXED)
      if (in_order) {
        score_in_order<Product, T, ROWS>(a, task, block.k_offset + c, c, step, ahead, w);
        continue;
      }
    for (int g = 0; g < groups; ++g) {
      float* scores = w.scores + g * w.rows * ROW_COLUMNS + c;
      with_head_dim(a.head_dim, [&](int64_t head_dim) __attribute__((always_inline)) {
        dot_keys<Product, T, ROWS>(data_of(a.k, g), block.k_offset + c, step, ahead,
                                   w.q + g * w.rows * w.stride_q, w.units + g * w.rows * W,
                                   w.rows, head_dim, w.scale[g], scores);
        if (Product::FIXED && w.loses[g] > 0)
          dot_keys<Product, T, ROWS, true>(data_of(a.k, g), block.k_offset + c, step, ahead,
                                           w.low + g * w.rows * w.stride_q,
                                           w.low_units + g * w.rows * W, w.rows, head_dim,
                                           w.scale[g], scores);
      });
    }
  }
  const int64_t rows = rows_of(a, task);
  const bool finished =
      is_plain(a) && all_visible(a, s, task.token_begin, task.token_end - 1, block, 0, columns);
  const auto softmax = [&](int g) __attribute__((always_inline)) {
    for (int64_t r0 = 0; r0 < rows; r0 += ROWS) {
      const auto row_at = [&](int r) __attribute__((always_inline)) {
        return row_of(a, s, task, task.group_begin + g, r0 + r);
      };
      const int64_t i = g * w.rows + r0;
      float rescale[ROWS];
      softmax_rows<Product, ROWS>(a, s, block, 0, columns, finished, int(min64(ROWS, rows - r0)),
                                  row_at, w.scores + i * ROW_COLUMNS, ROW_COLUMNS, w.m + i, w.l + i,
                                  rescale, w.weight + i);
      for (int r = 0; r < ROWS; ++r) {
        if (in_order) w.weight[i + r] = rescale[r];
        if (in_order || rescale[r] == 1) continue;
        float* acc = w.acc + (i + r) * w.stride_acc;
        for (int64_t d = 0; d < w.stride_acc; d += W)
          store(acc + d, load(acc + d) * set1(rescale[r]));
      }
    }
  };
  float* to = in_order ? w.sums : w.acc;
  const int64_t floats = groups * w.rows * w.stride_acc;
  if (in_order) memset(w.sums, 0, floats * sizeof(float));
  for (int c = 0; c < columns; c += step) {
    for (int g = 0; g < groups; ++g) {
      if (c == 0) softmax(g);  // not all at once: memory would be idle for as long
      const float* p = w.scores + g * w.rows * ROW_COLUMNS + c / Product::DEPTH;
      with_head_dim(a.head_dim_v, [&](int64_t head_dim) __attribute__((always_inline)) {
        weigh_values<Product, T, ROWS>(data_of(a.v, g), block.v_offset + c, step, ahead, p,
                                       w.weight + g * w.rows, w.rows, head_dim,
                                       to + g * w.rows * w.stride_acc);
      });
    }
  }
  for (int64_t row = 0; in_order && row < groups * w.rows; ++row) {
    const F weight = set1(w.weight[row]);
    for (int64_t i = row * w.stride_acc; i < (row + 1) * w.stride_acc; i += W)
      store(w.acc + i, fma(load(w.acc + i), weight, load(w.sums + i)));
  }
}

// The queries of a task in fixed point. False if one is not finite.
template <class Product>
PAGED_ATTN_INLINE bool fix_queries(const Attention& a, const paged_attn::Task& task,
                                   const RowsWorkspace& w) {
  // what a logit may lose, were all keys spread evenly over the range of int8
  constexpr float LOSS = 2e-5f, KEY = 73.9f;
  const int64_t rows = rows_of(a, task);
  const int groups = task.group_end - task.group_begin;
  memset(w.units, 0, groups * w.rows * W * sizeof(float));
  memset(w.low_units, 0, groups * w.rows * W * sizeof(float));
  for (int g = 0; g < groups; ++g) {
    // logits, or logits over a softcap
    const float scale = w.scale[g] * KEY * (a.softcap > 0 ? a.softcap : LN_2);
    w.loses[g] = 0;
    for (int64_t i = g * w.rows; i < g * w.rows + rows; ++i) {
      const int64_t first = i * w.stride_q;
      const float lost = Product::fix_row(w.q + first, w.stride_q, w.units + i * W, w.low + first,
                                          w.low_units + i * W);
      if (!(lost < INFINITY)) return false;
      if (!(lost * scale * scale <= LOSS * LOSS)) w.loses[g] = 1;
    }
  }
  return true;
}

// False, and nothing is written, if the queries do not fit a product in fixed point.
template <class Product>
inline bool attend_rows(const Attention& a, const Sequence& s, const paged_attn::Task& task,
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
  }
  if constexpr (Product::FIXED)
    if (!fix_queries<Product>(a, task, w)) return false;

  for_each_block(a, s, task, ROW_COLUMNS, [&](const KeyBlock& block, const KeyBlock& next, bool more)
                                     __attribute__((always_inline)) {
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
  });
  for (int g = 0; g < groups; ++g)
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = g * w.rows + r;
      finish(a, s, task, task.group_begin + g, r, w.acc + i * w.stride_acc, w.m[i], w.l[i]);
    }
  return true;
}

}  // namespace
