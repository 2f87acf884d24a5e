#include <torch/csrc/stable/library.h>

#include "attention_call.h"

namespace {

void blocksparse(StableIValue* stack, uint64_t num_args, uint64_t) {
  paged_attn::attention("blocksparse", /*has_layout=*/true, stack, num_args);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("blocksparse", &blocksparse); }
