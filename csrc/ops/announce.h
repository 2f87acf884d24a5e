// Has Python log, once, which kernels the calls of an op take.
#pragma once

#include <atomic>

namespace paged_attn {

// One kind of calls of an op, a static object: `once` logs it at the first call, and later only
// reads a flag.
class Announced {
 public:
  void once(const char* op, bool has_pairs) {
    if (said_.load(std::memory_order_relaxed) || said_.exchange(true)) return;
    say(op, has_pairs);
  }

 private:
  static void say(const char* op, bool has_pairs);
  std::atomic<bool> said_{false};
};

}  // namespace paged_attn
