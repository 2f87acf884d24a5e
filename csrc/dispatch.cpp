#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "engines.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <errno.h>
#include <time.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace paged_attn {
namespace {

// An instruction set of this processor's architecture: its engines, and why it cannot run here.
struct InstructionSet {
  Engines engines;
  std::string missing;
};

// Engines that are all the same table.
Engines only(const Kernels& k) { return {k.name, &k, &k, &k, &k, &k, &k, &k, &k}; }

// setup.py defines PAGED_ATTN_WITHOUT_<name> for each ISA whose file the compiler refused, or that
// the machine which compiled cannot run.
[[maybe_unused]] std::string not_built(const char* name) {
  return std::string("not built: the compiler refused csrc/isa/") + name +
         ".cpp, or the library was compiled for a processor without it or with better ones"
         " (PAGED_ATTN_BUILD_FOR=all has all of them)";
}

#if defined(__x86_64__)

bool is_vendor(const char* name) {
  unsigned eax, words[3];
  return __get_cpuid(0, &eax, &words[0], &words[2], &words[1]) &&
         !memcmp(words, name, sizeof words);
}

struct Model {
  unsigned family, model;
};
Model model_here() {
  unsigned eax = 0, ebx, ecx, edx;
  __get_cpuid(1, &eax, &ebx, &ecx, &edx);
  const unsigned family = eax >> 8 & 15;
  return {family == 15 ? 15 + (eax >> 20 & 0xff) : family, (eax >> 4 & 15) | (eax >> 12 & 0xf0)};
}

// Family 6 models whose cores have AMX: Sapphire Rapids, Emerald Rapids, Granite Rapids.
bool is_model_with_amx() {
  const Model x = model_here();
  return is_vendor("GenuineIntel") && x.family == 6 &&
         (x.model == 143 || x.model == 207 || x.model == 173 || x.model == 174);
}

// The first-level cache of Zen 4 can wait for few lines at a time. There decode prefetches into the
// second level, which is 1.5 to 1.9 times as fast. On Zen 5 and on Emerald Rapids the first level
// is faster, by a tenth to a quarter.
bool has_slow_first_level() {
  return is_vendor("AuthenticAMD") && model_here().family == 25 &&
         __builtin_cpu_supports("avx512f");  // which Zen 3, of the same family, lacks
}

// Why this process cannot use AMX-BF16; empty if it can. On Linux a process has to ask the system
// for tile registers.
[[maybe_unused]] std::string missing_amx() {
  constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(edx & BF16) || !(edx & TILE)) {
    std::string text = "the processor does not report AMX-BF16";
    if (is_model_with_amx()) text += ", though its model has it: a hypervisor may hide it";
    return text;
  }
#if defined(__linux__)
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl, since Linux 5.16
  if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0) return "";
  const int error = errno;
  return std::string("the processor has it, but the system gives this process no tile registers:") +
         " arch_prctl(ARCH_REQ_XCOMP_PERM) failed with errno " + std::to_string(error) + " (" +
         strerror(error) + ")";
#else
  return "tile registers are asked for on Linux only";
#endif
}

#if !defined(PAGED_ATTN_WITHOUT_avx512) && !defined(PAGED_ATTN_WITHOUT_avx512bf16)

// Seconds that a table takes for some products of bfloat16 numbers: the least of a few
// measurements.
double product_seconds(const Kernels& table) {
  alignas(64) static float memory[3 * SAMPLE_FLOATS];
  double best = 1;
  for (int i = 0; i < 10; ++i) {
    timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int j = 0; j < 50; ++j)
      table.multiply_sample(memory, memory + SAMPLE_FLOATS, memory + 2 * SAMPLE_FLOATS);
    clock_gettime(CLOCK_MONOTONIC, &end);
    const double seconds = double(end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
    best = seconds < best ? seconds : best;
  }
  return best;
}

// Whether VDPBF16PS multiplies faster than float32's multiply-adds. On AMD both start as often; on
// Intel (Cooper Lake to Emerald Rapids) it starts every second cycle, multiply-adds twice a cycle.
bool pairs_pay() {
  if (is_vendor("AuthenticAMD")) return true;
  if (is_vendor("GenuineIntel")) return false;
  return product_seconds(kernels_avx512bf16) < product_seconds(kernels_avx512);
}

#endif
#endif

#if defined(__aarch64__)
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

