// The backward ops of attention: their arguments, their guard, and how a call runs.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../core/backward_plan.h"
#include "../core/schedule.h"
#include "../core/seqlen_info.h"
#include "../kernels.h"
#include "announce.h"
#include "attention_call.h"
#include "scratch.h"

namespace paged_attn {
namespace {

bool accept(const AttentionArguments& x, Backward& b) {
  Attention& a = b.forward;
  if (x.k.dim != 3 || !accept_attention(x, a)) return false;
  if (a.q_dtype > DType::float16 || a.kv_dtype != a.q_dtype) return false;
  // no kernel: backends/cpu/__init__.py says so
  if (a.layout.crow && x.key_ranks > 1) return false;
  for (const TensorView* t : {&x.dout, &x.forward_out})
    if (t->dtype != a.q_dtype || !t->has_shape({a.total_q, a.num_heads, a.head_dim_v}))
      return false;
  for (const TensorView* t : {&x.softmax_lse, &x.dlse})
    if (*t && !(t->is(DType::float32) && t->has_shape({a.num_heads, a.total_q}))) return false;
  b.lse = strided<float>(x.softmax_lse);
  b.dlse = strided<float>(x.dlse);
  return true;
}

// A tensor whose rows are contiguous: the one that is viewed, or a copy.
Tensor with_contiguous_rows(const TensorView& view) {
  AtenTensorHandle own;
  TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(view.handle, &own));
  const Tensor tensor(own);
  return view.rows_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

constexpr int64_t STATISTICS_TOKENS = 64;  // of one task

void run_statistics(const Backward& b, int64_t threads) {
  const Attention& a = b.forward;
  struct Part {
    int64_t sequence, begin, end;
  };
  std::vector<Part> parts;
  for (int64_t i = 0; i < a.batch; ++i) {
    const Sequence s = sequence_at(a, i);
    for (int64_t token = 0; token < s.q_len; token += STATISTICS_TOKENS)
      parts.push_back({i, token, std::min(token + STATISTICS_TOKENS, s.q_len)});
  }
  const Kernels& isa = kernels();
  run_tasks(int64_t(parts.size()), threads, [&](int64_t i) {
    isa.backward_statistics(b, parts[i].sequence, parts[i].begin, parts[i].end);
    return true;
  });
}

void run_backward(Backward& b, const BackwardPlan& plan, int64_t threads) {
  const Kernels& isa = kernels();
  const int64_t floats = (isa.backward_floats(b) + 15) / 16 * 16;
  const int64_t tasks = int64_t(plan.tasks.size());
  const int64_t workers = std::max<int64_t>(1, std::min(threads, tasks));
  // allocated for all workers before they start: none may fail while others wait for its results
  static thread_local Scratch scratch;
  float* memory = scratch.floats(workers * floats);
  if (memory == nullptr) throw std::bad_alloc();
  std::atomic<int64_t> next{0};
  run_tasks(workers, workers, [&](int64_t worker) {
    for (int64_t i = next++; i < tasks; i = next++)
      isa.attend_backward(b, plan.tasks[i], memory + worker * floats);
    return true;
  });
  scratch.trim();
}

Tensor empty_floats(int64_t count) { return empty_tensor({count}, DType::float32); }

// Keys that several sequences share, by k_start. Each sequence's gradients go to rows of their own,
// in float32; these are added up in the order of the sequences, and rounded once.
class SharedKeys {
 public:
  SharedKeys(const Attention& a, int64_t total_k) : a_(a), total_k_(total_k) {
    if (!a.k_start || a.selection.enabled) return;
    std::vector<std::pair<int64_t, int64_t>> ranges;
    for (int64_t i = 0; i < a.batch; ++i) {
      const Sequence s = sequence_at(a, i);
      first_rows_.push_back(rows_);
      rows_ += s.k_len;
      if (s.k_len > 0) ranges.push_back({s.k_start, s.k_start + s.k_len});
    }
    std::sort(ranges.begin(), ranges.end());
    for (size_t i = 1; i < ranges.size(); ++i) overlap_ |= ranges[i].first < ranges[i - 1].second;
  }

