// All kernels of one ISA. An ISA file names its table and includes this; everything else stays in
// unnamed namespaces, so that no ISA's code can stand in for another's.
#include "kernels.h"
#include "kernels/attention.h"
#include "kernels/backward_statistics.h"
#include "kernels/merge_states_backward.h"
#include "kernels/reshape_and_cache.h"

#define PAGED_ATTN_KERNELS(isa)                           \
  const paged_attn::Kernels paged_attn::kernels_##isa = { \
      #isa,                                               \
      row_limits,                                         \
      workspace_floats,                                   \
      attend,                                             \
      backward_floats,                                    \
      attend_backward,                                    \
      merge_splits,                                       \
      backward_statistics,                                \
      reshape_and_cache,                                  \
      merge_states,                                       \
      merge_states_backward,                              \
      mass_floats,                                        \
      selected_mass,                                      \
      select_floats,                                      \
      score_units,                                        \
      multiply_sample,                                    \
  }
