// Cuts a task's scratch memory into arrays that begin with a cache line. Without memory it counts
// how many floats there have to be.
#pragma once

#include "seqlen_info.h"

namespace {

class Workspace {
 public:
  PAGED_ATTN_INLINE explicit Workspace(float* memory) : memory_(memory) {}

  PAGED_ATTN_INLINE float* take(int64_t floats) {
    float* p = memory_ ? memory_ + floats_ : nullptr;
    floats_ += round_up(floats, 16);
    return p;
  }
  PAGED_ATTN_INLINE int64_t floats() const { return floats_; }

 private:
  float* memory_;
  int64_t floats_ = 0;
};

// With the rows of a task, for a running softmax.
struct SoftmaxWorkspace : Workspace {
  using Workspace::Workspace;

  int64_t rows;  // of a group, rounded up to whole register blocks
  int64_t stride_q, stride_acc;
  float *q, *acc, *m, *l, *scores;

  // For `groups` groups: of one, `group_acc` sums; of a row, `lanes` sums of probabilities.
  PAGED_ATTN_INLINE void take_rows(int64_t groups, int64_t group_acc, int64_t lanes,
                                   int64_t score_floats) {
    q = take(groups * rows * stride_q);
    acc = take(groups * group_acc);
    m = take(groups * rows);
    l = take(groups * rows * lanes);
    scores = take(score_floats);
  }
};

}  // namespace
