// The rules for lists of selected keys as conditions. Their error messages are in
// ops/selected_checks.py.
#pragma once

#include "attention_call.h"

namespace paged_attn {

// Shapes and options, which are filled in. All else has been filled in before.
bool accept_lists(const AttentionArguments&, Attention&);

// What lists name: each unit once, and pages that exist.
bool accept_list_values(const AttentionArguments&, const Attention&);

}  // namespace paged_attn
