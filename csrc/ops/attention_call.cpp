#include "attention_call.h"

#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "../core/schedule.h"
#include "../core/seqlen_info.h"
#include "../kernels.h"
#include "announce.h"
#include "autograd.h"
#include "scratch.h"

namespace paged_attn {
namespace {

// Rows past the last sequence: out 0 (all zero bits in every dtype), lse -inf.
void fill_padding(const Attention& a) {
  const int64_t used = a.cu_seqlens_q(a.batch), padding = a.total_q - used;
  if (padding == 0) return;
  const int64_t bytes = bytes_of(a.out_dtype);
  for (int64_t t = used; t < a.total_q; ++t)
    for (int64_t h = 0; h < a.num_heads; ++h) {
      const int64_t row = t * a.out_stride_token + h * a.out_stride_head;
      std::memset(static_cast<char*>(a.out) + row * bytes, 0, a.head_dim_v * bytes);
    }
  for (int64_t h = 0; h < a.num_heads; ++h)
    for (int64_t t = used; t < a.total_q; ++t) a.lse[h * a.total_q + t] = -INFINITY;
}

void run(Attention& a) {
  static thread_local Plan plan;
  static thread_local Scratch partials, workspace;
  const int64_t threads = torch::stable::get_num_threads();
  const Kernels& isa = kernels();
  make_plan(a, isa.row_limits(a), threads, plan);
  a.partials = partials.floats(plan.partial_floats);
  if (plan.partial_floats > 0 && a.partials == nullptr) throw std::bad_alloc();

  const int64_t floats = isa.workspace_floats(a, plan.few_rows, plan.few_groups, plan.tile_rows);
  const int64_t workers = plan.cost < WORTH_SHARING ? 1 : threads;
  // `plan` is thread-local: by this reference, other threads use this thread's plan and not their
  // own
  const Plan& work = plan;
  std::vector<std::atomic<int32_t>> finished(work.merges.size());
  run_tasks(int64_t(work.tasks.size()), workers, [&](int64_t i) {
    float* memory = workspace.floats(floats);
    if (memory == nullptr) return false;
    const Task& task = work.tasks[i];
    isa.attend(a, task, memory);
    // the thread that finishes the last split adds all of them up, always in the same order
    if (task.merge >= 0 && ++finished[task.merge] == work.merges[task.merge].num_splits)
      isa.merge_splits(a, work.merges[task.merge], memory);
    workspace.trim();
    return true;
  });
  partials.trim();
  trim(plan.tasks);
  trim(plan.merges);
}

// Logs the first call of each kind.
void announce(const char* op, Form form, const Attention& a) {
  static Announced announced[4][2];
  const bool has_pairs = multiply_as_pairs(a.q_dtype, a.kv_dtype);
  announced[int(form)][has_pairs].once(op, has_pairs);
}

}  // namespace

void attention(const char* op, Form form, StableIValue* stack, uint64_t num_args) {
  Arguments arguments(op, stack, num_args);
  const AttentionArguments x = {arguments, form};
  Attention a = {};
  if (arguments.recorded(arguments.are_readable() && accept_attention(x, a), 2)) return;
  announce(op, form, a);
  Tensor out = empty_tensor({a.total_q, a.num_heads, a.head_dim_v}, a.out_dtype);
  Tensor lse = empty_tensor({a.num_heads, a.total_q}, DType::float32);
  a.out = out.mutable_data_ptr();
  a.out_stride_head = a.head_dim_v;
  a.out_stride_token = a.num_heads * a.head_dim_v;
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  fill_padding(a);
  run(a);
  return_tensors(stack, {out, lse});
}

void attention_out(StableIValue* stack, uint64_t num_args) {
  constexpr const char* op = "flash_varlen_out";
  Arguments arguments(op, stack, num_args);
  const AttentionArguments x = {arguments, Form::into_out};
  Attention a = {};
  arguments.require(arguments.are_readable() && accept_attention(x, a));
  announce(op, Form::into_out, a);
  bump_version(x.out.handle);
  Tensor lse = empty_tensor({a.num_heads, a.total_q}, DType::float32);
  a.out = x.out.mutable_data();
  a.out_stride_token = x.out.stride(0);
  a.out_stride_head = x.out.stride(1);
  a.lse = static_cast<float*>(lse.mutable_data_ptr());
  fill_padding(a);
  run(a);
  return_tensors(stack, {lse});
}

}  // namespace paged_attn
