// The kernels of one ISA as a table of functions. The library has a table for each ISA and picks
// one at run time.
#pragma once

#include "core/attention.h"
#include "core/backward.h"
#include "core/select_keys.h"
#include "core/selected_mass.h"
#include "core/tokens.h"

namespace paged_attn {

// Dims of the bfloat16 products in `multiply_sample`, and floats that each of its matrices takes.
constexpr int SAMPLE_DIMS = 64, SAMPLE_FLOATS = 4096;

struct Kernels {
  const char* name;
  // These are all that a table needs that stands beside others (engines.h).
  RowLimits (*row_limits)(const Attention&);
  // float32 scratch that `attend` needs for tasks of at most this many rows (a group's) and groups
  int64_t (*workspace_floats)(const Attention&, int64_t few_rows, int64_t groups,
                              int64_t tile_rows);
  void (*attend)(const Attention&, const Task&, float* workspace);
  int64_t (*backward_floats)(const Backward&);  // float32 scratch of a task
  void (*attend_backward)(const Backward&, const BackwardTask&, float* workspace);
  void (*merge_splits)(const Attention&, const MergeTask&, float* head_dim_v_floats);
  // of query tokens [begin, end) of a sequence; has to end for all tokens before any task of
  // `attend_backward` begins
  void (*backward_statistics)(const Backward&, int64_t sequence, int64_t begin, int64_t end);
  void (*reshape_and_cache)(const ReshapeAndCache&, int64_t task);
  void (*merge_states)(const MergeStates&, int64_t token_begin, int64_t token_end);
  void (*merge_states_backward)(const MergeStatesBackward&, int64_t token_begin, int64_t token_end);
  int64_t (*mass_floats)(const SelectedMass&);  // float32 scratch of a list
  void (*selected_mass)(const SelectedMass&, int64_t sequence, int64_t token, int64_t list,
                        float* workspace);
  int64_t (*select_floats)(const SelectKeys&,
                           int64_t tokens);  // of a task of as many tokens
  // scores of `count` units for each token of a task
  void (*score_units)(const SelectKeys&, const SelectTask&, int64_t count, float* units,
                      float* workspace);
  void (*multiply_sample)(const float* left, const float* right, float* result);
};

extern const Kernels kernels_generic;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
extern const Kernels kernels_amx;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
extern const Kernels kernels_neon_bf16;
#endif

// The best ISA this processor has, or the one that PAGED_ATTN_CPU_ISA names; throws
// std::runtime_error when that one cannot run here.
const Kernels& kernels();

}  // namespace paged_attn
