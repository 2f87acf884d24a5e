// The rules for lists of selected keys as conditions. Their error messages are in
// ops/selected_checks.py.
#pragma once

#include "attention_call.h"

namespace paged_attn {

// What a unit may hold: 1, or a power of two to 256.
bool is_unit_size(int64_t keys);

// Shapes and options, which are filled in. All else has been filled in before.
bool accept_lists(const AttentionArguments&, Attention&);

// What lists name: each unit once, and pages that exist.
bool accept_list_values(const AttentionArguments&, const Attention&);

}  // namespace paged_attn
