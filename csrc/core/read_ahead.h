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

// Whether a key's values are some of its own numbers, as in a cache of latents.
PAGED_ATTN_INLINE bool has_values_in_keys(const Attention& a) {
  const int64_t offset = (const char*)a.v.data - (const char*)a.k.data;
  return a.kv_dtype == a.v_dtype && a.k.stride_page == a.v.stride_page &&
         a.k.stride_head == a.v.stride_head && a.k.stride_token == a.v.stride_token &&
         offset >= 0 &&
         offset <
             paged_attn::elements_of(a.kv_dtype, a.head_dim) * paged_attn::bytes_of(a.kv_dtype);
}

// Reads nothing ahead: of rows that were copied from where they are in memory.
struct NoReadAhead {
  PAGED_ATTN_INLINE bool has(int64_t) const { return false; }
  PAGED_ATTN_INLINE const char* advance(int64_t) { return nullptr; }
  PAGED_ATTN_INLINE void prefetch(const void*, int64_t, int) const {}
};

template <class T>
class ReadAhead {
 public:
  PAGED_ATTN_INLINE ReadAhead(const Attention& attention, int64_t first_kv_head, int num_heads,
                              int chunk_columns, int64_t ahead_bytes = AHEAD_BYTES)
      : a(attention),
        first_head(first_kv_head),
        heads(num_heads),
        columns(chunk_columns),
        keys_alone(attention.selection.enabled && has_values_in_keys(attention)),
        distance(ahead_bytes + (keys_alone ? ahead_of_values() : 0)),
        into_second(distance > AHEAD_BYTES || paged_attn::reads_ahead_into_second_level) {}

  // Puts the cursor where it has to be when the first key of `block` is about to be read.
  PAGED_ATTN_INLINE void seek(const KeyBlock& block, const KeyBlock& following) {
    next = &following;
    chunk = {&block, false, 0};
    outer = inner = 0;
    enter_run();
    for (int64_t left = distance; left > 0; next_run()) left -= end - at;
  }

  // Whether the next `bytes` from the cursor on are contiguous.
  PAGED_ATTN_INLINE bool has(int64_t bytes) const { return !keys_alone && end - at >= bytes; }

  // The next `bytes` from the cursor on, which moves past them. The caller prefetches them line by
  // line while it reads as many. Null if they are not contiguous: they are prefetched here then.
  PAGED_ATTN_INLINE const char* advance(int64_t bytes) {
    if (!has(bytes) || end - at == bytes) return pass_runs(bytes);
    at += bytes;
    return at - bytes;
  }

  // Prefetches the lines that begin among elements [begin, begin + n) after `start`, where a line
  // begins. Nothing if `start` is null.
  PAGED_ATTN_INLINE void prefetch(const T* start, int64_t begin, int n) const {
    constexpr int LINE = CACHE_LINE / int(sizeof(T));
    // no branch for each: the compiler would warn of lengths that it then takes for possible
    const bool skip = ((n < LINE) & (begin % LINE >= n)) | (start == nullptr);
    if (skip) return;
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
  // Values that are numbers of their keys are in a cache already. Keys that lie apart take so long
  // to read that they are prefetched while values are weighed, too: a part of a row for each row.
  const bool keys_alone;
  const int64_t distance;
  const bool into_second;
  const KeyBlock* next;
  Chunk chunk;
  // Where the run begins: the inner index is that of a token's heads where those are contiguous,
  // else that of a head's columns.
  int outer, inner, rows;
  const char *at, *end;

  // How much of a block's keys has to be prefetched before the first one is read, so that the rest
  // is ahead of those that are read.
  PAGED_ATTN_INLINE int64_t ahead_of_values() const {
    return MAX_COLUMNS * share_of_keys(a.head_dim_v * int64_t(sizeof(T)));
  }
  PAGED_ATTN_INLINE int64_t share_of_keys(int64_t bytes) const {
    return bytes * a.head_dim / (a.head_dim + a.head_dim_v);
  }

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
    if (keys_alone) return {next, false, 0};
    return {x.values ? next : x.block, !x.values, 0};
  }

  // A run has no gap: all rows of an outer index, or else a single row.
  PAGED_ATTN_INLINE void enter_run() {
    const int inners = heads_contiguous(chunk) ? heads : columns;
    const int64_t row_elements = chunk.values ? paged_attn::elements_of(a.v_dtype, a.head_dim_v)
                                              : paged_attn::elements_of(a.kv_dtype, a.head_dim);
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
  // `advance` at the end of a run, and where bytes are in several runs.
  PAGED_ATTN_APART const char* pass_runs(int64_t bytes) {
    if (has(bytes)) {
      const char* from = at;
      next_run();
      return from;
    }
    prefetch_runs(keys_alone ? share_of_keys(bytes) : bytes);
    return nullptr;
  }
  // Moves the cursor past some bytes of this run and of the next ones, and prefetches them.
  PAGED_ATTN_INLINE void prefetch_runs(int64_t bytes) {
    const auto pass = [&](int64_t n) __attribute__((always_inline)) {
      for (int64_t i = 0; i < n; i += CACHE_LINE) prefetch_line(at + i);
      at += n;
    };
    for (; bytes >= end - at; next_run()) {
      bytes -= end - at;
      pass(end - at);
    }
    pass(bytes);
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
