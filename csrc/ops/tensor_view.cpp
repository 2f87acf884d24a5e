#include "tensor_view.h"

#include <torch/csrc/stable/stableivalue_conversions.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace paged_attn {
namespace {

// torch's codes, in the order of DType
const int32_t* dtype_codes() {
  static const int32_t codes[] = {
      aoti_torch_dtype_float32(),       aoti_torch_dtype_bfloat16(),    aoti_torch_dtype_float16(),
      aoti_torch_dtype_float8_e4m3fn(), aoti_torch_dtype_float8_e5m2(), aoti_torch_dtype_int8(),
      aoti_torch_dtype_uint8(),         aoti_torch_dtype_bool(),        aoti_torch_dtype_int32(),
      aoti_torch_dtype_int64(),
  };
  return codes;
}

// A large output is most often memory that was not touched yet, and a page fault for every 4 KB
// of it would take a quarter of a sparse prefill.
void prefer_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr int64_t HUGE_PAGE = int64_t(1) << 21;
  const int64_t begin = (int64_t(data) + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
  const int64_t end = (int64_t(data) + bytes) / HUGE_PAGE * HUGE_PAGE;
  if (end - begin >= 4 * HUGE_PAGE)
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace

DType dtype_of(int32_t code) {
  const int32_t* codes = dtype_codes();
  for (int i = 0; i < int(DType::unsupported); ++i)
    if (codes[i] == code) return DType(i);
  return DType::unsupported;
}

Tensor empty_tensor(std::initializer_list<int64_t> shape, DType dtype) {
  int64_t strides[4], stride = 1;
  for (int64_t i = int64_t(shape.size()) - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= shape.begin()[i] > 0 ? shape.begin()[i] : 1;
  }
  AtenTensorHandle handle;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(shape.size()), shape.begin(), strides,
                                                  dtype_codes()[int(dtype)],
                                                  aoti_torch_device_type_cpu(), 0, &handle));
  Tensor tensor(handle);
  prefer_huge_pages(tensor.mutable_data_ptr(), stride * bytes_of(dtype));
  return tensor;
}

void return_tensors(StableIValue* stack, std::initializer_list<Tensor> results) {
  for (const Tensor& result : results) *stack++ = torch::stable::detail::from(result);
}

}  // namespace paged_attn
