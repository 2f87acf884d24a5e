// flash_varlen_plan and so on: what a call would do, as JSON. Nothing is computed.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <string>

#include "../core/schedule.h"
#include "../kernels.h"
#include "announce.h"
#include "attention_call.h"

namespace paged_attn {
namespace {

std::string described(const Attention& a) {
  Plan plan;
  const int64_t threads = torch::stable::get_num_threads();
  make_plan(a, kernels().row_limits(a), threads, plan);
  int64_t rows = 0;
  for (const Task& task : plan.tasks) rows += task.few_rows;
  const int64_t floats =
      kernels().workspace_floats(a, plan.few_rows, plan.few_groups, plan.tile_rows);
  std::string text;
  const auto add = [&](const char* name, int64_t number) {
    text += (text.empty() ? "{\"" : ", \"") + std::string(name) + "\": " + std::to_string(number);
  };
  add("has_pairs", multiply_as_pairs(a.q_dtype, a.kv_dtype));
  add("row_tasks", rows);
  add("tile_tasks", int64_t(plan.tasks.size()) - rows);
  add("merges", int64_t(plan.merges.size()));
  add("threads", plan.cost < WORTH_SHARING ? 1 : threads);
  add("bytes_shared", plan.partial_floats * int64_t(sizeof(float)));
  add("bytes_per_thread", floats * int64_t(sizeof(float)));
  return text + "}";
}

void plan(const char* op, Form form, StableIValue* stack, uint64_t num_args) {
  std::string text;
  {
    Arguments arguments(op, stack, num_args);
    const AttentionArguments x = {arguments, form};
    Attention a = {};
    arguments.require(arguments.are_readable() && accept_attention(x, a));
    text = described(a);
  }
  stack[0] = torch::stable::detail::from(text);
}

void flash_varlen_plan(StableIValue* stack, uint64_t num_args, uint64_t) {
  plan("flash_varlen", Form::plain, stack, num_args);
}

void blocksparse_plan(StableIValue* stack, uint64_t num_args, uint64_t) {
  plan("blocksparse", Form::layout, stack, num_args);
}

void selected_attention_plan(StableIValue* stack, uint64_t num_args, uint64_t) {
  plan("selected_attention", Form::lists, stack, num_args);
}

}  // namespace
}  // namespace paged_attn

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("flash_varlen_plan", &paged_attn::flash_varlen_plan);
  m.impl("blocksparse_plan", &paged_attn::blocksparse_plan);
  m.impl("selected_attention_plan", &paged_attn::selected_attention_plan);
}
