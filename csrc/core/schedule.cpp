#include "schedule.h"

#include <algorithm>
#include <numeric>

#include "paged_kv.h"

namespace paged_attn {
namespace {

constexpr int64_t FULL_ROWS = 48;     // multiples of it fill the register tiles of every ISA
constexpr int64_t MANY_TILES = 8;     // of a long sequence, at least, for threads to share
constexpr int64_t PACKED_ROWS = 256;  // with fewer, packing the keys takes too large a part
constexpr int64_t SPLIT_ROWS = 512;  // rows of a sequence above which tiles alone keep threads busy
constexpr int64_t MAX_SPLITS = 32;

int64_t power_of_two_below(int64_t x) {
  int64_t p = 1;
  while (2 * p <= x) p *= 2;
  return p;
}

int64_t tile_tokens(const Attention& a, const Sequence& s, int64_t rows) {
  if (a.selection.enabled) return 1;  // each token has a list of its own
  const int64_t fewest = std::max<int64_t>(64, PACKED_ROWS / a.group_size);
  int64_t limit = std::max(fewest, s.q_len / MANY_TILES);
  if (a.layout.crow) limit = std::min(limit, a.layout.q_block_size);
  const int64_t tokens = std::clamp<int64_t>(rows / a.group_size, 1, limit);
  if (a.layout.crow) return power_of_two_below(tokens);
  const int64_t step = FULL_ROWS / std::gcd(FULL_ROWS, a.group_size);
  return tokens < step ? tokens : (tokens + step / 2) / step * step;
}

// The token after the last one of the tile that starts at `token`. With a block layout, tiles end
// at positions that are multiples of `tokens`, so that none crosses a layout row; tokens with
// negative positions have tiles of their own.
int64_t tile_end(const Attention& a, const Sequence& s, int64_t token, int64_t tokens) {
  int64_t end = token + tokens;
  if (a.layout.crow) {
    const int64_t position = s.past + token;
    end = position < 0 ? std::min(end, -s.past) : token + tokens - position % tokens;
  } else if (s.q_len - end < tokens / 4) {
    end = s.q_len;  // too little for a tile of its own
  }
  return std::min(end, s.q_len);
}

// Cuts [begin, end) at multiples of `size`.
struct Splits {
  int64_t begin, end, size;
  int64_t count() const { return end > begin ? (end - 1) / size - begin / size + 1 : 1; }
};

// How many keys a number of a task's range stands for.
int64_t keys_of_unit(const Attention& a) {
  if (a.selection.enabled) return a.selection.unit_size;
  return a.layout.crow ? a.layout.k_block_size : 1;
}

Splits split_keys(const Attention& a, const Sequence& s, const Task& task) {
  const KeyRange keys = visible_keys(a, s, task.token_begin, task.token_end - 1);
  Splits splits = {keys.begin, keys.end, 1};
  const int64_t unit = keys_of_unit(a);
  if (a.selection.enabled) {
    const int64_t row = s.q_start + task.token_begin;
    splits.begin = 0;
    splits.end = list_length(a, row, list_of(a, task.group_begin));
  } else if (a.layout.crow) {
    splits.begin = splits.end = 0;
    if (keys.end > 0) {
      layout_row(a.layout, s.index, task.group_begin * a.layout.num_heads / a.num_groups,
                 (s.past + task.token_end - 1) / a.layout.q_block_size, &splits.end);
    }
  }
  const int64_t length = (splits.end - splits.begin) * unit;
  const int64_t smallest = task.few_rows ? 1024 : 2048;
  const bool worth = s.q_len * a.num_heads <= SPLIT_ROWS && !a.batch_invariant;
  const int64_t size = round_up(std::max(smallest, length / MAX_SPLITS), smallest);
  splits.size = worth ? std::max<int64_t>(size / unit, 1) : std::max<int64_t>(splits.end, 1);
  return splits;
}

// Adds the tasks of one tile under groups [task.group_begin, task.group_end).
void add_splits(const Attention& a, const Sequence& s, Task task, Plan& plan) {
  const int64_t rows = rows_of(a, task);
  const Splits splits = split_keys(a, s, task);
  const int64_t count = splits.count(), groups = task.group_end - task.group_begin;
  const int64_t unit = keys_of_unit(a);
  const int64_t stride = groups * rows * partial_row_floats(a);
  if (count > 1) {
    plan.merges.push_back({task.sequence, task.token_begin, task.token_end, task.group_begin,
                           task.group_end, int32_t(count), plan.partial_floats, stride});
  }
  for (int64_t i = 0; i < count; ++i) {
    task.part_begin = std::max(splits.begin, (splits.begin / splits.size + i) * splits.size);
    task.part_end = std::min(splits.end, (splits.begin / splits.size + i + 1) * splits.size);
    const int64_t keys = std::max<int64_t>(task.part_end - task.part_begin, 0) * unit;
    task.cost = rows * groups * (keys + ALIGN) * (a.head_dim + a.head_dim_v);
    task.partial = task.merge = -1;
    if (count > 1) {
      task.merge = int64_t(plan.merges.size()) - 1;
      task.partial = plan.partial_floats;
      plan.partial_floats += stride;
    }
    plan.tasks.push_back(task);
  }
}

void add_sequence(const Attention& a, const Sequence& s, const RowLimits& limits, Plan& plan) {
  // a bias hides keys, and a layout or lists name them, per head
  const bool shared = a.bias == nullptr && (a.layout.crow == nullptr || a.layout.num_heads == 1) &&
                      (!a.selection.enabled || a.selection.num_lists == 1);
  const int64_t tokens = tile_tokens(a, s, limits.tile);
  for (int64_t token = 0, end; token < s.q_len; token = end) {
    end = tile_end(a, s, token, tokens);
    const int64_t rows = (end - token) * a.group_size;
    const bool few = rows <= limits.few;
    const int64_t step = few && shared ? a.num_groups : 1;
    if (few)
      plan.few_rows = std::max(plan.few_rows, rows),
      plan.few_groups = std::max(plan.few_groups, step);
    else
      plan.tile_rows = std::max(plan.tile_rows, rows);
    for (int64_t group = 0; group < a.num_groups; group += step) {
      add_splits(a, s,
                 {int32_t(s.index), int32_t(token), int32_t(end), int32_t(group),
                  int32_t(group + step), few, 0, 0, -1, -1, 0},
                 plan);
    }
  }
}

// Piece `i` of a task or a merge that covers many heads, cut every `step` groups.
template <class T>
T cut_heads(const Attention& a, const T& whole, int64_t step, int64_t i) {
  T piece = whole;
  const int64_t rows = rows_of(a, whole);
  piece.group_begin = int32_t(whole.group_begin + i * step);
  piece.group_end = int32_t(std::min<int64_t>(piece.group_begin + step, whole.group_end));
  if (whole.partial >= 0) piece.partial += i * step * rows * partial_row_floats(a);
  return piece;
}

// Cuts tasks that cover many heads by heads, until every thread has a few.
void spread_heads(const Attention& a, int64_t threads, Plan& plan) {
  const int64_t wanted = 4 * threads, have = int64_t(plan.tasks.size());
  if (have == 0 || have >= wanted) return;
  const int64_t pieces = (wanted + have - 1) / have;
  const auto step_of = [&](int64_t groups) { return std::max<int64_t>(1, groups / pieces); };

  std::vector<MergeTask> merges;
  std::vector<int64_t> first_piece;
  for (const MergeTask& merge : plan.merges) {
    const int64_t groups = merge.group_end - merge.group_begin, step = step_of(groups);
    first_piece.push_back(int64_t(merges.size()));
    for (int64_t i = 0; i * step < groups; ++i) merges.push_back(cut_heads(a, merge, step, i));
  }
  std::vector<Task> tasks;
  for (const Task& task : plan.tasks) {
    const int64_t groups = task.group_end - task.group_begin, step = step_of(groups);
    for (int64_t i = 0; i * step < groups; ++i) {
      tasks.push_back(cut_heads(a, task, step, i));
      Task& piece = tasks.back();
      piece.cost = task.cost / groups * (piece.group_end - piece.group_begin);
      if (task.merge >= 0) piece.merge = first_piece[task.merge] + i;
    }
  }
  plan.tasks.swap(tasks);
  plan.merges.swap(merges);
}

}  // namespace

void make_plan(const Attention& a, const RowLimits& limits, int64_t threads, Plan& plan) {
  plan.tasks.clear();
  plan.merges.clear();
  plan.partial_floats = plan.few_rows = plan.few_groups = plan.tile_rows = plan.cost = 0;
  for (int64_t b = 0; b < a.batch; ++b) add_sequence(a, sequence_at(a, b), limits, plan);
  for (const Task& task : plan.tasks) plan.cost += task.cost;
  if (threads == 1 || plan.cost < WORTH_SHARING) return;
  spread_heads(a, threads, plan);
  std::sort(plan.tasks.begin(), plan.tasks.end(),
            [](const Task& x, const Task& y) { return x.cost > y.cost; });
}

}  // namespace paged_attn
