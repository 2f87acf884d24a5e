// Cuts one attention call into tasks.
//
// Tiles and splits follow from a sequence's own lengths, the call's static shapes and the
// instruction set alone, never from threads, batch or hints: so what is computed for a sequence,
// and in which order, is the same in any batch. Only how many heads share a task depends on the
// machine, and no result depends on that.
#pragma once

#include <vector>

#include "attention.h"

namespace paged_attn {

// A call with fewer multiply-adds ends before a second thread would have woken up.
constexpr int64_t WORTH_SHARING = 1 << 18;

struct Plan {
  std::vector<Task> tasks;        // the longest first
  std::vector<MergeTask> merges;  // each runs when the tasks of all of its splits are done
  int64_t partial_floats;
  int64_t few_rows, few_groups, tile_rows;  // of the largest task of few rows, and of tiles
  int64_t cost;                             // of all tasks, in multiply-adds
};

// `RowLimits` are those of the engines that serve the call. Tiles may have some rows more.
void make_plan(const Attention&, const RowLimits&, int64_t threads, Plan&);

}  // namespace paged_attn
