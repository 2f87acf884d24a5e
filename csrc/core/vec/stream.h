// Stores that go around the caches, a whole line at a time.
#pragma once

#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace {

#if defined(__SSE2__)

// `to` is aligned to a line, which the processor gathers from four stores
PAGED_ATTN_INLINE void stream_line(void* to, const void* from) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    _mm_stream_si128((__m128i*)to + i, _mm_loadu_si128((const __m128i*)from + i));
}
// before other threads may look
PAGED_ATTN_INLINE void finish_streams() { _mm_sfence(); }

#else

PAGED_ATTN_INLINE void stream_line(void* to, const void* from) { memcpy(to, from, 64); }
PAGED_ATTN_INLINE void finish_streams() {}

#endif

}  // namespace
