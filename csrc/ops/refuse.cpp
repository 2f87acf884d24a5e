#include "refuse.h"

#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <utility>

// The base of libtorch_python's own exceptions (torch/csrc/Exceptions.h, which no stable header
// offers): what it catches by this name becomes the Python exception that python_type() names.
struct _object;  // PyObject
namespace torch {
struct PyTorchError : std::exception {
  explicit PyTorchError(std::string text) : msg(std::move(text)) {}
  virtual _object* python_type() = 0;
  const char* what() const noexcept override { return msg.c_str(); }
  std::string msg;
};
}  // namespace torch

namespace paged_attn {
namespace {

constexpr uint64_t TORCH_2_15 = uint64_t(2) << 56 | uint64_t(15) << 48;

_object* python_value_error() {
  static const auto type = static_cast<_object**>(dlsym(RTLD_DEFAULT, "PyExc_ValueError"));
  return type ? *type : nullptr;
}

struct ValueError : torch::PyTorchError {
  using PyTorchError::PyTorchError;
  _object* python_type() override { return python_value_error(); }
};

// Before 2.15 operators are called through pybind11, to which std::invalid_argument is a
// ValueError; since then it is a RuntimeError to the function that calls them.
[[noreturn]] void raise_value_error(const std::string& text) {
  if (aoti_torch_abi_version() >= TORCH_2_15 && python_value_error()) throw ValueError(text);
  throw std::invalid_argument(text);
}

}  // namespace

void raise_explained(const std::string& answer, const char* error_op) {
  const size_t colon = answer.find(": ");
  if (colon == std::string::npos) {
    const std::string twin = error_op;
    throw std::runtime_error(twin.substr(0, twin.size() - sizeof("_error") + 1) +
                             ": internal: the CPU guard refused a call that the contract allows;"
                             " please report it");
  }
  const std::string type = answer.substr(0, colon), text = answer.substr(colon + 2);
  if (type == "ValueError") raise_value_error(text);
  if (type == "IndexError") throw std::out_of_range(text);
  throw std::runtime_error(text);
}

}  // namespace paged_attn
