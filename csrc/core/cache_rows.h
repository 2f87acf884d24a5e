// How few query rows read the keys and values of a cache: in place, or by way of int8 where the
// cache holds int4.
#pragma once

#include "read_ahead.h"
#include "unpack.h"

namespace {

template <class T>
struct RowsInPlace {
  typedef T Element;
  ReadAhead<T> ahead;

  PAGED_ATTN_INLINE RowsInPlace(const Attention& a, int64_t first_head, int heads, int columns,
                                int64_t ahead_bytes, float*)
      : ahead(a, first_head, heads, columns, ahead_bytes) {}
  PAGED_ATTN_INLINE void seek(const KeyBlock& block, const KeyBlock& next) {
    ahead.seek(block, next);
  }
  // `columns` rows of a head of so many numbers: row c begins `offsets(offset)[c]` elements on
  PAGED_ATTN_INLINE const T* rows(const paged_attn::KeyValue& x, int64_t kv_head, const int64_t*,
                                  int, int64_t, int = 0) {
    return (const T*)x.data + kv_head * x.stride_head;
  }
  PAGED_ATTN_INLINE const int64_t* offsets(const int64_t* offset) const { return offset; }
};

// Rows of at most ALIGN columns are unpacked into the place of that number in `memory`.
struct UnpackedRows {
  typedef int8_t Element;
  NoReadAhead ahead;

  static PAGED_ATTN_INLINE int64_t floats(const Attention& a, int places) {
    return places * ALIGN * max64(a.head_dim, a.head_dim_v) / int64_t(sizeof(float));
  }
  PAGED_ATTN_INLINE UnpackedRows(const Attention& a, int64_t first_head, int heads, int columns,
                                 int64_t ahead_bytes, float* memory)
      : source_(a, first_head, heads, columns, ahead_bytes), memory_((int8_t*)memory) {}
  PAGED_ATTN_INLINE void seek(const KeyBlock& block, const KeyBlock& next) {
    source_.seek(block, next);
  }
  PAGED_ATTN_INLINE const int8_t* rows(const paged_attn::KeyValue& x, int64_t kv_head,
                                       const int64_t* offset, int columns, int64_t numbers,
                                       int place = 0) {
    int8_t* to = memory_ + place * columns * numbers;
    const uint8_t* from = (const uint8_t*)x.data + kv_head * x.stride_head;
    const int64_t bytes = numbers / 2;
    const uint8_t* later = (const uint8_t*)source_.advance(columns * bytes);
    for (int c = 0; c < columns; ++c) {
      source_.prefetch(later, c * bytes, int(bytes));
      unpack_row(from + offset[c], numbers, to + c * numbers);
      offsets_[c] = c * numbers;
    }
    return to;
  }
  PAGED_ATTN_INLINE const int64_t* offsets(const int64_t*) const { return offsets_; }

 private:
  ReadAhead<uint8_t> source_;
  int8_t* const memory_;
  int64_t offsets_[ALIGN];
};

}  // namespace
