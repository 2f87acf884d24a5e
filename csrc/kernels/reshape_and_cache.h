// Scatters new keys and values to their slots; a cache of another dtype stores value / scale.
//
// A large write goes around the caches: fetching lines only to overwrite them whole would double
// what memory has to move, and the last tokens would push the first ones out anyway.
#pragma once

#include "../core/seqlen_info.h"
#include "../core/tokens.h"
#include "../core/vec/convert.h"
#include "../core/vec/float8_lines.h"
#include "../core/vec/stream.h"
#include "quantize_rows.h"

namespace {

// A positive power of two divides exactly by a multiplication, which is several times faster.
struct Divisor {
  float value, inverse;
  bool exact;
  explicit PAGED_ATTN_INLINE Divisor(float x) : value(x), inverse(1 / x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint32_t exponent = bits >> 23 & 255;
    exact = (bits & 0x807fffff) == 0 && exponent > 1 && exponent < 253;
  }
};

template <class From, class To>
inline void convert(const From* from, To* to, int64_t count, const Divisor& scale) {
  for (int64_t d = 0; d < count; d += W) {
    const int n = int(min64(W, count - d));
    const F x = n == W ? load(from + d) : load(from + d, n);
    store(to + d, scale.exact ? x * set1(scale.inverse) : x / set1(scale.value), n);
  }
}

template <class From, class To>
inline void store_row(const From* from, To* to, int64_t head_dim, const Divisor& scale,
                      bool streamed) {
  constexpr int64_t PER_LINE = CACHE_LINE / int64_t(sizeof(To));
  int64_t d = scale.exact ? convert_lines(from, to, head_dim, scale.inverse, streamed) : 0;
  if (!streamed) return convert(from + d, to + d, head_dim - d, scale);
  for (; d < head_dim; d += PER_LINE) {
    To line[PER_LINE];
    convert(from + d, line, PER_LINE, scale);
    stream_line(to + d, line);
  }
}

inline void store_row(const char* from, char* to, int64_t bytes, bool streamed) {
  if (!streamed) {
    memcpy(to, from, bytes);
    return;
  }
  for (int64_t b = 0; b < bytes; b += CACHE_LINE) stream_line(to + b, from + b);
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
      store_row(from, to, w.head_dim * to_bytes, w.streamed);
      continue;
    }
    const Divisor scale(w.scale ? w.scale(0, h) : 1.f);
    with_type(w.from_dtype, [&](auto from_tag) __attribute__((always_inline)) {
      with_type(w.to_dtype, [&](auto to_tag) __attribute__((always_inline)) {
        typedef typename decltype(from_tag)::type From;
        typedef typename decltype(to_tag)::type To;
        if constexpr (sizeof(From) > sizeof(To) && sizeof(To) == 1)
          store_row((const From*)from, (To*)to, w.head_dim, scale, w.streamed);
      });
    });
  }
}

void reshape_and_cache(const paged_attn::ReshapeAndCache& r, int64_t task) {
  const paged_attn::CacheWrite& w = task % 2 == 0 ? r.key : r.value;
  for (int64_t t = 0; t < r.num_tokens; ++t) {
    const int64_t slot = slot_at(r, t);
    if (slot < 0 || slot >= r.num_slots || (r.residues > 1 && slot % r.residues != task / 2))
      continue;
    const auto write = w.token_scales ? quantize_token : write_token;
    write(w, t, slot / r.page_size, slot % r.page_size, r.num_heads);
  }
  if (w.streamed) finish_streams();
}

}  // namespace
