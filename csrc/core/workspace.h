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

}  // namespace
