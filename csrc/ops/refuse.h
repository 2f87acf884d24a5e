// Guards notice, Python explains: a call that a guard refuses goes to the op's Python twin
// `<op>_error`, which runs the contract's checks and answers "ErrorType: text".
#pragma once

#include <torch/csrc/stable/library.h>

#include <array>
#include <string>

namespace paged_attn {

// Throws what "ErrorType: text" says, so that Python sees ErrorType(text).
[[noreturn]] void raise_explained(const std::string& answer, const char* error_op);

template <class... Arguments>
[[noreturn]] void refuse(const char* error_op, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{torch::stable::detail::from(arguments)...};
  STABLE_TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(error_op, "", stack.data(), TORCH_ABI_VERSION));
  raise_explained(torch::stable::detail::to<std::string>(stack[0]), error_op);
}

}  // namespace paged_attn
