#include "announce.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <string>

namespace paged_attn {

void Announced::say(const char* op, bool has_pairs) {
  StableIValue stack[] = {torch::stable::detail::from(std::string(op)),
                          torch::stable::detail::from(has_pairs)};
  // no call fails because its log line was lost
  (void)torch_call_dispatcher("paged_attn::cpu_announce", "", stack, TORCH_ABI_VERSION);
}

}  // namespace paged_attn
