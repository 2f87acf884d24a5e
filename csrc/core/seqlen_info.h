// Where a sequence's tokens and keys lie, and which keys a query may see.
#pragma once

#include "attention.h"

namespace {

using paged_attn::Attention;

struct Sequence {
  int64_t index;
  int64_t q_start, q_len;
  int64_t k_start, k_len;  // k_start counts tokens of packed keys
  int64_t past;            // position of query token 0, Lk - Lq unless it is given; may be negative
};

struct KeyRange {
  int64_t begin, end;
};

PAGED_ATTN_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
PAGED_ATTN_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
PAGED_ATTN_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

PAGED_ATTN_INLINE Sequence sequence_at(const Attention& a, int64_t b) {
  Sequence s;
  s.index = b;
  s.q_start = a.cu_seqlens_q(b);
  s.q_len = int64_t(a.cu_seqlens_q(b + 1)) - s.q_start;
  if (a.cu_seqlens_k) {
    s.k_start = a.cu_seqlens_k(b);
    s.k_len = int64_t(a.cu_seqlens_k(b + 1)) - s.k_start;
  } else {
    s.k_start = s.q_start;
    s.k_len = s.q_len;
  }
  if (a.seqused_k) s.k_len = a.seqused_k(b);
  if (a.k_start) s.k_start = a.k_start(b);
  if (a.selection.enabled && a.selection.is_slots) s.k_len = a.num_pages * a.page_size;
  s.past = a.q_position ? a.q_position(b) : s.k_len - s.q_len;
  return s;
}

// The number of a key's page in its sequence.
PAGED_ATTN_INLINE int64_t page_of(const Attention& a, int64_t key) {
  return a.page_shift >= 0 ? key >> a.page_shift : key / a.page_size;
}

// The position of a key: its own number, unless keys are dealt out over ranks.
PAGED_ATTN_INLINE int64_t key_position(const Attention& a, int64_t key) {
  if (a.key_span == a.key_run) return key;
  return key / a.key_run * a.key_span + a.key_offset + key % a.key_run;
}

// How many of a sequence's keys have positions before this one.
PAGED_ATTN_INLINE int64_t keys_before(const Attention& a, const Sequence& s, int64_t position) {
  if (position <= 0) return 0;
  if (a.key_span != a.key_run) {
    const int64_t rest = position % a.key_span - a.key_offset;
    position = position / a.key_span * a.key_run + max64(0, min64(rest, a.key_run));
  }
  return min64(position, s.k_len);
}

// Keys of a sequence from `left` keys before the first position to `right` keys after the last one,
// without a limit where that is -1.
PAGED_ATTN_INLINE KeyRange keys_between(const Attention& a, const Sequence& s, int64_t first,
                                        int64_t last, int64_t left, int64_t right) {
  KeyRange keys = {0, s.k_len};
  if (left >= 0) keys.begin = keys_before(a, s, first - left);
  if (right >= 0) keys.end = keys_before(a, s, last + right + 1);
  if (keys.end <= keys.begin) return {0, 0};
  return keys;
}

// Keys that query tokens [first, last] of a sequence may see, whatever a bias or a layout hides.
// Every key of the range is seen by at least one of the tokens.
PAGED_ATTN_INLINE KeyRange visible_keys(const Attention& a, const Sequence& s, int64_t first,
                                        int64_t last) {
  int64_t first_position = s.past + first, last_position = s.past + last;
  if (a.layout.crow) {  // a block layout has no row for a negative position
    if (last_position < 0) return {0, 0};
    first_position = max64(first_position, 0);
  }
  return keys_between(a, s, first_position, last_position, a.window_left, a.window_right);
}

PAGED_ATTN_INLINE KeyRange visible_keys(const Attention& a, const Sequence& s, int64_t token) {
  return visible_keys(a, s, token, token);
}

}  // namespace
