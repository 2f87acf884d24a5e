// AMX-BF16 multiplies pairs of bfloat16 by tiles. Few rows whose sums are not finite are computed
// again by AVX-512-BF16.
#include "../core/product_amx_halves.h"
#include "../kernels.h"
#include "../kernels/backward_of_lists.h"
#include "../kernels/decode_amx.h"
#include "../kernels/decode_amx_invariant.h"
#include "../kernels/prefill_amx.h"

namespace {

const paged_attn::Kernels& vectors = paged_attn::kernels_avx512bf16;

// While it exists, denormal numbers count as zero, as they do in products of bfloat16 pairs.
// Otherwise an exponential that underflows would go to microcode, which takes as long as hundreds
// of others.
class DenormalsAreZero {
 public:
  DenormalsAreZero() { _mm_setcsr(before_ | FLUSH_RESULTS | IGNORE_INPUTS); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  static constexpr unsigned FLUSH_RESULTS = 0x8000, IGNORE_INPUTS = 0x0040;
  const unsigned before_ = _mm_getcsr();
};

// Processors with AMX have second-level caches of 2 MiB: hence twice the rows of attention.h.
paged_attn::RowLimits row_limits(const Attention& a) {
  return {few_rows(a), rows_in_cache(a, 1024)};
}

int64_t workspace_floats(const Attention& a, int64_t few_rows, int64_t groups, int64_t tile_rows) {
  int64_t few =
      few_rows ? amx_decode_workspace<BlockSums<16>>(a, few_rows, groups, nullptr).floats() : 0;
  if (few_rows && a.batch_invariant)
    few = amx_decode_workspace<StepSums<16, AmxHalves>>(a, few_rows, groups, nullptr).floats();
  const int64_t tile = tile_rows ? amx_workspace(a, tile_rows, nullptr).floats() : 0;
  return max64(vectors.workspace_floats(a, few_rows, groups, 0), max64(few, tile));
}

void attend_few_rows(const Attention& a, const paged_attn::Task& task, float* workspace) {
  const int64_t rows = rows_of(a, task);
  const int64_t wanted = register_rows(rows);
  const Sequence s = sequence_of(a, task);
  if (a.batch_invariant)
    return wanted == 4   ? decode_amx_invariant<4>(a, s, task, workspace)
           : wanted == 8 ? decode_amx_invariant<8>(a, s, task, workspace)
                         : decode_amx_invariant<16>(a, s, task, workspace);
  const bool done = wanted == 4   ? decode_amx<BlockSums<4>>(a, s, task, workspace)
                    : wanted == 8 ? decode_amx<BlockSums<8>>(a, s, task, workspace)
                                  : decode_amx<BlockSums<16>>(a, s, task, workspace);
  if (done) return;
  if (task.group_end - task.group_begin == 1) return vectors.attend(a, task, workspace);
  // one group at a time: no result may depend on which groups share a task
  paged_attn::Task piece = task;
  for (int32_t group = task.group_begin; group < task.group_end; ++group) {
    piece.group_begin = group;
    piece.group_end = group + 1;
    attend_few_rows(a, piece, workspace);
    if (task.partial >= 0) piece.partial += rows * partial_row_floats(a);
  }
}

void attend(const Attention& a, const paged_attn::Task& task, float* workspace) {
  const DenormalsAreZero mode;
  if (task.few_rows) return attend_few_rows(a, task, workspace);
  static const AmxRegisters registers;
  _tile_loadconfig(&registers);
  prefill_amx(a, sequence_of(a, task), task, workspace);
  _tile_release();
}

int64_t floats_of_backward(const Backward& b) {
  if (b.forward.q_dtype == paged_attn::DType::float16)
    return floats_of_backward_task<AmxHalfProduct>(b);
  return floats_of_backward_task<AmxProduct>(b);
}

void attend_backward_by_tiles(const Backward& b, const BackwardTask& task, float* memory) {
  const DenormalsAreZero mode;
  static const AmxRegisters registers;
  _tile_loadconfig(&registers);
  if (b.forward.q_dtype == paged_attn::DType::float16)
    run_backward_task<AmxHalfProduct>(b, task, memory);
  else
    run_backward_task<AmxProduct>(b, task, memory);
  _tile_release();
}

}  // namespace

// Only the kernels that multiply pairs; engines.cpp takes all others from another table.
const paged_attn::Kernels paged_attn::kernels_amx = {
    "amx", row_limits, workspace_floats, attend, floats_of_backward, attend_backward_by_tiles,
};
