// selected_mass: its arguments, its guard, and how a call runs.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../core/schedule.h"
#include "../core/seqlen_info.h"
#include "../kernels.h"
#include "announce.h"
#include "attention_call.h"
#include "scratch.h"

namespace paged_attn {
namespace {

bool accept(const AttentionArguments& x, SelectedMass& m) {
  Attention& a = m.forward;
  if (!accept_attention(x, a)) return false;
  const TensorView& lse = x.lse_of_masses;
  if (!lse.is(DType::float32) || !lse.has_shape({a.num_heads, a.total_q})) return false;
  m.lse = strided<float>(lse);
  return true;
}

void run(const SelectedMass& m) {
  const Attention& a = m.forward;
  struct Row {
    int64_t sequence, token, list;
  };
  std::vector<Row> rows;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t q_len = sequence_at(a, b).q_len;
    for (int64_t token = 0; token < q_len; ++token)
      for (int64_t list = 0; list < a.selection.num_lists; ++list) rows.push_back({b, token, list});
  }
  const Kernels& isa = kernels();
  const int64_t floats = isa.mass_floats(m);
  const int64_t keys = a.selection.num_entries * a.selection.unit_size;
  const int64_t cost = a.cu_seqlens_q(a.batch) * a.num_heads * keys * a.head_dim;
  const int64_t workers = cost < WORTH_SHARING ? 1 : torch::stable::get_num_threads();
  static thread_local Scratch workspace;
  run_tasks(int64_t(rows.size()), workers, [&](int64_t i) {
    float* memory = workspace.floats(floats);
    if (memory == nullptr) return false;
    isa.selected_mass(m, rows[i].sequence, rows[i].token, rows[i].list, memory);
    workspace.trim();
    return true;
  });
}

void selected_mass(StableIValue* stack, uint64_t num_args, uint64_t) {
  constexpr const char* op = "selected_mass";
  Arguments arguments(op, stack, num_args);
  const AttentionArguments x = {arguments, Form::masses};
  SelectedMass m = {};
  arguments.require(arguments.are_readable() && accept(x, m));
  const Attention& a = m.forward;
  static Announced announced[2];
  const bool has_pairs = multiply_as_pairs(a.q_dtype, a.kv_dtype);
  announced[has_pairs].once(op, has_pairs);
  const int64_t lists = a.selection.num_lists, entries = a.selection.num_entries;
  Tensor mass = empty_tensor({a.total_q, lists, entries}, DType::float32);
  m.mass = static_cast<float*>(mass.mutable_data_ptr());
  const int64_t numbers = a.total_q * lists * entries;
  if (numbers > 0) {
    std::memset(m.mass, 0, numbers * sizeof(float));
    run(m);
  }
  return_tensors(stack, {mass});
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("selected_mass", &paged_attn::selected_mass);
}
