// Stores that go around the caches, a whole line at a time.
#pragma once

#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "../inline.h"

namespace {

#if defined(__SSE2__)

// `to` is aligned to a line, which goes out whole where one store can hold it
PAGED_ATTN_INLINE void stream_line(void* to, const void* from) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int i = 0; i < 2; ++i)
    _mm256_stream_si256((__m256i*)to + i, _mm256_loadu_si256((const __m256i*)from + i));
#else
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128((__m128i*)to + i, _mm_loadu_si128((const __m128i*)from + i));
#endif
}
// before other threads may look
PAGED_ATTN_INLINE void finish_streams() { _mm_sfence(); }

#else

PAGED_ATTN_INLINE void stream_line(void* to, const void* from) { memcpy(to, from, 64); }
PAGED_ATTN_INLINE void finish_streams() {}

#endif

}  // namespace
