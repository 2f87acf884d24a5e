// A call's arguments, as the dispatcher hands them to a boxed kernel: on a stack, in the order of
// the schema. The kernel owns the values on the stack, and this object gives them back.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "tensor_view.h"

namespace paged_attn {

// An argument that the kernels do not read: its place in the schema, and its default on the stack.
struct Unread {
  uint64_t place;
  StableIValue value;
};

class Arguments {
 public:
  // `op` is the name in the schema, with its overload: the Python twin is found by it.
  Arguments(const char* op, StableIValue* stack, uint64_t count);
  Arguments(const Arguments&) = delete;
  ~Arguments();

  // Each of these takes the next argument.
  TensorView tensor();
  TensorView optional_tensor();
  std::vector<TensorView> tensor_list();
  int64_t integer();
  bool boolean();
  double number();
  std::optional<double> optional_number();
  std::optional<DType> optional_dtype();
  std::array<bool, 5> mask();
  std::string text();

  // Whether those tensors that were taken are on the CPU, in storages that hold them. None may be
  // read before.
  bool are_readable() const { return are_readable_; }

  // For an op without a derivative, when all arguments are taken: raises the Python twin's error
  // unless the call is `accepted` and no result would need a gradient.
  void require(bool accepted);

  // For an op with a derivative: raises unless the call is `accepted`. True if a result needs a
  // gradient: then autograd has recorded the call, and its results are on the stack.
  bool recorded(bool accepted, int num_results);

 private:
  static constexpr uint64_t MOST = 48;

  StableIValue next();
  void pass_unread();
  StableIValue* next_box();
  TensorView own(AtenTensorHandle);
  TensorView view(AtenTensorHandle);
  StableListHandle next_list(size_t* size);
  void require_all_taken();
  void give_back_to_stack();
  [[noreturn]] void refuse();

  const char* op_;
  StableIValue* stack_;
  uint64_t count_, taken_ = 0;
  const Unread *unread_ = nullptr, *unread_end_ = nullptr;  // by their places
  bool grad_mode_, are_readable_ = true, needs_gradient_ = false, is_malformed_ = false;
  // what to give back: tensors, the boxes in which optional values come, lists and their
  // tensors, texts
  AtenTensorHandle tensors_[MOST];
  StableIValue* boxes_[MOST];
  StableListHandle lists_[2];
  std::vector<AtenTensorHandle> listed_;
  StringHandle texts_[2];
  int num_tensors_ = 0, num_boxes_ = 0, num_lists_ = 0, num_texts_ = 0;
};

}  // namespace paged_attn
