// What selected_mass works on.
#pragma once

#include "attention.h"

namespace paged_attn {

struct SelectedMass {
  Attention forward;   // without results; its values are its keys
  Strided<float> lse;  // (head, token)
  float* mass;         // (row of q, list, entry), contiguous, zeros
};

}  // namespace paged_attn
