#include <torch/csrc/stable/library.h>

#include "attention_call.h"

namespace {

void selected_attention(StableIValue* stack, uint64_t num_args, uint64_t) {
  paged_attn::attention("selected_attention", paged_attn::Form::lists, stack, num_args);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("selected_attention", &selected_attention); }
