#include "dispatch.h"

#include <cstdlib>
#include <stdexcept>
#include <vector>

#include "kernels.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace paged_attn {
namespace {

#if defined(__x86_64__)
// A process gets tile registers from the system, which Linux wants to be asked for.
bool has_amx() {
#if defined(__linux__)
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl, since Linux 5.16
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & BF16) && (edx & TILE) &&
         syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
  return false;
#endif
}
#elif defined(__aarch64__)
bool has_bf16() {
#if defined(__linux__)
  constexpr unsigned long BF16 = 1 << 14;  // HWCAP2_BF16, which older headers lack
  return getauxval(AT_HWCAP2) & BF16;
#elif defined(__APPLE__)
  int has = 0;
  size_t size = sizeof has;
  return sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#else
  return false;
#endif
}
#endif

// From the slowest to the fastest.
std::vector<const Kernels*> available() {
  std::vector<const Kernels*> tables = {&kernels_generic};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c"))
    return tables;
  tables.push_back(&kernels_avx2);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
    tables.push_back(&kernels_avx512);
    if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi")) {
      tables.push_back(&kernels_avx512bf16);
      if (has_amx()) tables.push_back(&kernels_amx);
    }
  }
#elif defined(__aarch64__)
  tables.push_back(&kernels_neon);
  if (has_bf16()) tables.push_back(&kernels_neon_bf16);
#endif
  return tables;
}

const Kernels& choose() {
  const std::vector<const Kernels*> tables = available();
  const char* name = std::getenv("PAGED_ATTN_CPU_ISA");
  if (name == nullptr || *name == '\0') return *tables.back();
  for (const Kernels* table : tables)
    if (std::string(name) == table->name) return *table;
  throw std::runtime_error(
      "paged_attn: PAGED_ATTN_CPU_ISA=" + std::string(name) +
      " is not available here; this machine and build have: " + available_names());
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

std::string available_names() {
  std::string names;
  for (const Kernels* table : available())
    names += (names.empty() ? "" : " ") + std::string(table->name);
  return names;
}

}  // namespace paged_attn
