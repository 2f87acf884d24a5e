// Which query tiles see some of a task's key tile, in which order they come, and where its keys
// lie.
#pragma once

#include "../core/key_loop.h"
#include "../core/product.h"
#include "backward_rows.h"

namespace {

using paged_attn::BackwardSequence;
using paged_attn::BackwardTask;
using paged_attn::QueryTile;

// Runs of columns begin and end at multiples of this: whole steps of a product along columns.
template <class Product>
constexpr int RUN_STEP =
    Product::GRAIN * Product::DEPTH > ALIGN ? Product::GRAIN* Product::DEPTH : ALIGN;
// The task's keys, and what a query tile sees of them.
struct KeyTile {
  int64_t begin, end;  // keys
  KeyBlock block;      // a query tile's segments, runs of listed columns
  Columns runs[KEY_TILE / ALIGN];
  int num_runs;
};

// Finds the columns that a query tile may see, of those that are listed. False if there are none.
template <class Product>
PAGED_ATTN_INLINE bool see_columns(const Attention& a, const Sequence& s, const QueryTile& tile,
                                   uint32_t granules, KeyTile& keys) {
  const KeyRange visible = visible_keys(a, s, tile.token_begin, tile.token_end - 1);
  const int begin = int(max64(visible.begin - keys.begin, 0));
  const int end = int(min64(visible.end, keys.end) - keys.begin);
  keys.num_runs = keys.block.num_segments = 0;
  for (int c = begin / ALIGN * ALIGN; c < end; c += ALIGN) {
    if (!(granules >> c / ALIGN & 1)) continue;
    KeyBlock& block = keys.block;
    if (block.num_segments > 0 && block.segments[block.num_segments - 1].end == c)
      block.segments[block.num_segments - 1].end = c + ALIGN;
    else
      block.segments[block.num_segments++] = {keys.begin + c, c, c + ALIGN};
  }
  for (int i = 0; i < keys.block.num_segments; ++i) {
    const Segment& segment = keys.block.segments[i];
    constexpr int STEP = RUN_STEP<Product>;
    const int first = segment.begin / STEP * STEP, last = int(round_up(segment.end, STEP));
    if (keys.num_runs > 0 && keys.runs[keys.num_runs - 1].end >= first)
      keys.runs[keys.num_runs - 1].end = last;
    else
      keys.runs[keys.num_runs++] = {first, last, 0};
  }
  uint32_t listed = 0;
  for (int i = 0; i < keys.block.num_segments; ++i)
    for (int c = keys.block.segments[i].begin; c < keys.block.segments[i].end; c += ALIGN)
      listed |= 1u << c / ALIGN;
  for (int i = 0; i < keys.num_runs; ++i) keys.runs[i].granules = listed;
  return keys.num_runs > 0;
}

// Calls f(group, tile index in the sequence, listed granules, rank, count) for each query tile that
// the layout or the mask lets see some of a key tile, the last tokens first: under a causal mask
// tasks that run at the same time then never wait for each other.
template <class Function>
PAGED_ATTN_INLINE void for_each_tile(const Backward& b, const Sequence& s, const BackwardTask& task,
                                     Function f) {
  const Attention& a = b.forward;
  const BackwardSequence& x = b.sequences[task.sequence];
  const int64_t groups = a.num_groups / a.num_kv_heads;
  for (int64_t group = task.kv_head * groups; group < (task.kv_head + 1) * groups; ++group) {
    if (!a.layout.crow) {
      for (int64_t i = x.num_tiles; i-- > 0;) {
        const QueryTile& tile = b.tiles[x.tiles + i];
        const KeyRange keys = visible_keys(a, s, tile.token_begin, tile.token_end - 1);
        const int64_t first = keys.begin / KEY_TILE, end = (keys.end + KEY_TILE - 1) / KEY_TILE;
        if (task.key_tile >= first && task.key_tile < end)
          f(group, i, ~0u, task.key_tile - first, end - first);
      }
      continue;
    }
    const int64_t head = group * a.layout.num_heads / a.num_groups;
    const int64_t* list = b.lists + x.lists + head * (x.num_key_tiles + 1) + task.key_tile;
    for (int64_t i = list[1]; i-- > list[0];) {
      const paged_attn::LayoutEntry& entry = b.entries[i];
      const int32_t* tiles = b.row_tiles + x.row_tiles + entry.row;
      for (int64_t j = tiles[1]; j-- > tiles[0];)
        f(group, j, entry.granules, entry.rank, entry.count);
    }
  }
}

// Finds the addresses of keys, by columns. A key that no query sees gets the address of one that is
// seen: its probabilities are 0, but its own numbers may be NaN. False if none is seen.
template <class Product>
inline bool find_keys(const Backward& b, const Sequence& s, const BackwardTask& task,
                      KeyTile& keys) {
  const Attention& a = b.forward;
  I seen[KEY_TILE / W] = {};
  for_each_tile(b, s, task,
                [&](int64_t group, int64_t i, uint32_t granules, int64_t, int64_t)
                    __attribute__((always_inline)) {
                      const QueryTile& tile = b.tiles[b.sequences[task.sequence].tiles + i];
                      if (!see_columns<Product>(a, s, tile, granules, keys)) return;
                      if (has_holes(a)) {
                        paged_attn::Task rows = {};
                        rows.token_begin = tile.token_begin;
                        rows.token_end = tile.token_end;
                        rows.group_begin = int32_t(group);
                        return mark_seen(a, s, rows, keys.block, seen);
                      }
                      KeyRange visible = visible_keys(a, s, tile.token_begin, tile.token_end - 1);
                      visible = {max64(visible.begin, keys.begin), min64(visible.end, keys.end)};
                      for (int j = 0; j < keys.block.num_segments; ++j) {
                        const Segment& segment = keys.block.segments[j];
                        for (int c = segment.begin; c < segment.end; c += W)
                          seen[c / W] |= lanes_in(visible, keys.begin + c);
                      }
                    });
  int donor = -1;
  for (int c = 0; c < KEY_TILE && donor < 0; ++c)
    if (seen[c / W][c % W]) donor = c;
  if (donor < 0) return false;
  for (int c = 0; c < KEY_TILE; ++c) {
    const int64_t key = s.k_start + keys.begin + (seen[c / W][c % W] ? c : donor);
    keys.block.k_offset[c] = key * a.k.stride_token;
    keys.block.v_offset[c] = key * a.v.stride_token;
  }
  return true;
}

}  // namespace
