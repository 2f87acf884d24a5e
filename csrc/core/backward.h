// What the backward of one attention call works on: plain pointers and element strides, no torch.
#pragma once

#include "attention.h"

namespace paged_attn {

// Keys of a task. Their gradients are summed in float32 in the caches of a core.
constexpr int KEY_TILE = 256;

// Query tokens of a sequence under the heads of a group: row r is token r / group_size under head
// r % group_size.
struct QueryTile {
  int32_t token_begin, token_end;
  int32_t row;        // of the block layout; -1 before position 0
  int64_t first_row;  // among the sums of the sequence's rows under one group
};

// A row of the block layout that lists columns of a key tile.
struct LayoutEntry {
  int32_t row;          // counted from the sequence's first one
  int32_t rank, count;  // number of this key tile among those that the row lists; how many it lists
  uint32_t granules;    // bit i: columns [i, i + 1) * ALIGN of the key tile are listed
};

struct BackwardSequence {
  int64_t tiles, num_tiles;  // its first tile in Backward::tiles, and how many it has
  int64_t rows;              // of one group's sums; whole register tiles
  int64_t sums, turns;       // of its first group: its first row of sums, its first turn
  int64_t num_key_tiles;
  // With a block layout: how many of its rows the sequence's queries have; and the place of this
  // sequence's numbers in arrays of Backward. `row_tiles`: the first query tile of each row, and
  // the number of tiles. `lists`, (layout head, key tile): where the list of entries begins.
  // `row_counts`, (layout head, row): how many key tiles the row lists.
  int64_t num_rows, row_tiles, lists, row_counts;
};

struct Backward {
  Attention forward;  // without results

  const void *dout, *out;  // q's dtype
  int64_t dout_stride_token, dout_stride_head, out_stride_token, out_stride_head;
  Strided<float> lse, dlse;  // (head, token)

  // results that are asked for, contiguous; a bias of one head has a dbias_stride_head of 0
  void *dq, *dk, *dv, *dbias;
  int64_t dbias_stride_head, dbias_stride_query;
  // Where sequences share keys: the row of dk and dv, in float32, where each one's part begins.
  const int64_t* part_rows;

  // Of each (head, token): lse in base 2, +inf if no key gets a gradient from it;
  // rowsum(dout * out) - dlse; its part of the gradient of the sink.
  float *lse_2, *delta, *dsink;
  float* dq_sums;     // (row of a group, head_dim in whole vectors)
  float* dbias_sums;  // of a bias of one head; the result itself in float32
  // How many key tiles have added their part of dQ to a query tile of a group. The next one in
  // order waits for that number.
  int32_t* turns;
  // With a bias of one head, tasks that are done, by (sequence, KV head, key tile): a key tile's
  // heads add to its gradient in order.
  int32_t* done;

  int64_t tile_rows;  // of the largest query tile
  const BackwardSequence* sequences;
  const QueryTile* tiles;
  const int32_t *row_tiles, *row_counts;
  const int64_t* lists;
  const LayoutEntry* entries;
  int64_t listed_rows;  // rows of keys of a task, at most; with lists of keys
};

// The keys of one tile under one KV head, with all queries that see them. It waits only for tasks
// that come before it in the plan.
struct BackwardTask {
  int32_t sequence, kv_head, key_tile;
  int64_t done;  // its place in Backward::done; the KV head before it is `done_before`, or -1
  int64_t done_before;
  // With lists of keys: query tokens, whose gradients a task computes; or rows of packed keys, with
  // all queries that list them.
  int32_t token_begin, token_end;
  int64_t rows_begin, rows_end;
};

}  // namespace paged_attn
