// select_keys: its arguments, its guard, and how a call runs.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <vector>

#include "../core/schedule.h"
#include "../core/seqlen_info.h"
#include "../kernels.h"
#include "announce.h"
#include "attention_call.h"
#include "scratch.h"
#include "selected_guard.h"

namespace paged_attn {
namespace {

bool accept(const AttentionArguments& x, SelectKeys& s) {
  Attention& a = s.forward;
  if (!accept_attention(x, a)) return false;
  const TensorView& weights = x.weights;
  if (weights && !(weights.is_one_of({DType::float32, DType::bfloat16, DType::float16}) &&
                   weights.has_shape({a.total_q, a.num_heads})))
    return false;
  if (!is_unit_size(x.select_size)) return false;
  if (x.score != "relu" && x.score != "identity") return false;
  if (x.pool != "max" && x.pool != "mean" && x.pool != "sum") return false;
  if (x.force_first < 0 || x.force_last < 0 || x.num_units < 1 || x.force_first > x.num_units ||
      x.force_last > x.num_units - x.force_first)
    return false;
  s.has_relu = x.score == "relu";
  s.pool = x.pool == "max" ? Pool::max : x.pool == "mean" ? Pool::mean : Pool::sum;
  s.weights = weights.data();
  if (weights) {
    s.weights_dtype = weights.dtype;
    s.weights_stride_token = weights.stride(0);
    s.weights_stride_head = weights.stride(1);
  }
  s.unit_size = x.select_size;
  s.num_units = x.num_units;
  s.force_first = x.force_first;
  s.force_last = x.force_last;
  return true;
}

// Turns the scores of a token's units into what they are ranked by: those that are selected in any
// case are +inf, those that cannot be are -inf.
void rank(const SelectKeys& x, const Sequence& s, int64_t token, int64_t count, float* units) {
  const int64_t size = x.unit_size;
  const KeyRange visible = visible_keys(x.forward, s, token);
  const int64_t seen = (visible.end + size - 1) / size;
  if (x.pool == Pool::mean)
    for (int64_t u = 0; u < seen; ++u)
      units[u] /= float(std::min((u + 1) * size, visible.end) - u * size);
  for (int64_t u = 0; u < seen; ++u)
    if (std::isnan(units[u])) units[u] = -INFINITY;
  const int64_t last = std::min(s.past + token, s.k_len - 1);
  const int64_t own = last < 0 ? -1 : last / size;
  for (int64_t u = 0; u < std::min(x.force_first, seen); ++u) units[u] = INFINITY;
  for (int64_t u = std::max<int64_t>(own - x.force_last + 1, 0); u < std::min(own + 1, seen); ++u)
    units[u] = INFINITY;
}

// The ids of the units that rank highest, ascending; of equal ones the smallest. Returns how many.
int32_t best_units(const float* units, int64_t count, int64_t most, std::vector<float>& sorted,
                   int32_t* ids) {
  float least = -INFINITY;  // which is not selected itself
  int64_t of_least = 0;
  if (count > most) {
    sorted.assign(units, units + count);
    std::nth_element(sorted.begin(), sorted.begin() + most - 1, sorted.end(),
                     std::greater<float>());
    least = sorted[most - 1];
    const int64_t better = std::count_if(units, units + count, [&](float x) { return x > least; });
    if (least > -INFINITY) of_least = most - better;
  }
  int32_t found = 0;
  for (int64_t u = 0; u < count; ++u)
    if (units[u] > least || (units[u] == least && of_least-- > 0)) ids[found++] = int32_t(u);
  return found;
}

void run(const SelectKeys& x, int32_t* ids, int32_t* counts) {
  constexpr int64_t ROWS = 256, MOST_SCORES = 1 << 20;
  const Attention& a = x.forward;
  const auto units_of = [&](const Sequence& s) {
    return (s.k_len + x.unit_size - 1) / x.unit_size;
  };
  std::vector<SelectTask> tasks;
  int64_t most_tokens = 1, most_units = 1, cost = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_at(a, b);
    const int64_t units = units_of(s);
    if (units == 0) continue;
    const int64_t tokens = std::max<int64_t>(1, std::min(ROWS / a.group_size, MOST_SCORES / units));
    most_tokens = std::max(most_tokens, std::min(tokens, s.q_len));
    most_units = std::max(most_units, std::min(tokens, s.q_len) * units);
    cost += s.q_len * s.k_len * a.num_heads * a.head_dim;
    for (int64_t token = 0; token < s.q_len; token += tokens)
      for (int64_t group = 0; group < a.num_kv_heads; ++group)
        tasks.push_back({b, group, token, std::min(token + tokens, s.q_len)});
  }
  // under a causal mask the last ones take longest
  std::reverse(tasks.begin(), tasks.end());
  const Kernels& isa = kernels();
  const int64_t floats = (isa.select_floats(x, most_tokens) + 15) / 16 * 16;
  const int64_t workers = cost < WORTH_SHARING ? 1 : torch::stable::get_num_threads();
  static thread_local Scratch workspace;
  run_tasks(int64_t(tasks.size()), workers, [&](int64_t i) {
    static thread_local std::vector<float> sorted;
    float* memory = workspace.floats(floats + most_units);
    if (memory == nullptr) return false;
    const SelectTask& task = tasks[i];
    const Sequence s = sequence_at(a, task.sequence);
    const int64_t count = units_of(s);
    isa.score_units(x, task, count, memory + floats, memory);
    for (int64_t token = task.token_begin; token < task.token_end; ++token) {
      float* units = memory + floats + (token - task.token_begin) * count;
      const int64_t list = (s.q_start + token) * a.num_kv_heads + task.group;
      rank(x, s, token, count, units);
      counts[list] = best_units(units, count, x.num_units, sorted, ids + list * x.num_units);
    }
    workspace.trim();
    trim(sorted);
    return true;
  });
}

void select_keys(StableIValue* stack, uint64_t num_args, uint64_t) {
  constexpr const char* op = "select_keys";
  Arguments arguments(op, stack, num_args);
  const AttentionArguments x = {arguments, Form::units};
  SelectKeys s = {};
  arguments.require(arguments.are_readable() && accept(x, s));
  const Attention& a = s.forward;
  static Announced announced[2];
  const bool has_pairs = multiply_as_pairs(a.q_dtype, a.kv_dtype);
  announced[has_pairs].once(op, has_pairs);
  Tensor ids = empty_tensor({a.total_q, a.num_kv_heads, s.num_units}, DType::int32);
  Tensor counts = empty_tensor({a.total_q, a.num_kv_heads}, DType::int32);
  const int64_t lists = a.total_q * a.num_kv_heads;
  if (lists > 0) {
    int32_t* id = static_cast<int32_t*>(ids.mutable_data_ptr());
    int32_t* count = static_cast<int32_t*>(counts.mutable_data_ptr());
    std::fill(id, id + lists * s.num_units, -1);
    std::fill(count, count + lists, 0);
    run(s, id, count);
  }
  return_tensors(stack, {ids, counts});
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) { m.impl("select_keys", &paged_attn::select_keys); }
