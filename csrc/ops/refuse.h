// A call that a guard refuses goes to the op's Python twin `<op>_error`, which runs the contract's
// checks and returns "ErrorType: text". A call that needs a gradient goes to `<op>_recorded`, which
// has autograd record it.
#pragma once

#include <torch/csrc/stable/c/shim.h>

namespace paged_attn {

// Throws so that Python sees ErrorType(text). Takes over the arguments on the stack.
[[noreturn]] void refuse(const char* op, StableIValue* stack);

// Puts the results of a call of `op`, all tensors, on the stack, recorded by autograd. Takes over
// the arguments there; throws what Python raised.
void record(const char* op, uint64_t num_args, int num_results, StableIValue* stack);

}  // namespace paged_attn
