#include "arguments.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <map>
#include <stdexcept>
#include <string>

#include "autograd.h"
#include "refuse.h"

namespace paged_attn {

using torch::stable::detail::to;

namespace {

// By op. Python fills it in while the library is loaded (backends/cpu/__init__.py).
std::map<std::string, std::vector<Unread>, std::less<>>& unread() {
  static std::map<std::string, std::vector<Unread>, std::less<>> all;
  return all;
}

}  // namespace

Arguments::Arguments(const char* op, StableIValue* stack, uint64_t count)
    : op_(op), stack_(stack), count_(count), grad_mode_(aoti_torch_grad_mode_is_enabled()) {
  if (count > MOST) throw std::logic_error(std::string("paged_attn: too many arguments of ") + op);
  if (const auto found = unread().find(op); found != unread().end()) {
    unread_ = found->second.data();
    unread_end_ = unread_ + found->second.size();
  }
}

Arguments::~Arguments() {
  for (int i = 0; i < num_tensors_; ++i) aoti_torch_delete_tensor_object(tensors_[i]);
  for (int i = 0; i < num_boxes_; ++i) delete boxes_[i];
  for (AtenTensorHandle handle : listed_) aoti_torch_delete_tensor_object(handle);
  for (int i = 0; i < num_lists_; ++i) torch_delete_list(lists_[i]);
  for (int i = 0; i < num_texts_; ++i) torch_delete_string(texts_[i]);
}

// A call that gives a value which no kernel reads is refused.
void Arguments::pass_unread() {
  for (; unread_ != unread_end_ && unread_->place == taken_ && taken_ < count_; ++unread_)
    is_malformed_ |= stack_[taken_++] != unread_->value;
}

StableIValue Arguments::next() {
  pass_unread();
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
  return view(handle);
}

TensorView Arguments::view(AtenTensorHandle handle) {
  const TensorView view(handle);
  are_readable_ &= view.on_cpu && view.is_held;
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

StableListHandle Arguments::next_list(size_t* size) {
  lists_[num_lists_] = to<StableListHandle>(next());
  TORCH_ERROR_CODE_CHECK(torch_list_size(lists_[num_lists_], size));
  return lists_[num_lists_++];
}

std::vector<TensorView> Arguments::tensor_list() {
  size_t size;
  const StableListHandle list = next_list(&size);
  std::vector<TensorView> views;
  for (size_t i = 0; i < size; ++i) {
    StableIValue item;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    listed_.push_back(to<AtenTensorHandle>(item));
    views.push_back(view(listed_.back()));
  }
  return views;
}

std::array<bool, 5> Arguments::mask() {
  std::array<bool, 5> mask = {};
  size_t size;
  const StableListHandle list = next_list(&size);
  is_malformed_ |= size != mask.size();
  for (size_t i = 0; i < mask.size() && size == mask.size(); ++i) {
    StableIValue item;
    TORCH_ERROR_CODE_CHECK(torch_list_get_item(list, i, &item));
    mask[i] = to<bool>(item);
  }
  return mask;
}

std::string Arguments::text() {
  // torch's own conversion to std::string never frees the handle
  const StringHandle handle = texts_[num_texts_++] = to<StringHandle>(next());
  size_t length;
  const char* data;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
  return std::string(data, length);
}

void Arguments::require(bool accepted) {
  require_all_taken();
  if (!accepted || is_malformed_ || needs_gradient_) refuse();
}

bool Arguments::recorded(bool accepted, int num_results) {
  require_all_taken();
  if (!accepted || is_malformed_) refuse();
  if (!needs_gradient_) return false;
  give_back_to_stack();
  record(op_, count_, num_results, stack_);
  return true;
}

void Arguments::require_all_taken() {
  pass_unread();
  if (taken_ != count_)
    throw std::logic_error(std::string("paged_attn: the schema is not the kernel's: ") + op_);
}

// Another operator owns what lies on the stack from here on.
void Arguments::give_back_to_stack() {
  num_tensors_ = num_boxes_ = num_lists_ = num_texts_ = 0;
  listed_.clear();
}

void Arguments::refuse() {
  give_back_to_stack();
  paged_attn::refuse(op_, stack_);
}

namespace {

void cpu_skip(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments arguments("cpu_skip", stack, num_args);
  const std::string op = arguments.text();
  const int64_t place = arguments.integer(), value = arguments.integer();
  unread()[op].push_back({uint64_t(place), StableIValue(value)});
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CompositeExplicitAutograd, m) {
  m.impl("cpu_skip", &paged_attn::cpu_skip);
}
