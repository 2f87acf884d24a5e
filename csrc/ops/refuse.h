// Guards notice, Python explains: a call that a guard refuses goes to the op's Python twin
// `<op>_error`, which runs the contract's checks and answers "ErrorType: text".
#pragma once

#include <torch/csrc/stable/c/shim.h>

namespace paged_attn {

// Throws so that Python sees ErrorType(text). Takes over the arguments on the stack.
[[noreturn]] void refuse(const char* op, StableIValue* stack);

}  // namespace paged_attn
