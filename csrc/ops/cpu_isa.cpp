#include <torch/csrc/stable/library.h>

#include <cstdint>
#include <string>

#include "../dispatch.h"
#include "../kernels.h"

namespace {

// The texts of the operators of `CPU_TEXTS` in ops/_library.py, which asks for each once.
std::string cpu_text(int64_t place) {
  switch (place) {
    case 0: return paged_attn::kernels().name;
    case 1: return paged_attn::available_names();
    default: return paged_attn::missing_names();
  }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_text", TORCH_BOX(&cpu_text));
}
