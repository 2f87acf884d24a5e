#include "engines.h"

namespace paged_attn {

bool reads_ahead_into_second_level = false;

namespace {

Engines engines;

// Whether tiles of AMX do not read a cache for few rows.
bool needs_vectors(const Attention& a) {
  return a.kv_dtype == DType::int4 || a.k_scales || a.v_scales;
}

const Kernels& engine_of_tiles(const Attention& a) {
  const bool pairs = multiply_as_pairs(a.q_dtype, a.kv_dtype) && !a.latent &&
                     !(a.batch_invariant && needs_vectors(a));
  return pairs ? *engines.tiles : *engines.rest;
}

const Kernels& engine_of_rows(const Attention& a, int64_t rows) {
  if (a.latent) return *engines.rest;
  // the engine of tiles adds up few rows in the same order as tiles
  if (a.batch_invariant) return engine_of_tiles(a);
  if (!multiply_as_pairs(a.q_dtype, a.kv_dtype)) return *engines.rest;
  if (a.kv_dtype == DType::int8 || a.kv_dtype == DType::int4) return *engines.int8_rows;
  if (needs_vectors(a)) return *engines.one_row;  // which is never one of tiles
  if (a.kv_dtype != DType::bfloat16) return *engines.float8_rows;
  return rows <= 2 ? *engines.one_row : *engines.few_rows;
}

const Kernels& engine_of_backward(const Backward& b) {
  const Attention& a = b.forward;
  if (a.q_dtype == DType::float16) return *engines.half_backward;
  return multiply_as_pairs(a.q_dtype, a.kv_dtype) ? *engines.backward : *engines.rest;
}

RowLimits row_limits(const Attention& a) {
  const int64_t few = engine_of_rows(a, 1).row_limits(a).few;
  return {few, engine_of_tiles(a).row_limits(a).tile};
}

int64_t workspace_floats(const Attention& a, int64_t few_rows, int64_t groups, int64_t tile_rows) {
  int64_t floats = 0;
  const auto need = [&](const Kernels& engine, int64_t few, int64_t tile) {
    const int64_t wanted = engine.workspace_floats(a, few, groups, tile);
    floats = wanted > floats ? wanted : floats;
  };
  if (few_rows) {
    need(engine_of_rows(a, 1), few_rows < 2 ? few_rows : 2, 0);
    need(engine_of_rows(a, few_rows), few_rows, 0);
  }
  if (tile_rows) need(engine_of_tiles(a), 0, tile_rows);
  return floats;
}

void attend(const Attention& a, const Task& task, float* workspace) {
  const int64_t rows = rows_of(a, task);
  const Kernels& engine = task.few_rows ? engine_of_rows(a, rows) : engine_of_tiles(a);
  engine.attend(a, task, workspace);
}

int64_t backward_floats(const Backward& b) { return engine_of_backward(b).backward_floats(b); }

void attend_backward(const Backward& b, const BackwardTask& task, float* workspace) {
  engine_of_backward(b).attend_backward(b, task, workspace);
}

}  // namespace

const Kernels& combine(const Engines& set) {
  static Kernels table;
  engines = set;
  reads_ahead_into_second_level = set.ahead_into_second_level;
  table = *set.rest;
  table.name = set.name;
  table.row_limits = row_limits;
  table.workspace_floats = workspace_floats;
  table.attend = attend;
  table.backward_floats = backward_floats;
  table.attend_backward = attend_backward;
  return table;
}

}  // namespace paged_attn
