// What the backward needs of each row before anything else, in one pass over dout and out.
#pragma once

#include "../core/backward.h"
#include "../core/mask.h"

namespace {

using paged_attn::Backward;

// The sum of dout * out. Where out is 0 the product counts as 0, even if dout is NaN: the out of a
// row that sees no key is all zeros.
template <class T>
PAGED_ATTN_INLINE float dot_rows(const T* dout, const T* out, int64_t head_dim, bool* all_zero) {
  F sum = {};
  I any = {};
  for (int64_t d = 0; d < head_dim; d += W) {
    const int n = int(min64(W, head_dim - d));
    const F x = n == W ? load(dout + d) : load(dout + d, n);
    const F y = n == W ? load(out + d) : load(out + d, n);
    const I used = (I)(y != F{});
    any |= used;
    sum += select(used, x * y, F{});
  }
  *all_zero = reduce_max(select(any, set1(1.f), F{})) == 0;
  return reduce_add(sum);
}

// Whether a query sees one of keys [begin, end), which positions let it see.
inline bool sees_one_of(const Attention& a, const ScoreRow& row, int64_t begin, int64_t end) {
  ScoreRow part = row;
  part.visible.begin = max64(begin, row.visible.begin);
  part.visible.end = min64(end, row.visible.end);
  for (int64_t key = part.visible.begin; key < part.visible.end; key += W) {
    const I seen = (I)(finish_logits(a, part, key, F{}) != set1(-INFINITY));
    if (reduce_max(select(seen, set1(1.f), F{})) > 0) return true;
  }
  return false;
}

// Whether a query sees a key, whatever bias, mask or layout there is.
PAGED_ATTN_APART bool sees_a_key(const Attention& a, const Sequence& s, int64_t token,
                                 int64_t head) {
  if (a.selection.enabled) {
    const int64_t list = list_of(a, head / a.group_size);
    ListedKeys names = listed_keys(a, s, token, list, 0, list_length(a, s.q_start + token, list));
    return next_unit(names);
  }
  const ScoreRow row = score_row(a, s, token, head);
  if (row.visible.end == 0) return false;
  if (!a.layout.crow) return sees_one_of(a, row, row.visible.begin, row.visible.end);
  const int64_t layout_head = head / a.group_size * a.layout.num_heads / a.num_groups;
  const int64_t size = a.layout.k_block_size;
  int64_t count;
  const auto columns =
      layout_row(a.layout, s.index, layout_head, (s.past + token) / a.layout.q_block_size, &count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t first = int64_t(read_once(columns + i * a.layout.col_entry)) * size;
    if (sees_one_of(a, row, first, first + size)) return true;
  }
  return false;
}

inline void row_statistics(const Backward& b, const Sequence& s, int64_t token, int64_t head) {
  const Attention& a = b.forward;
  const int64_t row = s.q_start + token, place = head * a.total_q + row;
  const float lse = b.lse(head, row);
  float delta = b.dlse ? -b.dlse(head, row) : 0.f;
  bool all_zero = false;
  if (lse != -INFINITY) {
    with_type(a.q_dtype, [&](auto tag) __attribute__((always_inline)) {
      typedef typename decltype(tag)::type T;
      delta += dot_rows((const T*)b.dout + row * b.dout_stride_token + head * b.dout_stride_head,
                        (const T*)b.out + row * b.out_stride_token + head * b.out_stride_head,
                        a.head_dim_v, &all_zero);
    });
  } else {
    delta = 0;
  }
  const KeyRange visible = visible_keys(a, s, token);
  bool sees_keys = lse != -INFINITY && visible.end > 0;
  const float lse_2 = base_2(lse);
  if (a.sinks) {
    const float sink = a.sinks(head);
    // either all keys are hidden, or their weights are too small beside the sink, or dropped
    if (all_zero && lse == sink) sees_keys = sees_keys && sees_a_key(a, s, token, head);
    if (b.dsink) b.dsink[place] = lse == -INFINITY ? 0.f : -exp2(base_2(sink) - lse_2) * delta;
  }
  b.lse_2[place] = sees_keys ? lse_2 : INFINITY;
  b.delta[place] = delta;
}

// Statistics of query tokens [begin, end) of a sequence.
void backward_statistics(const Backward& b, int64_t sequence, int64_t begin, int64_t end) {
  const Sequence s = sequence_at(b.forward, sequence);
  for (int64_t token = begin; token < end; ++token)
    for (int64_t head = 0; head < b.forward.num_heads; ++head) row_statistics(b, s, token, head);
}

}  // namespace
