// AMX-BF16 has tiles of many rows to multiply; all else is AVX-512-BF16's.
#include "../kernels.h"
#include "../kernels/attention_amx.h"

namespace {

const paged_attn::Kernels& vectors = paged_attn::kernels_avx512bf16;

// Denormal numbers count as zero, as they do in the products of bfloat16 pairs: an exponential that
// underflows would otherwise be handed to microcode, which takes as long as hundreds of others.
class DenormalsAreZero {
 public:
  DenormalsAreZero() { _mm_setcsr(before_ | FLUSH_RESULTS | IGNORE_INPUTS); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned FLUSH_RESULTS = 0x8000, IGNORE_INPUTS = 0x0040;
  const unsigned before_ = _mm_getcsr();
};

int64_t workspace_floats(const Attention& a, int64_t few_rows, int64_t groups, int64_t tile_rows) {
  const int64_t floats = vectors.workspace_floats(a, few_rows, groups, tile_rows);
  if (tile_rows == 0 || !AmxProduct::suits(a.q_dtype, a.kv_dtype)) return floats;
  return max64(floats, amx_workspace(a, tile_rows, nullptr).floats);
}

void attend(const Attention& a, const paged_attn::Task& task, float* workspace) {
  if (!AmxProduct::suits(a.q_dtype, a.kv_dtype)) return vectors.attend(a, task, workspace);
  const DenormalsAreZero mode;
  if (task.few_rows) return vectors.attend(a, task, workspace);
  static const AmxRegisters registers;
  _tile_loadconfig(&registers);
  attend_by_tiles(a, sequence_at(a, task.sequence), task, workspace);
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
