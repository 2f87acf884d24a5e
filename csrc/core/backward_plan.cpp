#include "backward_plan.h"

#include <algorithm>
#include <cstring>

#include "paged_kv.h"

namespace paged_attn {
namespace {

constexpr int64_t ROW_STEP = 48;  // multiples of it fill the register tiles of every ISA
constexpr int64_t MOST_ROWS = 2 * ROW_STEP;

int64_t tile_tokens(const Attention& a) {
  int64_t tokens = std::max<int64_t>(1, MOST_ROWS / a.group_size);
  if (a.layout.crow) {
    tokens = std::min(tokens, a.layout.q_block_size);
    while (tokens & (tokens - 1)) tokens &= tokens - 1;  // a power of two
  }
  return tokens;
}

void add_tiles(const Attention& a, const Sequence& s, BackwardSequence& x, BackwardPlan& plan) {
  const int64_t tokens = tile_tokens(a);
  x.tiles = int64_t(plan.tiles.size());
  x.rows = 0;
  for (int64_t token = 0, end; token < s.q_len; token = end) {
    end = std::min(token + tokens, s.q_len);
    int64_t row = -1;
    if (a.layout.crow) {  // no tile crosses a layout row
      const int64_t position = s.past + token;
      end = std::min(s.q_len, position < 0 ? std::min(token + tokens, -s.past)
                                           : token + tokens - position % tokens);
      if (position >= 0) row = position / a.layout.q_block_size;
    }
    plan.tiles.push_back({int32_t(token), int32_t(end), int32_t(row), x.rows});
    const int64_t rows = (end - token) * a.group_size;
    plan.rows = std::max(plan.rows, rows);
    x.rows += round_up(rows, ROW_STEP);
  }
  x.num_tiles = int64_t(plan.tiles.size()) - x.tiles;
  x.sums = plan.sum_rows;
  x.turns = plan.turns;
  plan.sum_rows += x.rows * a.num_groups;
  plan.turns += x.num_tiles * a.num_groups;
}

// The layout by columns: for each key tile the rows that list some of it, in ascending order. The
// layout was checked before, but may have changed since: only columns that exist count.
void transpose_layout(const Attention& a, const Sequence& s, BackwardSequence& x,
                      BackwardPlan& plan) {
  const BlockLayout& l = a.layout;
  const int64_t first = max64(s.past, 0) / l.q_block_size;
  const int64_t last = s.past + s.q_len - 1;
  const bool sees = s.q_len > 0 && s.k_len > 0 && last >= 0;
  x.num_rows = sees ? last / l.q_block_size + 1 - first : 0;
  x.row_tiles = int64_t(plan.row_tiles.size());
  for (int64_t i = 0; i < x.num_tiles; ++i) {
    QueryTile& tile = plan.tiles[x.tiles + i];
    if (tile.row < 0) continue;
    tile.row -= int32_t(first);
    while (int64_t(plan.row_tiles.size()) - x.row_tiles <= tile.row)
      plan.row_tiles.push_back(int32_t(i));
  }
  while (int64_t(plan.row_tiles.size()) - x.row_tiles <= x.num_rows)
    plan.row_tiles.push_back(int32_t(x.num_tiles));

  x.lists = int64_t(plan.lists.size());
  x.row_counts = int64_t(plan.row_counts.size());
  struct Listed {
    int64_t key_tile;
    LayoutEntry entry;
  };
  std::vector<Listed> listed;
  std::vector<std::pair<int64_t, uint32_t>> parts;  // of a row: key tile, granules
  std::vector<int64_t> ends;
  for (int64_t head = 0; head < l.num_heads; ++head) {
    listed.clear();
    ends.assign(x.num_key_tiles + 1, 0);
    for (int64_t row = 0; row < x.num_rows; ++row) {
      int64_t count;
      const int32_t* columns = layout_row(l, s.index, head, first + row, &count);
      parts.clear();
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = int64_t(read_once(columns + i * l.col_entry)) * l.k_block_size;
        if (begin < 0) continue;
        const int64_t end = std::min(begin + l.k_block_size, s.k_len);
        for (int64_t key = begin; key < end; key += ALIGN)
          parts.push_back({key / KEY_TILE, 1u << (key % KEY_TILE / ALIGN)});
      }
      std::sort(parts.begin(), parts.end());
      const size_t of_row = listed.size();
      for (const auto& [key_tile, granule] : parts) {
        if (listed.size() == of_row || listed.back().key_tile != key_tile) {
          const int32_t rank = int32_t(listed.size() - of_row);
          listed.push_back({key_tile, {int32_t(row), rank, 0, 0}});
          ++ends[key_tile + 1];
        }
        listed.back().entry.granules |= granule;
      }
      const int32_t tiles = int32_t(listed.size() - of_row);
      for (size_t i = of_row; i < listed.size(); ++i) listed[i].entry.count = tiles;
      plan.row_counts.push_back(tiles);
    }
    // a counting sort by key tiles; `ends` become where each list begins
    const int64_t base = int64_t(plan.entries.size());
    plan.entries.resize(base + listed.size());
    for (int64_t j = 0; j < x.num_key_tiles; ++j) ends[j + 1] += ends[j];
    for (int64_t j = 0; j <= x.num_key_tiles; ++j) plan.lists.push_back(base + ends[j]);
    for (const Listed& y : listed) plan.entries[base + ends[y.key_tile]++] = y.entry;
  }
}

void clear(BackwardPlan& plan) {
  plan.tasks.clear();
  plan.sequences.clear();
  plan.tiles.clear();
  plan.row_tiles.clear();
  plan.row_counts.clear();
  plan.lists.clear();
  plan.entries.clear();
  plan.sum_rows = plan.turns = plan.done = plan.rows = plan.listed_rows = plan.cost = 0;
}

}  // namespace

