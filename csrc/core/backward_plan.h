// Cuts the backward of one attention call into tasks.
//
// Key tiles begin at multiples of KEY_TILE; query tiles follow from a sequence's own lengths and
// static shapes alone. One task sums up a key tile's gradients over query tiles, in a fixed order.
// A query tile's gradients are summed up over key tiles by several tasks, in ascending order: each
// task waits for its turn. So no bit depends on threads or batch, and every product is computed
// once.
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
  int64_t listed_rows;            // of keys in a task, with lists of keys
  int64_t cost;                   // of all tasks, in multiply-adds
};

// `ordered_heads`: KV heads add to one gradient, in order.
void make_backward_plan(const Attention&, int64_t threads, bool ordered_heads, BackwardPlan&);

// The same with lists of keys: tasks wait for no other, and compute wanted gradients alone.
void make_backward_plan_of_lists(const Backward&, int64_t total_k, BackwardPlan&);

// Points `Backward` at the plan's tiles and lists, which the tasks use.
void follow_plan(const BackwardPlan&, Backward&);

// Sets the gradients of rows that belong to no sequence to zero: of queries after the last
// sequence, and of keys that no sequence uses.
void zero_unused(const Backward&, int64_t total_k);

// Gradients of the sinks: sums of `Backward::dsink` over all tokens, in their order.
void sum_sinks(const Backward&, float* dsinks);

}  // namespace paged_attn
