// Rows of a cache in 8 or 4 bits, each with a scale of its own: the row's largest magnitude over
// that of the format.
#pragma once

#include "../core/paged_kv.h"
#include "../core/product.h"
#include "../core/tokens.h"
#include "../core/unpack.h"
#include "../core/vec/convert.h"
#include "../core/vec/stream.h"

namespace {

// The largest number of a format.
PAGED_ATTN_INLINE float largest_of(paged_attn::DType dtype) {
  using paged_attn::DType;
  switch (dtype) {
    case DType::float8_e4m3fn: return 448.f;
    case DType::float8_e5m2: return 57344.f;
    case DType::int8: return 127.f;
    default: return 7.f;
  }
}

// Numbers without their signs, which compare as integers; a NaN is larger than all others.
template <class T>
PAGED_ATTN_INLINE U16 magnitudes(const T* p, int n) {
  const uint16_t* raw = (const uint16_t*)p;
  return (n == W ? load_raw(raw) : load_raw(raw, n)) & 0x7fff;
}
PAGED_ATTN_INLINE U magnitudes(const float* p, int n) {
  return bits(abs(n == W ? load(p) : load(p, n)));
}
PAGED_ATTN_INLINE F to_float(const float*, U x) { return as_float(x); }

// The scale of a row: 1 if it is all zeros, NaN if it holds a NaN.
template <class From>
PAGED_ATTN_INLINE float scale_of_row(const From* from, int64_t head_dim, float largest) {
  auto top = magnitudes(from, int(min64(W, head_dim)));
  for (int64_t d = W; d < head_dim; d += W) {
    const auto x = magnitudes(from + d, int(min64(W, head_dim - d)));
    top = x > top ? x : top;
  }
  const F found = to_float(from, top);
  const bool any_nan = reduce_add(select((I)(found != found), set1(1.f), F{})) > 0;
  const float scale = reduce_max(found) / largest;
  return any_nan ? NAN : scale == 0 ? 1.f : scale;
}

// The low bytes of 4 W integers from 0 to 255.
PAGED_ATTN_INLINE void store_as_bytes(const U* x, uint8_t* to) {
#if PAGED_ATTN_LANES == 8
  const __m256i low = _mm256_packus_epi32((__m256i)x[0], (__m256i)x[1]);
  const __m256i high = _mm256_packus_epi32((__m256i)x[2], (__m256i)x[3]);
  const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
  _mm256_storeu_si256((__m256i*)to, bytes);
#else
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const U8 bytes = __builtin_convertvector(x[i], U8);
    memcpy(to + i * W, &bytes, W);
  }
#endif
}

// 4 W integers, their low bits two a byte, the even one first.
PAGED_ATTN_INLINE void store_as_nibbles(const U* x, uint8_t* to) {
  typedef uint16_t Pairs __attribute__((vector_size(4 * W)));
  Pairs pairs;
  store_as_bytes(x, (uint8_t*)&pairs);
  pairs = (pairs & 15) | (pairs >> 4 & 0xf0);
#if PAGED_ATTN_LANES == 8
  const __m256i bytes = _mm256_packus_epi16((__m256i)pairs, (__m256i)pairs);
  _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(_mm256_permute4x64_epi64(bytes, 8)));
#else
  typedef uint8_t Bytes __attribute__((vector_size(2 * W)));
  const Bytes bytes = __builtin_convertvector(pairs, Bytes);
  memcpy(to, &bytes, sizeof bytes);
#endif
}

// Divides a row by its scale and stores it.
template <class To, class From>
PAGED_ATTN_INLINE void quantize(const From* from, To* to, int64_t count, float scale,
                                float largest) {
  constexpr int CHUNK = 4 * W, PACKED = SAME<To, int4x2> ? 2 : 1;
  const auto code = [&](F x) __attribute__((always_inline)) {
    x = x / set1(scale);
    if constexpr (PACKED == 1 && !SAME<To, int8_t>) return code_of(to, x);
    const F bounded = min(set1(largest), max(set1(-largest), x == x ? x : F{}));
    return (U) __builtin_convertvector(round(bounded), I) & 0xffu;
  };
  const auto store_codes = [&](const U* x, uint8_t* bytes) __attribute__((always_inline)) {
    PACKED == 2 ? store_as_nibbles(x, bytes) : store_as_bytes(x, bytes);
  };
  int64_t d = 0;
  for (; d + CHUNK <= count; d += CHUNK) {
    U x[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) x[i] = code(load(from + d + i * W));
    store_codes(x, (uint8_t*)to + d / PACKED);
  }
  if (d == count) return;
  U x[4] = {};
  for (int i = 0; d + i * W < count; ++i)
    x[i] = code(load(from + d + i * W, int(min64(W, count - d - i * W))));
  uint8_t bytes[CHUNK / PACKED];
  store_codes(x, bytes);
  memcpy((uint8_t*)to + d / PACKED, bytes, (count - d) / PACKED);
}

// All scales of a token come first: a row alone would wait for its own.
template <class To, class From>
inline void quantize_rows(const From* from, To* to, float* scales, int64_t num_heads,
                          const paged_attn::CacheWrite& w) {
  const float largest = largest_of(w.to_dtype);
  constexpr int64_t LINE = CACHE_LINE * (SAME<To, int4x2> ? 2 : 1);  // in numbers
  for (int64_t h = 0; h < num_heads; ++h)
    scales[h * w.scale_stride_head] =
        scale_of_row(from + h * w.from_stride_head, w.head_dim, largest);
  for (int64_t h = 0; h < num_heads; ++h) {
    const From* row = from + h * w.from_stride_head;
    To* target = to + h * w.to_stride_head;
    const float scale = scales[h * w.scale_stride_head];
    // the next token's row, so that memory is read meanwhile
    const char* later = (const char*)(row + w.from_stride_token);
    for (int64_t b = 0; b < w.head_dim * int64_t(sizeof(From)); b += CACHE_LINE)
      __builtin_prefetch(later + b);
    if (!w.streamed) {
      quantize(row, target, w.head_dim, scale, largest);
      continue;
    }
    for (int64_t d = 0; d < w.head_dim; d += LINE, target += CACHE_LINE) {
      alignas(CACHE_LINE) To line[CACHE_LINE];
      quantize(row + d, line, LINE, scale, largest);
      stream_line(target, line);
    }
  }
}

// Calls f(TypeTag<element type>) for a format whose rows may have scales.
template <class Function>
PAGED_ATTN_INLINE void with_format(paged_attn::DType dtype, Function f) {
  if (dtype == paged_attn::DType::int4) return f(TypeTag<int4x2>());
  with_type(dtype, [&](auto tag) __attribute__((always_inline)) {
    if constexpr (sizeof(typename decltype(tag)::type) == 1) f(tag);
  });
}

inline void quantize_token(const paged_attn::CacheWrite& w, int64_t token, int64_t page,
                           int64_t offset, int64_t num_heads) {
  const int64_t source = token * w.from_stride_token;
  const int64_t target = page * w.to_stride_page + offset * w.to_stride_token;
  float* scales = w.token_scales + page * w.scale_stride_page + offset * w.scale_stride_token;
  with_type(w.from_dtype, [&](auto from_tag) __attribute__((always_inline)) {
    typedef typename decltype(from_tag)::type From;
    if constexpr (sizeof(From) > 1)
      with_format(w.to_dtype, [&](auto to_tag) __attribute__((always_inline)) {
        typedef typename decltype(to_tag)::type To;
        quantize_rows((const From*)w.from + source, (To*)w.to + target, scales, num_heads, w);
      });
  });
}

}  // namespace
