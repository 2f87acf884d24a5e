#include <torch/csrc/stable/library.h>

#include "attention_call.h"

namespace {

void flash_varlen(StableIValue* stack, uint64_t num_args, uint64_t) {
  paged_attn::attention("flash_varlen", paged_attn::Form::plain, stack, num_args);
}

void flash_varlen_out(StableIValue* stack, uint64_t num_args, uint64_t) {
  paged_attn::attention_out(stack, num_args);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("flash_varlen", &flash_varlen);
  m.impl("flash_varlen_out", &flash_varlen_out);
}
