// Scatters new keys and values to their slots; a cache of another dtype stores value / scale.
#pragma once

#include "../core/seqlen_info.h"
#include "../core/tokens.h"
#include "../core/vec/convert.h"

namespace {

template <class From, class To>
inline void convert_head(const From* from, To* to, int64_t head_dim, float scale) {
  for (int64_t d = 0; d < head_dim; d += W) {
    const int n = int(min64(W, head_dim - d));
    store(to + d, (n == W ? load(from + d) : load(from + d, n)) / set1(scale), n);
  }
}

inline void write_token(const paged_attn::CacheWrite& w, int64_t token, int64_t page,
                        int64_t offset, int64_t num_heads) {
  const int64_t from_bytes = bytes_of(w.from_dtype), to_bytes = bytes_of(w.to_dtype);
  for (int64_t h = 0; h < num_heads; ++h) {
    const int64_t source = token * w.from_stride_token + h * w.from_stride_head;
    const int64_t target =
        page * w.to_stride_page + h * w.to_stride_head + offset * w.to_stride_token;
    const char* from = (const char*)w.from + source * from_bytes;
    char* to = (char*)w.to + target * to_bytes;
    if (w.from_dtype == w.to_dtype) {
      memcpy(to, from, w.head_dim * to_bytes);
      continue;
    }
    const float scale = w.scale ? w.scale(0, h) : 1.f;
    with_type(w.from_dtype, [&](auto from_tag) __attribute__((always_inline)) {
      with_type(w.to_dtype, [&](auto to_tag) __attribute__((always_inline)) {
        typedef typename decltype(from_tag)::type From;
        typedef typename decltype(to_tag)::type To;
        if constexpr (sizeof(From) > sizeof(To) && sizeof(To) == 1)
          convert_head((const From*)from, (To*)to, w.head_dim, scale);
      });
    });
  }
}

void reshape_and_cache(const paged_attn::ReshapeAndCache& r, int64_t worker) {
  for (int64_t t = 0; t < r.num_tokens; ++t) {
    const int64_t slot = r.slots_are_int64 ? ((const int64_t*)r.slots)[t * r.slot_stride]
                                           : ((const int32_t*)r.slots)[t * r.slot_stride];
    if (slot < 0 || slot % r.workers != worker) continue;
    const int64_t page = slot / r.page_size, offset = slot % r.page_size;
    write_token(r.key, t, page, offset, r.num_heads);
    write_token(r.value, t, page, offset, r.num_heads);
  }
}

}  // namespace
