// The keys that a query token sees of those that its list names, in the order of the list. A task
// has one token and takes these keys for a sequence of their own, whose keys are all visible.
#pragma once

#include "seqlen_info.h"

namespace {

using paged_attn::read_once;

struct ListedKeys {
  const int32_t* units;
  int64_t stride, entry, end;  // the next entry, and the one where the walk ends
  int64_t unit_size;
  int64_t unit;      // the present one
  KeyRange visible;  // of the token, whatever its list names
  KeyRange keys;     // that are left of the present unit
};

PAGED_ATTN_INLINE int64_t list_of(const Attention& a, int64_t group) {
  return group * a.selection.num_lists / a.num_groups;
}

// How many entries of a list are read. `row` is a row of q.
PAGED_ATTN_INLINE int64_t list_length(const Attention& a, int64_t row, int64_t list) {
  const paged_attn::Selection& x = a.selection;
  if (!x.counts) return x.num_entries;
  return min64(max64(read_once(x.counts.at(row, list)), 0), x.num_entries);
}

// Keys of a sequence that a token sees, whatever its list names.
PAGED_ATTN_INLINE KeyRange keys_of_token(const Attention& a, const Sequence& s, int64_t token) {
  const int64_t position = s.past + token;
  return keys_between(a, s, position, position, a.selection.window_left, a.selection.window_right);
}

// The keys that entries [begin, end) of a token's list name. Entries may change while they are
// read, if another thread writes them: whatever they are, these keys exist.
PAGED_ATTN_INLINE ListedKeys listed_keys(const Attention& a, const Sequence& s, int64_t token,
                                         int64_t list, int64_t begin, int64_t end) {
  const paged_attn::Selection& x = a.selection;
  ListedKeys walk;
  walk.units = x.units + (s.q_start + token) * x.stride_token + list * x.stride_list;
  walk.stride = x.stride_entry;
  walk.entry = begin;
  walk.end = end;
  walk.unit_size = x.unit_size;
  walk.visible = keys_of_token(a, s, token);
  walk.visible.end = min64(walk.visible.end, x.reach);
  walk.keys = {0, 0};
  return walk;
}

// Goes on to the next unit of which the token sees a key. False at the end of the list.
PAGED_ATTN_INLINE bool next_unit(ListedKeys& walk) {
  while (walk.entry < walk.end) {
    walk.unit = read_once(walk.units + walk.entry++ * walk.stride);
    if (walk.unit < 0) continue;
    const int64_t first = walk.unit * walk.unit_size;
    walk.keys.begin = max64(first, walk.visible.begin);
    walk.keys.end = min64(first + walk.unit_size, walk.visible.end);
    if (walk.keys.begin < walk.keys.end) return true;
  }
  walk.keys = {0, 0};
  return false;
}

inline int64_t count_keys(ListedKeys walk) {
  int64_t count = 0;
  while (next_unit(walk)) count += walk.keys.end - walk.keys.begin;
  return count;
}

// The sequence whose keys a task attends to.
PAGED_ATTN_INLINE Sequence sequence_of(const Attention& a, const paged_attn::Task& task) {
  Sequence s = sequence_at(a, task.sequence);
  if (!a.selection.enabled) return s;
  s.k_len = count_keys(listed_keys(a, s, task.token_begin, list_of(a, task.group_begin),
                                   task.part_begin, task.part_end));
  return s;
}

}  // namespace
