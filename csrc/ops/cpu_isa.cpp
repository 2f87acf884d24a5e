#include <torch/csrc/stable/library.h>

#include <string>

#include "../kernels.h"

namespace {

std::string cpu_isa() { return paged_attn::kernels().name; }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}
