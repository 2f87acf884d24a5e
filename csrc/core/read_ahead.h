// Prefetches the keys and values of a task a fixed distance ahead of their use.
//
// Blocks are read chunk by chunk, some columns under every head, first the keys, then the values.
// The cursor of prefetches goes through memory in the same order, by one line for each line that is
// read: a burst of prefetches would delay the loads after it.
#pragma once

#include "paged_kv.h"

namespace {

// Enough to hide the latency of memory, and little enough to be in L1 still when it is read.
constexpr int64_t AHEAD_BYTES = 8192;

template <class T>
class ReadAhead {
 public:
  PAGED_ATTN_INLINE ReadAhead(const Attention& attention, int64_t first_kv_head, int num_heads,
                              int chunk_columns, int64_t ahead_bytes = AHEAD_BYTES)
      : a(attention),
        first_head(first_kv_head),
        heads(num_heads),
        columns(chunk_columns),
        distance(ahead_bytes),
        into_second(ahead_bytes > AHEAD_BYTES || paged_attn::reads_ahead_into_second_level) {}

  // Puts the cursor where it has to be when the first key of `block` is about to be read.
  PAGED_ATTN_INLINE void seek(const KeyBlock& block, const KeyBlock& following) {
    next = &following;
    chunk = {&block, false, 0};
    outer = inner = 0;
    enter_run();
    for (int64_t left = distance; left > 0; next_run()) left -= end - at;
  }

  // Whether the next `bytes` from the cursor on are contiguous.
  PAGED_ATTN_INLINE bool has(int64_t bytes) const { return end - at >= bytes; }

  // The next `bytes` from the cursor on, which moves past them. The caller prefetches them line by
  // line while it reads as many.
  PAGED_ATTN_INLINE const char* advance(int64_t bytes) {
    const char* from = at;
    at += bytes;
    if (at >= end) leave_run();
    return from;
  }

  // Prefetches the lines that begin among elements [begin, begin + n) after `start`, where a line
  // begins.
  PAGED_ATTN_INLINE void prefetch(const T* start, int64_t begin, int n) const {
    constexpr int LINE = CACHE_LINE / int(sizeof(T));
    if (n < LINE && begin % LINE >= n) return;
    asm volatile("");  // or the compiler would gather prefetches, and they come in bursts
#pragma GCC unroll 8
    for (int i = 0; i < n; i += LINE) prefetch_line(start + begin + i);
  }

 private:
  struct Chunk {
    const KeyBlock* block;
    bool values;
    int column;
  };

  const Attention& a;
  const int64_t first_head;
  const int heads, columns;
  const int64_t distance;
  const bool into_second;
  const KeyBlock* next;
  Chunk chunk;
  // Where the run begins: the inner index is that of a token's heads where those are contiguous,
  // else that of a head's columns.
  int outer, inner, rows;
  const char *at, *end;

  // Into L1 by way of the other caches: past them (`prefetchnta`) is 1.02 times as fast on Zen 5,
  // and half as fast on Emerald Rapids. Into L2 where L1 would evict the line before it is read, or
  // is slow to load it.
  PAGED_ATTN_INLINE void prefetch_line(const void* p) const {
    if (into_second)
      __builtin_prefetch(p, 0, 2);
    else
      __builtin_prefetch(p);
  }
  PAGED_ATTN_INLINE const paged_attn::KeyValue& tensor(const Chunk& x) const {
    return x.values ? a.v : a.k;
  }
  PAGED_ATTN_INLINE bool heads_contiguous(const Chunk& x) const {
    return tensor(x).stride_head < tensor(x).stride_token;
  }
  PAGED_ATTN_INLINE const T* row(const Chunk& x, int from_outer, int from_inner) const {
    const bool by_token = heads_contiguous(x);
    const int head = by_token ? from_inner : from_outer, c = by_token ? from_outer : from_inner;
    const int64_t* offset = x.values ? x.block->v_offset : x.block->k_offset;
    return (const T*)tensor(x).data + (first_head + head) * tensor(x).stride_head +
           offset[x.column + c];
  }
  PAGED_ATTN_INLINE Chunk after(const Chunk& x) const {
    if (x.column + columns < x.block->num_columns) return {x.block, x.values, x.column + columns};
    return {x.values ? next : x.block, !x.values, 0};
  }

  // A run has no gap: all rows of an outer index, or else a single row.
  PAGED_ATTN_INLINE void enter_run() {
    const int inners = heads_contiguous(chunk) ? heads : columns;
    const int64_t row_elements = chunk.values ? a.head_dim_v : a.head_dim;
    const T* first = row(chunk, outer, inner);
    rows = 1;
    if (inner == 0) {
      if (row(chunk, outer, inners - 1) - first == (inners - 1) * row_elements) rows = inners;
      // a line of the next chunk, so that its address is translated when the rest is asked for
      __builtin_prefetch(row(after(chunk), outer, 0));
    }
    at = (const char*)first;
    end = (const char*)(first + rows * row_elements);
  }
  // Bytes that were claimed past the end of the run are in the next runs: they are prefetched at
  // once.
  inline void leave_run() {
    int64_t left = at - end;
    for (next_run(); left > 0 && left >= end - at; next_run()) {
      left -= end - at;
      for (; at < end; at += CACHE_LINE) prefetch_line(at);
    }
    for (; left > 0; left -= CACHE_LINE, at += CACHE_LINE) prefetch_line(at);
  }
  PAGED_ATTN_INLINE void next_run() {
    const bool by_token = heads_contiguous(chunk);
    inner += rows;
    if (inner == (by_token ? heads : columns)) {
      inner = 0;
      if (++outer == (by_token ? columns : heads)) outer = 0, chunk = after(chunk);
    }
    enter_run();
  }
};

}  // namespace