// From the slowest to the fastest. Which engine serves which calls is written here and nowhere
// else.
std::vector<InstructionSet> find_instruction_sets() {
#if defined(PAGED_ATTN_WITHOUT_generic)
  std::vector<InstructionSet> sets = {{{"generic"}, not_built("generic")}};
#else
  std::vector<InstructionSet> sets = {{only(kernels_generic), ""}};
#endif
#if defined(__x86_64__)
  const std::string absent = "the processor does not have it";
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") &&
                          __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool has_pairs = has_avx512 && __builtin_cpu_supports("avx512bf16") &&
                         __builtin_cpu_supports("avx512vbmi") &&
                         __builtin_cpu_supports("avx512vnni");
#if defined(PAGED_ATTN_WITHOUT_avx2)
  sets.push_back({{"avx2"}, has_avx2 ? not_built("avx2") : absent});
#else
  sets.push_back({only(kernels_avx2), has_avx2 ? "" : absent});
#endif
#if defined(PAGED_ATTN_WITHOUT_avx512)
  sets.push_back({{"avx512"}, has_avx512 ? not_built("avx512") : absent});
#else
  sets.push_back({only(kernels_avx512), has_avx512 ? "" : absent});
#endif
#if defined(PAGED_ATTN_WITHOUT_avx512bf16)
  sets.push_back({{"avx512bf16"}, has_pairs ? not_built("avx512bf16") : absent});
  sets.push_back({{"amx"}, has_pairs ? "not built without avx512bf16" : absent});
#else
  Engines amx = only(kernels_avx512bf16);
  sets.push_back({only(kernels_avx512bf16), has_pairs ? "" : absent});
#if !defined(PAGED_ATTN_WITHOUT_avx512)
  if (has_pairs && !pairs_pay()) {
    std::swap(sets[sets.size() - 1], sets[sets.size() - 2]);
    // with few rows, converting keys takes longer than multiplying them: pairs are still faster
    Engines& avx512 = sets.back().engines;
    avx512.one_row = avx512.int8_rows = avx512.float8_rows = &kernels_avx512bf16;
    amx = avx512;
  }
#endif
  amx.name = "amx";
#if defined(PAGED_ATTN_WITHOUT_amx)
  sets.push_back({amx, not_built("amx")});
#else
  // int8 keys stay with products of 16-bit integers: for tiles they would be converted to bfloat16
  amx.few_rows = amx.float8_rows = amx.tiles = amx.backward = &kernels_amx;
  amx.half_backward = &kernels_amx;
  sets.push_back({amx, has_pairs ? missing_amx() : absent});
#endif
#endif
  for (InstructionSet& set : sets) set.engines.ahead_into_second_level = has_slow_first_level();
#elif defined(__aarch64__)
#if defined(PAGED_ATTN_WITHOUT_neon)
  sets.push_back({{"neon"}, not_built("neon")});
#else
  sets.push_back({only(kernels_neon), ""});
#endif
#if defined(PAGED_ATTN_WITHOUT_neon_bf16)
  sets.push_back({{"neon_bf16"}, not_built("neon_bf16")});
#else
  sets.push_back({only(kernels_neon_bf16), has_bf16() ? "" : "the processor does not have it"});
#endif
#endif
  return sets;
}

const std::vector<InstructionSet>& instruction_sets() {
  static const std::vector<InstructionSet> found = find_instruction_sets();
  return found;
}

const Kernels& choose() {
  const char* name = std::getenv("PAGED_ATTN_CPU_ISA");
  const bool any = name == nullptr || *name == '\0';
  const Engines* chosen = nullptr;
  for (const InstructionSet& set : instruction_sets())
    if (set.missing.empty() && (any || std::string(name) == set.engines.name))
      chosen = &set.engines;
  if (chosen) return combine(*chosen);
  if (any)
    throw std::runtime_error(
        "paged_attn: the library was compiled for a processor that has what this one lacks; install"
        " it again here, or compile it with PAGED_ATTN_BUILD_FOR=all");
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
  for (const InstructionSet& set : instruction_sets())
    if (set.missing.empty()) names += (names.empty() ? "" : " ") + std::string(set.engines.name);
  return names;
}

std::string missing_names() {
  std::string lines;
  for (const InstructionSet& set : instruction_sets())
    if (!set.missing.empty())
      lines += (lines.empty() ? "" : "\n") + std::string(set.engines.name) + ": " + set.missing;
  return lines;
}

}  // namespace paged_attn
