// A tensor's metadata, read once through the stable ABI.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <initializer_list>

#include "../core/attention.h"

namespace paged_attn {

using torch::stable::Tensor;

DType dtype_of(int32_t code);

struct TensorView {
  AtenTensorHandle handle = nullptr;  // not owned
  int64_t dim = 0;
  const int64_t* sizes = nullptr;
  const int64_t* strides = nullptr;
  DType dtype = DType::unsupported;
  bool on_cpu = true;
  bool is_held = true;  // whether its storage has room for all elements

  TensorView() = default;
  explicit TensorView(AtenTensorHandle tensor) : handle(tensor) {
    int64_t *size_data, *stride_data;
    int32_t code, device;
    bool is_defined;
    TORCH_ERROR_CODE_CHECK(aoti_torch_is_defined(handle, &is_defined));
    if (!is_defined) {  // None for a tensor that the schema requires
      dim = -1;
      return;
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &size_data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &stride_data));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &code));
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
    sizes = size_data;
    strides = stride_data;
    dtype = dtype_of(code);
    on_cpu = device == aoti_torch_device_type_cpu();
    if (on_cpu) is_held = holds_elements();
  }

  explicit operator bool() const { return handle != nullptr; }
  int64_t size(int64_t i) const { return sizes[i]; }
  int64_t stride(int64_t i) const { return strides[i]; }
  int64_t last() const { return sizes[dim - 1]; }
  const void* data() const {
    const void* data = nullptr;
    if (handle) TORCH_ERROR_CODE_CHECK(torch_get_const_data_ptr(handle, &data));
    return data;
  }
  void* mutable_data() const {
    void* data;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle, &data));
    return data;
  }

  bool is(DType wanted) const { return dtype == wanted; }
  bool is_one_of(std::initializer_list<DType> allowed) const {
    for (DType d : allowed)
      if (dtype == d) return true;
    return false;
  }
  bool has_shape(std::initializer_list<int64_t> shape) const {
    if (dim != int64_t(shape.size())) return false;
    const int64_t* size = sizes;
    for (int64_t wanted : shape)
      if (*size++ != wanted) return false;
    return true;
  }
  bool rows_contiguous() const { return last() <= 1 || strides[dim - 1] == 1; }

 private:
  // A storage may be freed or cut after the tensor was made, as FSDP does with gathered parameters.
  bool holds_elements() const {
    if (dtype == DType::unsupported) return true;  // which every op refuses
    int64_t bytes, last_element;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(handle, &last_element));
    for (int64_t i = 0; i < dim; ++i) {
      if (sizes[i] == 0) return true;
      last_element += (sizes[i] - 1) * strides[i];
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(handle, &bytes));
    return (last_element + 1) * bytes_of(dtype) <= bytes;
  }
};

// A vector (i) or a matrix (i, j), or nothing.
template <class T>
Strided<T> strided(const TensorView& t) {
  Strided<T> s;
  s.data = static_cast<const T*>(t.data());
  if (t.dim >= 1) s.stride0 = t.stride(0);
  if (t.dim >= 2) s.stride1 = t.stride(1);
  return s;
}

// (), (head) or (batch, head) as (batch, head), broadcast; or nothing.
// The numbers of a row of keys or values.
inline int64_t numbers_of(const TensorView& t) { return t.last() * (t.is(DType::int4) ? 2 : 1); }

inline Strided<float> per_head(const TensorView& t) {
  Strided<float> s;
  s.data = static_cast<const float*>(t.data());
  if (t.dim == 2) s.stride0 = t.stride(0);
  if (t.dim >= 1) s.stride1 = t.stride(t.dim - 1);
  return s;
}

// Contiguous, on the CPU.
Tensor empty_tensor(std::initializer_list<int64_t> shape, DType dtype);

// Leaves the results of a boxed kernel where its arguments were.
void return_tensors(StableIValue* stack, std::initializer_list<Tensor> results);

}  // namespace paged_attn