  const int64_t* first_rows() const { return overlap_ ? first_rows_.data() : nullptr; }

  // Memory for the parts that are written in place of `result`, if that is wanted and has parts.
  Tensor parts(void*& result, int64_t head_dim) const {
    const bool needed = overlap_ && result;
    Tensor memory = empty_floats(needed ? rows_ * a_.num_kv_heads * head_dim : 0);
    if (needed) result = memory.mutable_data_ptr();
    return memory;
  }

  void add_up(const Tensor& parts, Tensor& result) const {
    if (!overlap_) return;
    const int64_t heads = a_.num_kv_heads, dim = result.size(2), row = heads * dim;
    Tensor sums = empty_tensor({total_k_, heads, dim}, DType::float32);
    float* to = static_cast<float*>(sums.mutable_data_ptr());
    const float* from = static_cast<const float*>(parts.const_data_ptr());
    std::memset(to, 0, total_k_ * row * sizeof(float));
    for (int64_t i = 0; i < a_.batch; ++i) {
      const Sequence s = sequence_at(a_, i);
      float* sum = to + s.k_start * row;
      const float* part = from + first_rows_[i] * row;
      for (int64_t j = 0; j < s.k_len * row; ++j) sum[j] += part[j];
    }
    torch::stable::copy_(result, sums);
  }

