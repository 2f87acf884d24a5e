// The one loop over the keys of a task, which every engine of the forward runs.
#pragma once

#include "mask.h"

namespace {

// The row of scores of a task's row under a group.
PAGED_ATTN_INLINE ScoreRow row_of(const Attention& a, const Sequence& s,
                                  const paged_attn::Task& task, int64_t group, int64_t row) {
  return score_row(a, s, token_of(a, task, row), head_of(a, group, row));
}

// Calls attend(block, next, more) for the blocks of a task's keys in their order, without those of
// which no row sees a key. `next` is the block after it, empty if there is no `more`.
template <class Function>
PAGED_ATTN_INLINE void for_each_block(const Attention& a, const Sequence& s,
                                      const paged_attn::Task& task, int columns, Function attend) {
  KeyBlock blocks[2];
  KeyWalk walk = walk_keys(a, s, task, columns);
  bool more = next_block(walk, blocks[0]);
  for (int i = 0; more; i ^= 1) {
    more = next_block(walk, blocks[i ^ 1]);
    if (has_holes(a) && !borrow_hidden_values(a, s, task, blocks[i])) continue;
    attend(blocks[i], blocks[i ^ 1], more);
  }
}

}  // namespace
