// From dot products to the logits that the softmax takes: softcap, ALiBi, bias, and masks.
//
// Dot products come multiplied by logit_scale: as logits in base 2 (times log2 e) or, with a
// softcap, as logits divided by the cap. Results are logits in base 2, -inf where the row does not
// see the key. Masks select and never add, so a NaN of a hidden key is gone.
#pragma once

#include "paged_kv.h"
#include "vec/convert.h"

namespace {

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;

// Times log2 e, a finite bias may be too large for float32: masks hold torch.finfo(dtype).min, and
// the result of a row whose keys all have that bias is the mean of their values. So logits past
// 2^127 are multiplied by 1/2 instead, and moved by BEND. Floats are 2^104 apart there:
// exponentials of differences are 0 or 1 with either factor.
constexpr float STEEP = 0x1p127f, BEND = STEEP * (LOG2_E - 0.5f), LARGEST = 0x1.fffffep127f;

PAGED_ATTN_INLINE float base_2(float logit) {
  if (!(fabsf(logit) > STEEP)) return logit * LOG2_E;
  return 0.5f * logit + (logit < 0 ? -BEND : BEND);
}

PAGED_ATTN_INLINE float base_e(float logit) {
  if (!(fabsf(logit) > STEEP * LOG2_E)) return logit * LN_2;
  const float size = 2 * (fabsf(logit) - BEND);  // which rounding can bring past the largest
  const float finite = size < LARGEST ? size : LARGEST;
  return logit < 0 ? -finite : finite;
}

// One row of scores: a query token under one head.
struct ScoreRow {
  int64_t token, head;
  int64_t position;
  KeyRange visible;
  float alibi_slope;  // times log2 e
  const char* bias;   // of key 0, or null
  const bool* tail;   // of key `first_tail`, from which on it masks, or null
  int64_t first_tail;
};

// What dot products with keys (or with values, for latent queries) are multiplied by, whose descale
// is given: see the top.
PAGED_ATTN_INLINE float product_scale(const Attention& a, const Sequence& s, int64_t kv_head,
                                      const paged_attn::Strided<float>& descale) {
  double scale = a.softmax_scale;
  if (a.q_descale) scale *= a.q_descale(s.index, kv_head);
  if (descale) scale *= descale(s.index, kv_head);
  return float(a.softcap > 0 ? scale / a.softcap : scale * 1.4426950408889634);
}

PAGED_ATTN_INLINE float logit_scale(const Attention& a, const Sequence& s, int64_t kv_head) {
  return product_scale(a, s, kv_head, a.k_descale);
}

PAGED_ATTN_INLINE const char* bias_row(const Attention& a, const Sequence& s, int64_t token,
                                       int64_t head) {
  const int64_t element = head * a.bias_stride_head + (s.q_start + token) * a.bias_stride_query;
  return (const char*)a.bias + element * bytes_of(a.bias_dtype);
}

PAGED_ATTN_INLINE ScoreRow score_row(const Attention& a, const Sequence& s, int64_t token,
                                     int64_t head) {
  ScoreRow row;
  row.token = token;
  row.head = head;
  row.position = s.past + token;
  row.visible = visible_keys(a, s, token);
  row.alibi_slope = a.alibi_slopes ? a.alibi_slopes(s.index, head) * LOG2_E : 0.f;
  row.bias = a.bias ? bias_row(a, s, token, head) : nullptr;
  row.tail = a.tail ? a.tail + (s.q_start + token) * a.tail_stride_query : nullptr;
  row.first_tail = s.k_len - s.q_len;
  return row;
}

// Bias on keys [key, key + n), n <= W, as float32; a bool that masks reads as -inf.
inline F load_bias(const Attention& a, const char* row, int64_t key, int n) {
  const int64_t stride = a.bias_stride_key;
  const char* p = row + key * stride * bytes_of(a.bias_dtype);
  if (a.bias_dtype == paged_attn::DType::boolean) {
    F x = {};
    for (int i = 0; i < n; ++i) x[i] = p[i * stride] ? 0.f : -INFINITY;
    return x;
  }
  F x = {};
  with_type(a.bias_dtype, [&](auto tag) __attribute__((always_inline)) {
    typedef typename decltype(tag)::type T;
    if (stride == 1) {
      x = load((const T*)p, n);
    } else {
      T gathered[W] = {};
      for (int i = 0; i < n; ++i) gathered[i] = ((const T*)p)[i * stride];
      x = load(gathered, W);
    }
  });
  return x;
}

// Lanes of keys [key, key + W) that lie in the range.
PAGED_ATTN_INLINE I lanes_in(KeyRange range, int64_t key) {
  const F lane = lane_index();
  const float begin = float(max64(min64(range.begin - key, W), 0));
  const float end = float(max64(min64(range.end - key, W), 0));
  return (I)(lane >= set1(begin)) & (I)(lane < set1(end));
}

// Lanes of keys [key, key + W) that the mask of the newest keys lets a row see.
PAGED_ATTN_APART I lanes_of_tail(const Attention& a, const ScoreRow& row, int64_t key) {
  I keep = ~I{};
  const int64_t end = min64(key + W, row.visible.end);
  for (int64_t j = max64(key, max64(row.first_tail, row.visible.begin)); j < end; ++j)
    if (!row.tail[(j - row.first_tail) * a.tail_stride_key]) keep[j - key] = 0;
  return keep;
}

// The positions of keys [key, key + W), counted from that of `key`.
PAGED_ATTN_APART F positions_from(const Attention& a, int64_t key) {
  F positions = {};
  for (int i = 0; i < W; ++i) positions[i] = float(key_position(a, key + i) - key_position(a, key));
  return positions;
}

PAGED_ATTN_APART F finish_logits(const Attention& a, const ScoreRow& row, int64_t key, F x) {
  I keep = lanes_in(row.visible, key);
  if (a.softcap > 0) x = tanh(x) * set1(a.softcap * LOG2_E);
  if (row.alibi_slope != 0) {
    // positions and keys are exact in float32 only as a difference
    const bool is_dealt = a.key_span != a.key_run;
    const F from_first = is_dealt ? positions_from(a, key) : lane_index();
    const F distance = abs(set1(float(row.position - key_position(a, key))) - from_first);
    x = fma(set1(-row.alibi_slope), distance, x);
  }
  if (row.bias) {
    const int64_t first = max64(key, row.visible.begin), end = min64(key + W, row.visible.end);
    if (first < end) {
      F bias = {};
      if (first == key) {
        bias = load_bias(a, row.bias, key, int(end - key));
      } else {
        const F late = load_bias(a, row.bias, first, int(end - first));
        for (int64_t j = first; j < end; ++j) bias[j - key] = late[j - first];
      }
      const F whole = fma(x, set1(LN_2), bias), size = abs(whole);
      const U sign = bits(whole) & set1(0x80000000u);
      const F bent = as_float(bits(fma(size, set1(0.5f), set1(BEND))) | sign);
      x = select(size > set1(STEEP), bent, fma(bias, set1(LOG2_E), x));
      keep &= (I)(bias != set1(-INFINITY));
    }
  }
  if (row.tail && key + W > row.first_tail) keep &= lanes_of_tail(a, row, key);
  return select(keep, x, set1(-INFINITY));
}

// Whether a logit is its scaled dot product, but for masks that follow from positions.
PAGED_ATTN_INLINE bool is_plain(const Attention& a) {
  return !(a.softcap > 0) && !a.alibi_slopes && !a.bias;
}

// Whether blocks of a layout may begin and end within ALIGN keys.
PAGED_ATTN_INLINE bool has_ragged_blocks(const Attention& a) {
  return a.layout.crow && a.key_span != a.key_run;
}

// The row with those keys as visible that it sees of a segment.
PAGED_ATTN_INLINE ScoreRow in_segment(const Attention& a, const ScoreRow& row,
                                      const Segment& segment) {
  ScoreRow found = row;
  if (has_ragged_blocks(a)) {
    found.visible.begin = max64(row.visible.begin, segment.listed.begin);
    found.visible.end = max64(min64(row.visible.end, segment.listed.end), found.visible.begin);
  }
  return found;
}

// Whether query tokens [first, last] all see every key in columns [begin, end) of a block.
PAGED_ATTN_INLINE bool all_visible(const Attention& a, const Sequence& s, int64_t first,
                                   int64_t last, const KeyBlock& block, int begin, int end) {
  const KeyRange of_last = visible_keys(a, s, last);
  KeyRange of_first = visible_keys(a, s, first);
  if (a.tail) of_first.end = min64(of_first.end, s.k_len - s.q_len);
  // the last tokens may see nothing: if their windows are past all keys, or between keys of this
  // rank
  bool all = !has_ragged_blocks(a) && of_last.end > of_last.begin;
  for (int i = 0; i < block.num_segments; ++i) {
    const Segment& segment = block.segments[i];
    const int64_t shift = segment.key - segment.begin;
    all &= of_last.begin <= max64(segment.begin, begin) + shift;
    all &= of_first.end >= min64(segment.end, end) + shift;
  }
  return all;
}

// Turns dot products into masked logits where each segment has an end of its own.
PAGED_ATTN_APART void finish_ragged(const Attention& a, const ScoreRow& row, const KeyBlock& block,
                                    int begin, int end, float* scores) {
  for (int i = 0; i < block.num_segments; ++i) {
    const Segment& segment = block.segments[i];
    const int first = int(max64(segment.begin, begin)), last = int(min64(segment.end, end));
    const ScoreRow own = in_segment(a, row, segment);
    for (int c = first; c < last; c += W)
      store(scores + c, finish_logits(a, own, c + segment.key - segment.begin, load(scores + c)));
  }
}

// Turns the dot products of columns [begin, end) of a row into masked logits, in place.
PAGED_ATTN_INLINE void finish_row(const Attention& a, const ScoreRow& row, const KeyBlock& block,
                                  int begin, int end, float* scores) {
  if (has_ragged_blocks(a)) return finish_ragged(a, row, block, begin, end, scores);
  for (int i = 0; i < block.num_segments; ++i) {
    const Segment& segment = block.segments[i];
    const int first = int(max64(segment.begin, begin)), last = int(min64(segment.end, end));
    const int64_t shift = segment.key - segment.begin;
    const bool plain = is_plain(a) && !(row.tail && last + shift > row.first_tail);
    if (plain && row.visible.begin <= first + shift && row.visible.end >= last + shift) continue;
    for (int c = first; c < last; c += W) {
      const F x = load(scores + c);
      if (!plain) {
        store(scores + c, finish_logits(a, row, c + shift, x));
      } else if (row.visible.begin > c + shift || row.visible.end < c + shift + W) {
        store(scores + c, select(lanes_in(row.visible, c + shift), x, set1(-INFINITY)));
      }
    }
  }
}

// Marks the columns of a block that any row of a task sees.
inline void mark_seen(const Attention& a, const Sequence& s, const paged_attn::Task& task,
                      const KeyBlock& block, I* seen) {
  for (int64_t token = task.token_begin; token < task.token_end; ++token)
    for (int64_t g = 0; g < a.group_size; ++g) {
      const ScoreRow row = score_row(a, s, token, task.group_begin * a.group_size + g);
      for (int i = 0; i < block.num_segments; ++i) {
        const Segment& segment = block.segments[i];
        for (int c = segment.begin; c < segment.end; c += W) {
          const F logits =
              finish_logits(a, in_segment(a, row, segment), segment.key + c - segment.begin, F{});
          seen[c / W] |= (I)(logits != set1(-INFINITY));
        }
      }
    }
}

// Whether some keys are hidden by more than positions.
PAGED_ATTN_INLINE bool has_holes(const Attention& a) { return a.bias || a.tail; }

// A bias may hide a key from every row of a task. Such a column gets the address of the values of
// one that is seen, so that a NaN in the hidden one cannot reach a result. Returns false if all
// columns are hidden.
inline bool borrow_hidden_values(const Attention& a, const Sequence& s,
                                 const paged_attn::Task& task, KeyBlock& block) {
  I seen[MAX_COLUMNS / W] = {};
  mark_seen(a, s, task, block, seen);
  int donor = -1;
  for (int c = 0; c < block.num_columns && donor < 0; ++c)
    if (seen[c / W][c % W]) donor = c;
  if (donor < 0) return false;
  for (int c = 0; c < block.num_columns; ++c)
    if (!seen[c / W][c % W]) {
      block.v_offset[c] = block.v_offset[donor];
      if (a.k_scales) block.k_scale[c] = block.k_scale[donor];
      if (a.v_scales) block.v_scale[c] = block.v_scale[donor];
    }
  return true;
}

}  // namespace
