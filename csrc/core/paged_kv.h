// Walks the keys of a task in blocks of columns, and says where in memory each column's key lies.
//
// A block is made of segments, runs of consecutive keys. Segments start at multiples of ALIGN in
// both keys and columns. A column that no query of the task may see gets the address of one that
// some query may see, so that kernels load whole vectors of columns and touch no memory outside the
// keys.
#pragma once

#include "selected_keys.h"

namespace {

constexpr int ALIGN = 16;
constexpr int MAX_COLUMNS = 128;   // of a block that the forward walks over
constexpr int MOST_COLUMNS = 256;  // that a block has room for: a key tile of the backward's
constexpr int CACHE_LINE = 64;

// Floats of one row in a partial result: the accumulator, m, l.
PAGED_ATTN_INLINE int64_t partial_row_floats(const Attention& a) {
  return round_up(a.head_dim_v, ALIGN) + 2;
}

struct Segment {
  int64_t key;  // of the first column
  int begin, end;
  KeyRange listed;  // of a block layout over keys that are dealt out: those of its block
};

struct KeyBlock {
  int num_columns, num_segments;
  Segment segments[MOST_COLUMNS / ALIGN];
  int64_t k_offset[MOST_COLUMNS], v_offset[MOST_COLUMNS];  // in elements; the head is added later
  int64_t k_scale[MOST_COLUMNS], v_scale[MOST_COLUMNS];    // the same of scales by token
};

// Gives columns [begin, end) of a block the addresses of column `from`.
PAGED_ATTN_INLINE void repeat_column(const Attention& a, KeyBlock& block, int from, int begin,
                                     int end) {
  for (int c = begin; c < end; ++c) {
    block.k_offset[c] = block.k_offset[from];
    block.v_offset[c] = block.v_offset[from];
    if (a.k_scales) block.k_scale[c] = block.k_scale[from];
    if (a.v_scales) block.v_scale[c] = block.v_scale[from];
  }
}

struct KeyWalk {
  const Attention* attention;
  const Sequence* sequence;
  KeyRange visible;        // of all query tokens of the task
  int64_t part, part_end;  // next key (dense) or layout entry, and the end of the task's share
  int64_t next_key;        // within the current layout entry, -1 before it is entered
  const int32_t* columns;
  int max_columns;
  // of lists of keys, whose tasks count their keys from 0: what the list names
  ListedKeys listed;
};

// Metadata that a guard has checked may have changed when it is read again, if another thread
// writes it. Lengths are copied. Page ids and layouts may be many, so they are not: what is read
// here is clamped instead, and a call stays within its memory whatever the values are.
PAGED_ATTN_INLINE int64_t page_at(const Attention& a, int64_t sequence, int64_t entry) {
  return min64(uint32_t(read_once(a.block_table.at(sequence, entry))), a.num_pages - 1);
}

PAGED_ATTN_INLINE const int32_t* layout_row(const paged_attn::BlockLayout& l, int64_t sequence,
                                            int64_t head, int64_t row, int64_t* count) {
  const int32_t* crow = l.crow + sequence * l.crow_batch + head * l.crow_head + row * l.crow_row;
  const int64_t begin = min64(uint32_t(read_once(crow)), l.nnz);
  *count = max64(min64(uint32_t(read_once(crow + l.crow_row)), l.nnz) - begin, 0);
  return l.col + sequence * l.col_batch + head * l.col_head + begin * l.col_entry;
}

// The walk over keys that a list names; `s` has them as its own.
PAGED_ATTN_INLINE KeyWalk walk_listed(const Attention& a, const Sequence& s,
                                      const ListedKeys& listed, int max_columns) {
  KeyWalk walk;
  walk.attention = &a;
  walk.sequence = &s;
  walk.part = 0;
  walk.part_end = s.k_len;
  walk.max_columns = max_columns;
  walk.listed = listed;
  return walk;
}

PAGED_ATTN_INLINE KeyWalk walk_keys(const Attention& a, const Sequence& s,
                                    const paged_attn::Task& task, int max_columns) {
  if (a.selection.enabled)
    return walk_listed(a, s,
                       listed_keys(a, sequence_at(a, s.index), task.token_begin,
                                   list_of(a, task.group_begin), task.part_begin, task.part_end),
                       max_columns);
  KeyWalk walk;
  walk.attention = &a;
  walk.sequence = &s;
  walk.visible = visible_keys(a, s, task.token_begin, task.token_end - 1);
  walk.max_columns = max_columns;
  walk.columns = nullptr;
  walk.part = task.part_begin;
  walk.part_end = task.part_end;
  walk.next_key = -1;
  if (a.layout.crow) {
    if (walk.visible.end == 0) {
      walk.part_end = walk.part;
      return walk;
    }
    // all tokens of a task share a layout row; negative positions have none and see nothing
    const int64_t row = (s.past + task.token_end - 1) / a.layout.q_block_size;
    const int64_t head = task.group_begin * a.layout.num_heads / a.num_groups;
    int64_t count;
    walk.columns = layout_row(a.layout, s.index, head, row, &count);
    walk.part_end = min64(walk.part_end, count);
  } else {
    walk.part = max64(walk.part, walk.visible.begin);
    walk.part_end = min64(walk.part_end, walk.visible.end);
  }
  return walk;
}

// Addresses of a run of tokens, from `first` of a page on.
template <class Memory>
PAGED_ATTN_INLINE void locate_run(const Memory& x, int64_t page, int64_t first, int64_t run,
                                  int64_t* offset) {
  const int64_t start = page * x.stride_page + first * x.stride_token;
  for (int64_t i = 0; i < run; ++i) offset[i] = start + i * x.stride_token;
}

PAGED_ATTN_INLINE void locate_run(const Attention& a, int64_t page, int64_t first, int64_t run,
                                  KeyBlock& block, int column) {
  locate_run(a.k, page, first, run, block.k_offset + column);
  locate_run(a.v, page, first, run, block.v_offset + column);
  if (a.k_scales) locate_run(a.k_scales, page, first, run, block.k_scale + column);
  if (a.v_scales) locate_run(a.v_scales, page, first, run, block.v_scale + column);
}

// The addresses of keys [key, end) of a sequence, in elements, for columns of a block.
PAGED_ATTN_INLINE void locate_keys(const Attention& a, const Sequence& s, int64_t key, int64_t end,
                                   KeyBlock& block, int column) {
  if (a.page_size == 0) return locate_run(a, 0, s.k_start + key, end - key, block, column);
  const bool is_slots = a.selection.enabled && a.selection.is_slots;
  int64_t entry = page_of(a, key), slot = key - entry * a.page_size;
  for (; key < end; ++entry, slot = 0) {
    const int64_t page = is_slots ? entry : page_at(a, s.index, entry);
    const int64_t run = min64(end - key, a.page_size - slot);
    locate_run(a, page, slot, run, block, column);
    key += run;
    column += int(run);
  }
}

// Adds a segment of so many columns, the first of which is `key`, with the addresses of the keys in
// `seen`.
PAGED_ATTN_INLINE void place_segment(const KeyWalk& walk, KeyBlock& block, int64_t key, int columns,
                                     KeyRange seen) {
  const Attention& a = *walk.attention;
  Segment& segment = block.segments[block.num_segments++];
  segment.key = key;
  segment.begin = block.num_columns;
  segment.end = block.num_columns + columns;
  segment.listed = seen;
  const int head = segment.begin + int(seen.begin - key);
  const int tail = segment.begin + int(seen.end - key);
  locate_keys(a, *walk.sequence, seen.begin, seen.end, block, head);
  repeat_column(a, block, head, segment.begin, head);
  repeat_column(a, block, tail - 1, tail, segment.end);
  block.num_columns = segment.end;
}

// Adds to a block as many of keys [key, end) as fit; returns the first key that does not.
PAGED_ATTN_INLINE int64_t place_keys(const KeyWalk& walk, KeyBlock& block, int64_t key,
                                     int64_t end) {
  const int64_t first = key / ALIGN * ALIGN;
  int64_t room = walk.max_columns - block.num_columns;
  // blocks end at the same keys wherever they begin
  if (walk.attention->batch_invariant) room = min64(room, MAX_COLUMNS - first % MAX_COLUMNS);
  const int columns = int(min64(round_up(end - first, ALIGN), room));
  const int64_t stop = min64(end, first + columns);
  place_segment(walk, block, first, columns, {key, stop});
  return stop;
}

// The next block of keys that a list names: as many as fit, beside each other.
inline bool next_listed_block(KeyWalk& walk, KeyBlock& block) {
  block.num_columns = block.num_segments = 0;
  if (walk.part >= walk.part_end) return false;
  const Attention& a = *walk.attention;
  const int count = int(min64(walk.part_end - walk.part, walk.max_columns));
  int c = 0;
  while (c < count) {
    KeyRange& keys = walk.listed.keys;
    if (keys.begin >= keys.end && !next_unit(walk.listed)) break;
    const int64_t end = min64(keys.end, keys.begin + count - c);
    locate_keys(a, *walk.sequence, keys.begin, end, block, c);
    c += int(end - keys.begin);
    keys.begin = end;
  }
  // the list is shorter than it was when its keys were counted: another thread has written it
  if (c == 0) {
    block.k_offset[c] = block.v_offset[c] = block.k_scale[c] = block.v_scale[c] = 0;
    ++c;
  }
  block.num_columns = int(round_up(count, ALIGN));
  repeat_column(a, block, c - 1, c, block.num_columns);
  block.segments[block.num_segments++] = {walk.part, 0, block.num_columns, {}};
  walk.part += count;
  return true;
}

// The next block of the task, or false when there is none.
inline bool next_block(KeyWalk& walk, KeyBlock& block) {
  const Attention& a = *walk.attention;
  if (a.selection.enabled) return next_listed_block(walk, block);
  block.num_columns = block.num_segments = 0;
  if (!a.layout.crow) {
    if (walk.part >= walk.part_end) return false;
    walk.part = place_keys(walk, block, walk.part, walk.part_end);
    return true;
  }
  const int64_t size = a.layout.k_block_size;
  while (walk.part < walk.part_end && block.num_columns < walk.max_columns) {
    const Sequence& s = *walk.sequence;
    int64_t first = read_once(walk.columns + walk.part * a.layout.col_entry) * size;
    int64_t stop = first + size;
    if (a.key_span != a.key_run) {
      stop = keys_before(a, s, stop);
      first = keys_before(a, s, first);
    }
    const int64_t end = min64(stop, walk.visible.end);
    const int64_t key = walk.next_key >= 0 ? walk.next_key : max64(first, walk.visible.begin);
    if (key < end) walk.next_key = place_keys(walk, block, key, end);
    if (key >= end || walk.next_key >= end) ++walk.part, walk.next_key = -1;
    // one block for each entry, so that no sum depends on which other entries there are
    if (a.batch_invariant && block.num_columns > 0) break;
  }
  return block.num_columns > 0;
}

}  // namespace
