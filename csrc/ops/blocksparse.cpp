#include <torch/csrc/stable/library.h>

#include "attention_call.h"

namespace {

void blocksparse(StableIValue* stack, uint64_t num_args, uint64_t) {
  paged_attn::attention("blocksparse", paged_attn::Form::layout, stack, num_args);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("blocksparse", &blocksparse); }