 private:
  const Attention& a_;
  int64_t total_k_, rows_ = 0;
  std::vector<int64_t> first_rows_;
  bool overlap_ = false;
};

void backward(const char* op, Form form, StableIValue* stack, uint64_t num_args) {
  Arguments arguments(op, stack, num_args);
  const AttentionArguments x = {arguments, form, /*is_backward=*/true};
  Backward b = {};
  if (arguments.recorded(arguments.are_readable() && accept(x, b), 5)) return;
  const Attention& a = b.forward;
  static Announced announced[4][2];
  const bool has_pairs = multiply_as_pairs(a.q_dtype, a.kv_dtype);
  announced[int(form)][has_pairs].once(op, has_pairs);
  const bool has_dbias = x.output_mask[3] && x.attn_bias && a.bias_dtype <= DType::float16;
  const bool has_dsinks = x.output_mask[4] && x.sinks;
  const int64_t total_k = x.k.size(0);
  const auto result = [&](bool wanted, std::initializer_list<int64_t> shape, DType dtype) {
    return wanted ? empty_tensor(shape, dtype) : empty_tensor({0}, a.q_dtype);
  };
  Tensor dq = result(x.output_mask[0], {a.total_q, a.num_heads, a.head_dim}, a.q_dtype);
  // gradients of keys that sequences share are sums of parts
  SharedKeys shared(a, total_k);
  Tensor dk = result(x.output_mask[1], {total_k, a.num_kv_heads, a.head_dim}, a.q_dtype);
  Tensor dv = result(x.output_mask[2], {total_k, a.num_kv_heads, a.head_dim_v}, a.q_dtype);
  const int64_t bias_heads = has_dbias ? x.attn_bias.size(0) : 0;
  const int64_t bias_keys = has_dbias ? x.attn_bias.size(2) : 0;
  Tensor dbias = result(has_dbias, {bias_heads, a.total_q, bias_keys}, a.bias_dtype);
  Tensor dsinks = result(has_dsinks, {a.num_heads}, DType::float32);
  b.dq = x.output_mask[0] ? dq.mutable_data_ptr() : nullptr;
  b.dk = x.output_mask[1] ? dk.mutable_data_ptr() : nullptr;
  b.dv = x.output_mask[2] ? dv.mutable_data_ptr() : nullptr;
  Tensor dk_parts = shared.parts(b.dk, a.head_dim), dv_parts = shared.parts(b.dv, a.head_dim_v);
  b.part_rows = shared.first_rows();
  b.dbias = has_dbias ? dbias.mutable_data_ptr() : nullptr;

  const Tensor dout = with_contiguous_rows(x.dout), out = with_contiguous_rows(x.forward_out);
  const TensorView dout_view(dout.get()), out_view(out.get());
  b.dout = dout_view.data();
  b.dout_stride_token = dout_view.stride(0);
  b.dout_stride_head = dout_view.stride(1);
  b.out = out_view.data();
  b.out_stride_token = out_view.stride(0);
  b.out_stride_head = out_view.stride(1);

  const bool shared_bias = has_dbias && bias_heads == 1;
  const int64_t bias_numbers = bias_heads * a.total_q * bias_keys;
  b.dbias_stride_head = shared_bias ? 0 : a.total_q * bias_keys;
  b.dbias_stride_query = bias_keys;
  const bool sums_apart = shared_bias && a.bias_dtype != DType::float32;
  Tensor bias_sums = empty_floats(sums_apart ? bias_numbers : 0);
  if (shared_bias)
    b.dbias_sums = static_cast<float*>(sums_apart ? bias_sums.mutable_data_ptr() : b.dbias);
  const bool any_bias = has_dbias && bias_numbers > 0;  // memory of no bytes has no address
  if (any_bias) std::memset(b.dbias, 0, bias_numbers * bytes_of(a.bias_dtype));
  if (any_bias && sums_apart) std::memset(b.dbias_sums, 0, bias_numbers * sizeof(float));

  const int64_t threads = torch::stable::get_num_threads();
  static thread_local BackwardPlan plan;
  if (form == Form::lists)
    make_backward_plan_of_lists(b, total_k, plan);
  else
    make_backward_plan(a, threads, shared_bias, plan);
  const int64_t workers = plan.cost < WORTH_SHARING ? 1 : threads;
  const int64_t places = a.num_heads * a.total_q, width = (a.head_dim + 15) / 16 * 16;
  Tensor statistics = empty_floats(places * (has_dsinks ? 3 : 2));
  b.lse_2 = static_cast<float*>(statistics.mutable_data_ptr());
  b.delta = b.lse_2 + places;
  b.dsink = has_dsinks ? b.delta + places : nullptr;
  Tensor sums = empty_floats(b.dq ? plan.sum_rows * width : 0);
  b.dq_sums = static_cast<float*>(sums.mutable_data_ptr());
  std::vector<int32_t> turns(plan.turns), done(plan.done);
  b.turns = turns.data();
  b.done = done.data();
  follow_plan(plan, b);

  zero_unused(b, total_k);
  run_statistics(b, workers);
  if (b.dq || b.dk || b.dv || b.dbias) run_backward(b, plan, workers);
  if (has_dsinks) sum_sinks(b, static_cast<float*>(dsinks.mutable_data_ptr()));
  if (x.output_mask[1]) shared.add_up(dk_parts, dk);
  if (x.output_mask[2]) shared.add_up(dv_parts, dv);
  if (sums_apart)
    torch::stable::copy_(dbias, torch::stable::view(bias_sums, {1, a.total_q, bias_keys}));
  return_tensors(stack, {dq, dk, dv, dbias, dsinks});
  trim(plan.tasks);
  trim(plan.sequences);
  trim(plan.tiles);
  trim(plan.row_tiles);
  trim(plan.row_counts);
  trim(plan.lists);
  trim(plan.entries);
}

void flash_varlen_backward(StableIValue* stack, uint64_t num_args, uint64_t) {
  backward("flash_varlen_backward", Form::plain, stack, num_args);
}

void blocksparse_backward(StableIValue* stack, uint64_t num_args, uint64_t) {
  backward("blocksparse_backward", Form::layout, stack, num_args);
}

void selected_attention_backward(StableIValue* stack, uint64_t num_args, uint64_t) {
  backward("selected_attention_backward", Form::lists, stack, num_args);
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("flash_varlen_backward", &paged_attn::flash_varlen_backward);
  m.impl("blocksparse_backward", &paged_attn::blocksparse_backward);
  m.impl("selected_attention_backward", &paged_attn::selected_attention_backward);
}
