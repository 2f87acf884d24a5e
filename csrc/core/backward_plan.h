// Cuts the backward of one attention call into tasks.
//
// Key tiles lie at multiples of KEY_TILE and query tiles follow from a sequence's own lengths and
// static shapes alone. A key tile's gradients are summed over query tiles in a fixed order by one
// task; a query tile's over key tiles in ascending order, whoever computes them: each waits for its
// turn. So no bit depends on threads or batch, and every product is computed once.
#pragma once

#include <vector>

#include "backward.h"

namespace paged_attn {

struct BackwardPlan {
  std::vector<BackwardTask> tasks;  // in an order in which no task waits for a later one
  std::vector<BackwardSequence> sequences;
  std::vector<QueryTile> tiles;
  std::vector<int32_t> row_tiles, row_counts;
  std::vector<int64_t> lists;
  std::vector<LayoutEntry> entries;
  int64_t sum_rows, turns, done;  // how many there are
  int64_t rows;                   // of the largest tile
  int64_t cost;                   // of all tasks, in multiply-adds
};

// `ordered_heads`: KV heads add to one gradient, in order.
void make_backward_plan(const Attention&, int64_t threads, bool ordered_heads, BackwardPlan&);

// Lets the tasks find their tiles and lists.
void follow_plan(const BackwardPlan&, Backward&);

// Gradients of rows that are no sequence's: queries past the last one, keys that are not in use.
void zero_unused(const Backward&, int64_t total_k);

// Each head's sum over all tokens, in their order, when the statistics are there.
void sum_sinks(const Backward&, float* dsinks);

}  // namespace paged_attn
