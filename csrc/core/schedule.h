// Cuts one attention call into tasks.
//
// Tiles and splits follow from a sequence's own lengths, the call's static shapes and the instruction
// set alone, never from threads, batch or hints: what a sequence computes, and in which order, is the same in any
// company. Only how many heads share a task depends on the machine, and no result depends on that.
#pragma once

#include <vector>

#include "attention.h"

namespace paged_attn {

// Multiply-adds below which a call is over before a second thread has woken up.
constexpr int64_t WORTH_SHARING = 1 << 18;

struct Plan {
  std::vector<Task> tasks;        // the longest first
  std::vector<MergeTask> merges;  // run when as many tasks as they have splits are done
  int64_t partial_floats;
  int64_t few_rows, few_groups, tile_rows;  // of the largest task of either engine
  int64_t cost;                             // of all tasks, in multiply-adds
};

// The limits, which tiles keep about, are those of the engines that serve the call.
void make_plan(const Attention&, const RowLimits&, int64_t threads, Plan&);

}  // namespace paged_attn
