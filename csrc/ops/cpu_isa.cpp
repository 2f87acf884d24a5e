#include <torch/csrc/stable/library.h>

#include <string>

#include "../dispatch.h"
#include "../kernels.h"

namespace {

std::string cpu_isa() { return paged_attn::kernels().name; }
std::string cpu_isas() { return paged_attn::available_names(); }
std::string cpu_isas_missing() { return paged_attn::missing_names(); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
  m.impl("cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("cpu_isas_missing", TORCH_BOX(&cpu_isas_missing));
}
