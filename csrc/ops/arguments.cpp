#include "arguments.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#include <stdexcept>
#include <string>

#include "autograd.h"
#include "refuse.h"

namespace paged_attn {

using torch::stable::detail::to;

Arguments::Arguments(const char* op, StableIValue* stack, uint64_t count)
    : op_(op), stack_(stack), count_(count), grad_mode_(aoti_torch_grad_mode_is_enabled()) {
  if (count > MOST) throw std::logic_error(std::string("paged_attn: too many arguments of ") + op);
}

Arguments::~Arguments() {
  for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  for (int i = 0; i < num_boxes_; ++i) delete boxes_[i];
  if (list_) torch_delete_list(list_);
}

StableIValue Arguments::next() {
  if (taken_ == count_)
    throw std::logic_error(std::string("paged_attn: the schema is not the kernel's: ") + op_);
  return stack_[taken_++];
}

StableIValue* Arguments::next_box() {
  StableIValue* box = to<StableIValue*>(next());
  if (box) boxes_[num_boxes_++] = box;
  return box;
}

TensorView Arguments::own(AtenTensorHandle handle) {
  tensors_[num_tensors_++] = handle;
  const TensorView view(handle);
  on_cpu_ &= view.on_cpu;
  needs_gradient_ |= needs_gradient(handle, grad_mode_);
  return view;
}

TensorView Arguments::tensor() { return own(to<AtenTensorHandle>(next())); }

TensorView Arguments::optional_tensor() {
  const StableIValue* box = next_box();
  return box ? own(to<AtenTensorHandle>(*box)) : TensorView();
}

int64_t Arguments::integer() { return to<int64_t>(next()); }

bool Arguments::boolean() { return to<bool>(next()); }

double Arguments::number() { return to<double>(next()); }

std::optional<double> Arguments::optional_number() {
  const StableIValue* box = next_box();
  return box ? std::optional(to<double>(*box)) : std::nullopt;
}

std::optional<DType> Arguments::optional_dtype() {
  const StableIValue* box = next_box();
  return box ? std::optional(dtype_of(to<int32_t>(*box))) : std::nullopt;
}

std::array<bool, 5> Arguments::mask() {
  list_ = to<StableListHandle>(next());
  std::array<bool, 5> values;
  size_t size;
  STABLE_TORCH_ERROR_CODE_CHECK(torch_list_size(list_, &size));
  if (size != values.size())
    throw std::invalid_argument(std::string("paged_attn::") + op_ + ": output_mask has " +
                                std::to_string(size) + " entries; allowed: 5");
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    STABLE_TORCH_ERROR_CODE_CHECK(torch_list_get_item(list_, i, &item));
    values[i] = to<bool>(item);
  }
  return values;
}

void Arguments::require(bool accepted) {
  if (taken_ != count_)
    throw std::logic_error(std::string("paged_attn: the schema is not the kernel's: ") + op_);
  // where an op has a derivative, `needs_gradient_` is what leads to it
  if (!accepted || needs_gradient_) refuse();
}

void Arguments::refuse() {
  num_tensors_ = num_boxes_ = 0, list_ = nullptr;  // the twin owns the stack from here on
  paged_attn::refuse(op_, stack_);
}

}  // namespace paged_attn
