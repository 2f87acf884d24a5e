#include <torch/csrc/stable/library.h>

#include "../kernels.h"
#include "announce.h"
#include "arguments.h"
#include "autograd.h"
#include "scratch.h"

namespace {

using namespace paged_attn;

// Bytes written by a call that would not stay in the processor's caches until they are read.
constexpr int64_t STREAMED_BYTES = 4 << 20;
constexpr int64_t LINE_BYTES = 64;  // of a processor's caches

// One cache, of `dim` 4: (num_pages, num_kv_heads, page_size, head_dim). A fused kv_cache is two of
// them, told apart by an offset into its first dimension.
struct Cache {
  TensorView view;
  int64_t first;  // dimension of num_pages
  int64_t half;
  int64_t size(int64_t i) const { return view.size(first + i); }
  int64_t stride(int64_t i) const { return view.stride(first + i); }
  char* data() const {
    char* start = static_cast<char*>(view.mutable_data());
    return start && half ? start + half * view.stride(0) * bytes_of(view.dtype) : start;
  }
};

bool is_quantised(DType d) {
  return d == DType::float8_e4m3fn || d == DType::float8_e5m2 || d == DType::int8;
}

bool accept_cache(const TensorView& from, const Cache& cache) {
  if (cache.view.dim != cache.first + 4) return false;
  if (cache.size(1) != from.size(1) || numbers_of(cache.view) != from.size(2)) return false;
  if (cache.size(1) < 1 || cache.size(2) < 1 || cache.size(3) < 1) return false;
  return cache.view.rows_contiguous() && from.rows_contiguous();
}

bool is_stored(const TensorView& from, const Cache& cache) {
  return cache.view.dtype == from.dtype || is_quantised(cache.view.dtype);
}

bool accept_scale(const TensorView& scale, const TensorView& from, const Cache& cache) {
  return !scale ||
         (scale.is(DType::float32) && (scale.dim == 0 || scale.has_shape({from.size(1)})) &&
          is_quantised(cache.view.dtype));
}

CacheWrite cache_write(const TensorView& from, const Cache& cache, const TensorView& scale) {
  return {from.data(),      from.stride(0),  from.stride(1),  cache.data(),
          cache.stride(0),  cache.stride(1), cache.stride(2), from.dtype,
          cache.view.dtype, from.size(2),    per_head(scale), false};
}

bool in_whole_lines(const CacheWrite& w) {
  const int64_t bytes = bytes_of(w.to_dtype), row = elements_of(w.to_dtype, w.head_dim);
  for (const int64_t elements : {row, w.to_stride_page, w.to_stride_head, w.to_stride_token})
    if (elements * bytes % LINE_BYTES != 0) return false;
  return reinterpret_cast<uintptr_t>(w.to) % LINE_BYTES == 0;
}

// Fills in all but the scales.
bool accept_rows(const TensorView& key, const TensorView& value, const Cache& k_cache,
                 const Cache& v_cache, const TensorView& slots, ReshapeAndCache& r) {
  if (key.dim != 3 || value.dim != 3 || key.dtype > DType::float16 || value.dtype != key.dtype)
    return false;
  if (value.size(0) != key.size(0) || value.size(1) != key.size(1)) return false;
  if (!accept_cache(key, k_cache) || !accept_cache(value, v_cache)) return false;
  if (v_cache.view.dtype != k_cache.view.dtype) return false;
  for (int64_t i = 0; i < 3; ++i)
    if (v_cache.size(i) != k_cache.size(i)) return false;
  if (slots.dim != 1 || !slots.is_one_of({DType::int32, DType::int64})) return false;
  if (slots.size(0) > key.size(0)) return false;
  r.slots = slots.data();
  r.slot_stride = slots.stride(0);
  r.slots_are_int64 = slots.is(DType::int64);
  r.num_tokens = slots.size(0);
  r.num_heads = key.size(1);
  r.page_size = k_cache.size(2);
  if (__builtin_mul_overflow(k_cache.size(0), r.page_size, &r.num_slots)) r.num_slots = INT64_MAX;
  for (int64_t i = 0; i < r.num_tokens; ++i)
    if (slot_at(r, i) >= r.num_slots) return false;
  r.key = cache_write(key, k_cache, TensorView());
  r.value = cache_write(value, v_cache, TensorView());
  return true;
}

bool accept(const TensorView& key, const TensorView& value, const Cache& k_cache,
            const Cache& v_cache, const TensorView& slots, const TensorView& k_scale,
            const TensorView& v_scale, ReshapeAndCache& r) {
  if (!accept_rows(key, value, k_cache, v_cache, slots, r)) return false;
  if (!is_stored(key, k_cache)) return false;
  if (!accept_scale(k_scale, key, k_cache) || !accept_scale(v_scale, key, k_cache)) return false;
  r.key.scale = per_head(k_scale);
  r.value.scale = per_head(v_scale);
  return true;
}

// With a scale for each token and head, which is written, too.
bool accept_quantize(const TensorView& key, const TensorView& value, const Cache& k_cache,
                     const Cache& v_cache, const TensorView& slots, const TensorView& k_scale,
                     const TensorView& v_scale, ReshapeAndCache& r) {
  if (!accept_rows(key, value, k_cache, v_cache, slots, r)) return false;
  if (!is_quantised(k_cache.view.dtype) && !k_cache.view.is(DType::int4)) return false;
  const auto take = [&](const TensorView& scale, CacheWrite& w) {
    if (!scale.is(DType::float32) ||
        !scale.has_shape({k_cache.size(0), k_cache.size(1), k_cache.size(2)}))
      return false;
    w.token_scales = static_cast<float*>(scale.mutable_data());
    w.scale_stride_page = scale.stride(0);
    w.scale_stride_head = scale.stride(1);
    w.scale_stride_token = scale.stride(2);
    return true;
  };
  return take(k_scale, r.key) && take(v_scale, r.value);
}

void run(ReshapeAndCache& r) {
  static Announced announced;
  announced.once("reshape_and_cache", false);
  const int64_t elements = r.num_tokens * r.num_heads * (r.key.head_dim + r.value.head_dim);
  const int64_t threads = elements < 65536 ? 1 : int64_t(torch::stable::get_num_threads());
  r.residues = (threads + 1) / 2;
  if (elements_of(r.key.to_dtype, elements) * bytes_of(r.key.to_dtype) >= STREAMED_BYTES)
    for (CacheWrite* w : {&r.key, &r.value}) w->streamed = in_whole_lines(*w);
  const Kernels& isa = kernels();
  run_tasks(2 * r.residues, threads, [&](int64_t task) {
    isa.reshape_and_cache(r, task);
    return true;
  });
}

void reshape_and_cache(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("reshape_and_cache", stack, num_args);
  const TensorView key = next.tensor(), value = next.tensor(), kv_cache = next.tensor();
  const TensorView slot_mapping = next.tensor();
  const TensorView k_scale = next.optional_tensor(), v_scale = next.optional_tensor();
  ReshapeAndCache call = {};
  const bool fused = kv_cache.dim == 5 && kv_cache.size(0) == 2;
  next.require(
      next.are_readable() && fused &&
      accept(key, value, {kv_cache, 1, 0}, {kv_cache, 1, 1}, slot_mapping, k_scale, v_scale, call));
  bump_version(kv_cache.handle);
  run(call);
}

void reshape_and_cache_split(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("reshape_and_cache.split", stack, num_args);
  const TensorView key = next.tensor(), value = next.tensor();
  const TensorView k_cache = next.tensor(), v_cache = next.tensor();
  const TensorView slot_mapping = next.tensor();
  const TensorView k_scale = next.optional_tensor(), v_scale = next.optional_tensor();
  ReshapeAndCache call = {};
  next.require(next.are_readable() && accept(key, value, {k_cache, 0, 0}, {v_cache, 0, 0},
                                             slot_mapping, k_scale, v_scale, call));
  bump_version(k_cache.handle);
  bump_version(v_cache.handle);
  run(call);
}

void reshape_and_cache_quantize(StableIValue* stack, uint64_t num_args, uint64_t) {
  Arguments next("reshape_and_cache.quantize", stack, num_args);
  const TensorView key = next.tensor(), value = next.tensor();
  const TensorView k_cache = next.tensor(), v_cache = next.tensor();
  const TensorView k_scale = next.tensor(), v_scale = next.tensor();
  const TensorView slot_mapping = next.tensor();
  ReshapeAndCache call = {};
  next.require(next.are_readable() && accept_quantize(key, value, {k_cache, 0, 0}, {v_cache, 0, 0},
                                                      slot_mapping, k_scale, v_scale, call));
  for (const TensorView* written : {&k_cache, &v_cache, &k_scale, &v_scale})
    bump_version(written->handle);
  run(call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(paged_attn, CPU, m) {
  m.impl("reshape_and_cache", &reshape_and_cache);
  m.impl("reshape_and_cache.split", &reshape_and_cache_split);
  m.impl("reshape_and_cache.quantize", &reshape_and_cache_quantize);
}
