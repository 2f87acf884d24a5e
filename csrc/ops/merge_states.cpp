#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "../kernels.h"
#include "announce.h"
#include "arguments.h"
#include "scratch.h"

namespace {

using namespace paged_attn;

bool accept_parts(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                  const TensorView& lse_b) {
  if (out_a.dim != 3 || out_a.dtype > DType::float16) return false;
  for (const TensorView* lse : {&lse_a, &lse_b})
    if (!lse->is(DType::float32) || !lse->has_shape({out_a.size(1), out_a.size(0)})) return false;
  return out_b.dtype == out_a.dtype &&
         out_b.has_shape({out_a.size(0), out_a.size(1), out_a.size(2)});
}

MergeStates::Part part_of(const TensorView& out, const TensorView& lse) {
  return {out.data(),
          out.stride(0),
          out.stride(1),
          out.stride(2),
          static_cast<const float*>(lse.data()),
          lse ? lse.stride(0) : 0,
          lse ? lse.stride(1) : 0};
}

// Calls f(begin, end) for pieces of the tokens.
template <class Function>
void run_tokens(int64_t total_q, int64_t row, const Function& f) {
  const int64_t tokens = row >= 32768 ? 1 : 32768 / (row + 1);  // of one task
  const int64_t count = (total_q + tokens - 1) / tokens;
  run_tasks(count, count > 1 ? torch::stable::get_num_threads() : 1, [&](int64_t i) {
    f(i * tokens, std::min((i + 1) * tokens, total_q));
    return true;
  });
}

void merge(StableIValue* stack, const TensorView& like, DType out_dtype,
           const MergeStates::Part* parts, int64_t num_parts) {
  MergeStates call = {like.dtype, out_dtype, like.size(0), like.size(1), like.size(2),
                      parts,      num_parts, nullptr,      nullptr};
  Tensor out = empty_tensor({call.total_q, call.num_heads, call.head_dim_v}, out_dtype);
  Tensor lse = empty_tensor({call.num_heads, call.total_q}, DType::float32);
  call.out = out.mutable_data_ptr();
  call.lse = static_cast<float*>(lse.mutable_data_ptr());
  run_tokens(call.total_q, call.num_heads * call.head_dim_v,
             [&](int64_t begin, int64_t end) { kernels().merge_states(call, begin, end); });
  return_tensors(stack, {out, lse});
}

void merge_states(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("merge_states", stack, num_args);
  const TensorView out_a = next.tensor(), lse_a = next.tensor();
  const TensorView out_b = next.tensor(), lse_b = next.tensor();
  if (next.recorded(next.are_readable() && accept_parts(out_a, lse_a, out_b, lse_b), 2)) return;
  static Announced announced;
  announced.once("merge_states", false);
  const MergeStates::Part parts[] = {part_of(out_a, lse_a), part_of(out_b, lse_b)};
  merge(stack, out_a, out_a.dtype, parts, 2);
}

void merge_states_list(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("merge_states.list", stack, num_args);
  const std::vector<TensorView> outs = next.tensor_list(), lses = next.tensor_list();
  const std::optional<DType> out_dtype = next.optional_dtype();
  bool accepted = next.are_readable() && !outs.empty() && lses.size() == outs.size() &&
                  (!out_dtype || *out_dtype <= DType::float16);
  std::vector<MergeStates::Part> parts;
  for (size_t i = 0; i < outs.size() && accepted; ++i) {
    accepted = accept_parts(outs[0], lses[0], outs[i], lses[i]);
    if (accepted) parts.push_back(part_of(outs[i], lses[i]));
  }
  if (next.recorded(accepted, 2)) return;
  static Announced announced;
  announced.once("merge_states.list", false);
  merge(stack, outs[0], out_dtype.value_or(outs[0].dtype), parts.data(), int64_t(parts.size()));
}

void merge_states_backward(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("merge_states_backward", stack, num_args);
  const TensorView dout = next.tensor(), dlse = next.optional_tensor();
  const TensorView out_a = next.tensor(), lse_a = next.tensor();
  const TensorView out_b = next.tensor(), lse_b = next.tensor();
  const TensorView out = next.tensor(), softmax_lse = next.tensor();
  bool accepted = next.are_readable() && accept_parts(out_a, lse_a, out_b, lse_b) &&
                  accept_parts(out_a, softmax_lse, out, softmax_lse) &&
                  accept_parts(out_a, dlse ? dlse : softmax_lse, dout, softmax_lse);
  if (next.recorded(accepted, 4)) return;
  static Announced announced;
  announced.once("merge_states_backward", false);
  MergeStatesBackward call = {out_a.dtype,
                              out_a.size(0),
                              out_a.size(1),
                              out_a.size(2),
                              part_of(dout, dlse),
                              part_of(out, softmax_lse),
                              {{part_of(out_a, lse_a)}, {part_of(out_b, lse_b)}}};
  std::vector<Tensor> results;
  for (MergeStatesBackward::Part& part : call.parts) {
    results.push_back(empty_tensor({call.total_q, call.num_heads, call.head_dim_v}, call.dtype));
    part.dout = results.back().mutable_data_ptr();
    results.push_back(empty_tensor({call.num_heads, call.total_q}, DType::float32));
    part.dlse = static_cast<float*>(results.back().mutable_data_ptr());
  }
  run_tokens(call.total_q, 3 * call.num_heads * call.head_dim_v, [&](int64_t begin, int64_t end) {
    kernels().merge_states_backward(call, begin, end);
  });
  return_tensors(stack, {results[0], results[1], results[2], results[3]});
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("merge_states", &merge_states);
  m.impl("merge_states.list", &merge_states_list);
  m.impl("merge_states_backward", &merge_states_backward);
}