void make_backward_plan_of_lists(const Backward& backward, int64_t total_k, BackwardPlan& plan) {
  const Attention& a = backward.forward;
  constexpr int64_t MANY_TASKS = 64, TOKENS = 8, MOST_SUMS = 1 << 22;
  clear(plan);
  plan.rows = a.group_size;
  // no bit depends on how many keys a task has
  const int64_t pieces = (MANY_TASKS + a.num_kv_heads - 1) / a.num_kv_heads;
  const int64_t most = std::max<int64_t>(1, MOST_SUMS / (a.head_dim + a.head_dim_v));
  const int64_t size = std::min(std::max<int64_t>(KEY_TILE, (total_k + pieces - 1) / pieces), most);
  plan.listed_rows = std::min(size, total_k);
  BackwardTask task = {};
  const bool wants_keys = backward.dk || backward.dv;
  for (int64_t row = 0; wants_keys && row < total_k; row += size)
    for (int64_t h = 0; h < a.num_kv_heads; ++h) {
      task.kv_head = int32_t(h);
      task.rows_begin = row;
      task.rows_end = std::min(row + size, total_k);
      plan.tasks.push_back(task);
    }
  task.rows_begin = task.rows_end = 0;
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_at(a, b);
    const int64_t keys = std::min(s.k_len, a.selection.num_entries * a.selection.unit_size);
    plan.cost += s.q_len * keys * a.num_heads * (a.head_dim + a.head_dim_v);
    plan.sequences.push_back({});
    task.sequence = int32_t(b);
    for (int64_t token = 0; backward.dq && token < s.q_len; token += TOKENS)
      for (int64_t h = 0; h < a.num_kv_heads; ++h) {
        task.kv_head = int32_t(h);
        task.token_begin = int32_t(token);
        task.token_end = int32_t(std::min(token + TOKENS, s.q_len));
        plan.tasks.push_back(task);
      }
  }
}

void make_backward_plan(const Attention& a, int64_t threads, bool ordered_heads,
                        BackwardPlan& plan) {
  clear(plan);
  // Neighbours in the list of tasks run at the same time, on key tiles of as many heads as there
  // are threads: they seldom wait for each other, and few queries are in the caches at once.
  const int64_t together = ordered_heads ? 1 : std::min(threads, a.num_kv_heads);
  for (int64_t b = 0; b < a.batch; ++b) {
    const Sequence s = sequence_at(a, b);
    BackwardSequence x = {};
    // a sequence without keys has one, which writes zeros
    x.num_key_tiles = std::max<int64_t>(1, (s.k_len + KEY_TILE - 1) / KEY_TILE);
    add_tiles(a, s, x, plan);
    if (a.layout.crow) transpose_layout(a, s, x, plan);
    plan.sequences.push_back(x);
    plan.cost += s.q_len * s.k_len * a.num_heads * (a.head_dim + a.head_dim_v);
    for (int64_t first = 0; first < a.num_kv_heads; first += together)
      for (int64_t j = 0; j < x.num_key_tiles; ++j)
        for (int64_t h = first; h < std::min(first + together, a.num_kv_heads); ++h) {
          const int64_t done = plan.done + h * x.num_key_tiles + j;
          plan.tasks.push_back({int32_t(b), int32_t(h), int32_t(j), done,
                                h > 0 ? done - x.num_key_tiles : -1, 0, 0, 0, 0});
        }
    plan.done += a.num_kv_heads * x.num_key_tiles;
  }
}

void follow_plan(const BackwardPlan& plan, Backward& b) {
  b.tile_rows = plan.rows;
  b.listed_rows = plan.listed_rows;
  b.sequences = plan.sequences.data();
  b.tiles = plan.tiles.data();
  b.row_tiles = plan.row_tiles.data();
  b.row_counts = plan.row_counts.data();
  b.lists = plan.lists.data();
  b.entries = plan.entries.data();
}

void zero_unused(const Backward& b, int64_t total_k) {
  const Attention& a = b.forward;
  const auto zero = [&](void* data, int64_t begin, int64_t end, int64_t row) {
    row *= bytes_of(a.q_dtype);
    if (data && end > begin)
      std::memset(static_cast<char*>(data) + begin * row, 0, (end - begin) * row);
  };
  const auto zero_keys = [&](int64_t begin, int64_t end) {
    zero(b.dk, begin, end, a.num_kv_heads * a.head_dim);
    zero(b.dv, begin, end, a.num_kv_heads * a.head_dim_v);
  };
  zero(b.dq, a.cu_seqlens_q(a.batch), a.total_q, a.num_heads * a.head_dim);
  if (b.part_rows) return;  // they are sums
  if (a.k_start) return zero_keys(0, total_k);
  int64_t used = 0;
  for (int64_t i = 0; i < a.batch; ++i) {
    const Sequence s = sequence_at(a, i);
    zero_keys(used, s.k_start);
    used = s.k_start + s.k_len;
  }
  zero_keys(used, total_k);
}

void sum_sinks(const Backward& b, float* dsinks) {
  const Attention& a = b.forward;
  const int64_t used = a.cu_seqlens_q(a.batch);
  for (int64_t head = 0; head < a.num_heads; ++head) {
    double sum = 0;
    for (int64_t token = 0; token < used; ++token) sum += b.dsink[head * a.total_q + token];
    dsinks[head] = float(sum);
  }
}

}  // namespace paged_attn
