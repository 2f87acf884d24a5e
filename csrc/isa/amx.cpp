// AMX-BF16 has tiles of many rows to multiply; all else is AVX-512-BF16's.
#include "../core/product_amx.h"
#include "../kernels.h"
#include "../kernels/attention_tile.h"

namespace {

const paged_attn::Kernels& vectors = paged_attn::kernels_avx512bf16;

bool takes_tiles(const Attention& a, bool few_rows) {
  return !few_rows && AmxProduct::suits(a.q_dtype, a.kv_dtype);
}

int64_t workspace_floats(const Attention& a, int64_t few_rows, int64_t groups, int64_t tile_rows) {
  const int64_t floats = vectors.workspace_floats(a, few_rows, groups, tile_rows);
  if (tile_rows == 0 || !takes_tiles(a, false)) return floats;
  return max64(floats, tile_workspace<AmxProduct>(a, tile_rows, nullptr).floats);
}

void attend(const Attention& a, const paged_attn::Task& task, float* workspace) {
  if (!takes_tiles(a, task.few_rows)) return vectors.attend(a, task, workspace);
  static const AmxProduct::Registers registers;
  _tile_loadconfig(&registers);
  attend_tile<AmxProduct>(a, sequence_at(a, task.sequence), task, workspace);
  _tile_release();
}

void merge_splits(const Attention& a, const paged_attn::MergeTask& task, float* acc) {
  vectors.merge_splits(a, task, acc);
}

void reshape_and_cache(const paged_attn::ReshapeAndCache& call, int64_t worker) {
  vectors.reshape_and_cache(call, worker);
}

void merge_states(const paged_attn::MergeStates& call, int64_t token_begin, int64_t token_end) {
  vectors.merge_states(call, token_begin, token_end);
}

}  // namespace

const paged_attn::Kernels paged_attn::kernels_amx = {
    "amx", workspace_floats, attend, merge_splits, reshape_and_cache, merge_states,
};
