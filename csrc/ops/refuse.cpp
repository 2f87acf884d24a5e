#include "refuse.h"

#include "old_glibc.h"

#include <dlfcn.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

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

// One of Python's own exceptions, or null in a process without Python.
_object* python_exception(const char* name) {
  const auto type = static_cast<_object**>(dlsym(RTLD_DEFAULT, name));
  return type ? *type : nullptr;
}

struct PythonError : torch::PyTorchError {
  PythonError(_object* python_type, const std::string& text)
      : PyTorchError(text), type(python_type) {}
  _object* python_type() override { return type; }
  _object* type;
};

// Before 2.15 operators are called through pybind11, to which std::invalid_argument is a
// ValueError; since then it is a RuntimeError to the function that calls them.
[[noreturn]] void raise(const std::string& type, const std::string& text) {
  if (type == "NotImplementedError" ||
      (type == "ValueError" && aoti_torch_abi_version() >= TORCH_2_15))
    if (_object* python_type = python_exception(("PyExc_" + type).c_str()))
      throw PythonError(python_type, text);
  if (type == "ValueError") throw std::invalid_argument(text);
  if (type == "IndexError") throw std::out_of_range(text);
  throw std::runtime_error(text);
}

// Calls the operator `<op>_<suffix>` with what lies on the stack.
void call_python(std::string op, const char* suffix, StableIValue* stack) {
  std::replace(op.begin(), op.end(), '.', '_');  // of an overload
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher(("paged_attn::" + op + suffix).c_str(), "", stack, TORCH_ABI_VERSION));
}

// The handle is read here because torch's own conversion to std::string never frees it.
std::string take_string(StableIValue value) {
  const StringHandle handle = torch::stable::detail::to<StringHandle>(value);
  size_t length;
  const char* data;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  const std::string taken(data, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return taken;
}

}  // namespace

void refuse(const char* op, StableIValue* stack) {
  call_python(op, "_error", stack);
  const std::string answer = take_string(stack[0]);
  const size_t colon = answer.find(": ");
  if (colon == std::string::npos)
    throw std::runtime_error(std::string("paged_attn::") + op +
                             ": the CPU guard refused what the contract allows: either another"
                             " thread wrote a tensor of the call meanwhile, or this is a bug to"
                             " report");
  raise(answer.substr(0, colon), answer.substr(colon + 2));
}

void record(const char* op, uint64_t num_args, int num_results, StableIValue* stack) {
  // more results than the operator's own, for which there is room
  std::vector<StableIValue> given(std::max<uint64_t>(num_args, num_results + 2));
  std::copy(stack, stack + num_args, given.begin());
  call_python(op, "_recorded", given.data());
  // the address of the type of what was raised, or nothing; the results; its text
  const std::string python_type = take_string(given[0]), text = take_string(given[num_results + 1]);
  std::copy(given.begin() + 1, given.begin() + 1 + num_results, stack);
  if (python_type.empty()) return;
  for (int i = 0; i < num_results; ++i)
    aoti_torch_delete_tensor_object(torch::stable::detail::to<AtenTensorHandle>(stack[i]));
  throw PythonError(reinterpret_cast<_object*>(std::stoull(python_type)), text);
}

}  // namespace paged_attn
