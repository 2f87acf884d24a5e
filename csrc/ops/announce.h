// The log says once which way calls take: `<op>_announce` is Python's.
#pragma once

#include <atomic>

namespace paged_attn {

// One way that calls of an op take. A static one costs every call but the first a look at a flag.
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
