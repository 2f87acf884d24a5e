#include "selected_guard.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../core/selected_keys.h"
#include "scratch.h"

namespace paged_attn {
namespace {

// Units that were named before, found in constant time.
class Named {
 public:
  // Forgets all, and makes room for as many units.
  void clear(int64_t most) {
    int bits = 1;
    while ((int64_t(1) << bits) < 2 * most) ++bits;
    shift_ = 64 - bits;
    places_.assign(size_t(1) << bits, -1);
  }

  // False if it was named before.
  bool add(int32_t unit) {
    const size_t mask = places_.size() - 1;
    size_t i = uint64_t(unit) * 0x9e3779b97f4a7c15u >> shift_;
    for (; places_[i] >= 0; i = (i + 1) & mask)
      if (places_[i] == unit) return false;
    places_[i] = unit;
    return true;
  }

  void trim() { paged_attn::trim(places_); }

 private:
  std::vector<int32_t> places_;
  int shift_ = 0;
};

bool has_pages(const AttentionArguments& x, const Attention& a, int64_t sequence, KeyRange keys) {
  for (int64_t i = page_of(a, keys.begin); i * a.page_size < keys.end; ++i) {
    if (i >= x.block_table.size(1)) return false;
    const int32_t page = a.block_table(sequence, i);
    if (page < 0 || page >= a.num_pages) return false;
  }
  return true;
}

bool accept_list(const AttentionArguments& x, const Attention& a, const Sequence& s, int64_t token,
                 int64_t list, Named& named) {
  const int64_t row = s.q_start + token;
  if (a.selection.counts) {
    const int32_t count = a.selection.counts(row, list);
    if (count < 0 || count > a.selection.num_entries) return false;
  }
  ListedKeys walk = listed_keys(a, s, token, list, 0, list_length(a, row, list));
  walk.visible = keys_of_token(a, s, token);  // which the table may have no room for
  ListedKeys again = walk;
  bool is_ascending = true;
  for (int64_t before = -1; next_unit(walk); before = walk.unit) {
    is_ascending &= walk.unit > before;
    if (x.block_table && !has_pages(x, a, s.index, walk.keys)) return false;
  }
  if (is_ascending) return true;
  named.clear(again.end);
  while (next_unit(again))
    if (!named.add(int32_t(again.unit))) return false;
  return true;
}

}  // namespace

bool is_unit_size(int64_t keys) { return keys >= 1 && keys <= 256 && (keys & (keys - 1)) == 0; }

bool accept_lists(const AttentionArguments& x, Attention& a) {
  const TensorView &indices = x.key_indices, &counts = x.num_selected;
  const int64_t size = x.select_size;
  if (!is_unit_size(size)) return false;
  if (indices.dim != 3 || !indices.is(DType::int32) || indices.size(0) != a.total_q) return false;
  const int64_t lists = indices.size(1);
  if (lists != 1 && lists != a.num_kv_heads) return false;
  if (counts && !(counts.is(DType::int32) && counts.has_shape({a.total_q, lists}))) return false;
  if (x.are_slots() &&
      (x.causal || x.window_size_left != -1 || x.window_size_right != -1 || x.cu_seqlens_k ||
       x.seqused_k || x.k_start || x.q_position || a.page_size % size != 0))
    return false;
  Selection& lists_of_call = a.selection;
  lists_of_call.enabled = true;
  lists_of_call.units = static_cast<const int32_t*>(indices.data());
  lists_of_call.stride_token = indices.stride(0);
  lists_of_call.stride_list = indices.stride(1);
  lists_of_call.stride_entry = indices.stride(2);
  lists_of_call.counts = strided<int32_t>(counts);
  lists_of_call.num_lists = lists;
  lists_of_call.num_entries = indices.size(2);
  lists_of_call.unit_size = size;
  lists_of_call.is_slots = x.are_slots();
  lists_of_call.reach = INT64_MAX;
  if (x.block_table) lists_of_call.reach = a.num_pages ? x.block_table.size(1) * a.page_size : 0;
  lists_of_call.window_left = a.window_left;
  lists_of_call.window_right = a.window_right;
  a.window_left = a.window_right = -1;
  return true;
}

bool accept_list_values(const AttentionArguments& x, const Attention& a) {
  constexpr int64_t ENTRIES_OF_TASK = 1 << 14;
  const int64_t lists = a.selection.num_lists;
  const int64_t tokens =
      std::max<int64_t>(1, ENTRIES_OF_TASK / std::max<int64_t>(1, lists * a.selection.num_entries));
  struct Part {
    int64_t sequence, begin, end;
  };
  std::vector<Part> parts;
  for (int64_t b = 0; b < a.batch; ++b) {
    const int64_t q_len = sequence_at(a, b).q_len;
    for (int64_t token = 0; token < q_len; token += tokens)
      parts.push_back({b, token, std::min(token + tokens, q_len)});
  }
  std::atomic<bool> accepted{true};
  run_tasks(int64_t(parts.size()), torch::stable::get_num_threads(), [&](int64_t i) {
    static thread_local Named named;
    const Sequence s = sequence_at(a, parts[i].sequence);
    for (int64_t token = parts[i].begin; token < parts[i].end && accepted; ++token)
      for (int64_t list = 0; list < lists; ++list)
        if (!accept_list(x, a, s, token, list, named)) accepted = false;
    named.trim();
    return true;
  });
  return accepted;
}

}  // namespace paged_attn
