#include <torch/csrc/stable/library.h>

#include "../kernels.h"
#include "arguments.h"
#include "scratch.h"

namespace {

using namespace paged_attn;

bool accept(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
            const TensorView& lse_b, MergeStates& s) {
  if (out_a.dim != 3 || out_a.dtype > DType::float16 || out_b.dtype != out_a.dtype) return false;
  if (!out_b.has_shape({out_a.size(0), out_a.size(1), out_a.size(2)})) return false;
  for (const TensorView* lse : {&lse_a, &lse_b})
    if (!lse->is(DType::float32) || !lse->has_shape({out_a.size(1), out_a.size(0)})) return false;
  const auto part = [](const TensorView& out, const TensorView& lse) {
    return MergeStates::Part{out.data(),
                             out.stride(0),
                             out.stride(1),
                             out.stride(2),
                             static_cast<const float*>(lse.data()),
                             lse.stride(0),
                             lse.stride(1)};
  };
  s.dtype = out_a.dtype;
  s.total_q = out_a.size(0);
  s.num_heads = out_a.size(1);
  s.head_dim_v = out_a.size(2);
  s.a = part(out_a, lse_a);
  s.b = part(out_b, lse_b);
  return true;
}

void merge_states(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("merge_states", stack, num_args);
  const TensorView out_a = next.tensor(), lse_a = next.tensor();
  const TensorView out_b = next.tensor(), lse_b = next.tensor();
  MergeStates call = {};
  if (next.recorded(next.on_cpu() && accept(out_a, lse_a, out_b, lse_b, call), 2)) return;
  Tensor out = empty_tensor({call.total_q, call.num_heads, call.head_dim_v}, call.dtype);
  Tensor lse = empty_tensor({call.num_heads, call.total_q}, DType::float32);
  call.out = out.mutable_data_ptr();
  call.lse = static_cast<float*>(lse.mutable_data_ptr());
  const Kernels& isa = kernels();
  const int64_t row = call.num_heads * call.head_dim_v;
  const int64_t tokens = row >= 32768 ? 1 : 32768 / (row + 1);  // of one task
  const int64_t count = (call.total_q + tokens - 1) / tokens;
  run_tasks(count, count > 1 ? torch::stable::get_num_threads() : 1, [&](int64_t i) {
    const int64_t end = (i + 1) * tokens;
    isa.merge_states(call, i * tokens, end < call.total_q ? end : call.total_q);
    return true;
  });
  return_tensors(stack, {out, lse});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("merge_states", &merge_states); }
