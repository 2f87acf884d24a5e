// What one attention call works on: plain pointers and element strides, no torch, no ISA.
#pragma once

#include <stdint.h>

#include "inline.h"

namespace paged_attn {

enum class DType : int32_t {
  // what q may be, floats before float8s
  float32,
  bfloat16,
  float16,
  float8_e4m3fn,
  float8_e5m2,
  int8,
  int4,  // two numbers a byte, in torch's uint8
  boolean,
  int32,
  int64,
  unsupported
};

PAGED_ATTN_INLINE int64_t bytes_of(DType dtype) {
  switch (dtype) {
    case DType::float32: return 4;
    case DType::bfloat16:
    case DType::float16: return 2;
    case DType::int32: return 4;
    case DType::int64: return 8;
    default: return 1;
  }
}

// Elements that a row of so many numbers has in memory.
PAGED_ATTN_INLINE int64_t elements_of(DType dtype, int64_t numbers) {
  return dtype == DType::int4 ? numbers / 2 : numbers;
}

// Whether products of queries and keys can be made of pairs of bfloat16. They are exact for what
// bfloat16 holds, which 8-bit numbers are; probabilities are rounded to bfloat16, so queries must
// not ask for more.
PAGED_ATTN_INLINE bool multiply_as_pairs(DType q, DType kv) {
  return (q == DType::bfloat16 || bytes_of(q) == 1) && (kv == DType::bfloat16 || bytes_of(kv) == 1);
}

// A value that another thread may be writing: one load, whatever the compiler would prefer.
template <class T>
PAGED_ATTN_INLINE T read_once(const T* p) {
  return *static_cast<const volatile T*>(p);
}

// int32 or float32 tensors are read through (up to) two strides; a stride of 0 broadcasts.
template <class T>
struct Strided {
  const T* data = nullptr;
  int64_t stride0 = 0, stride1 = 0;
  PAGED_ATTN_INLINE explicit operator bool() const { return data != nullptr; }
  PAGED_ATTN_INLINE const T* at(int64_t i, int64_t j = 0) const {
    return data + i * stride0 + j * stride1;
  }
  PAGED_ATTN_INLINE T operator()(int64_t i, int64_t j = 0) const { return *at(i, j); }
};

// K or V, packed (page_size 0, token stride only) or paged.
struct KeyValue {
  const void* data;
  int64_t stride_page, stride_head, stride_token;
};

// Numbers of latents that a scale of their own belongs to.
constexpr int64_t LATENT_COLUMNS = 128;

// A scale for each token and head of K or V, laid out as they are; absent without data. Latents may
// have several, one for each LATENT_COLUMNS numbers.
struct TokenScales {
  const float* data = nullptr;
  int64_t stride_page, stride_head, stride_token;
  int64_t count = 1, stride_scale = 0;
  PAGED_ATTN_INLINE explicit operator bool() const { return data != nullptr; }
};

// CSR layout over blocks of positions; present when crow is.
struct BlockLayout {
  const int32_t* crow = nullptr;
  const int32_t* col = nullptr;
  int64_t crow_batch, crow_head, crow_row;
  int64_t col_batch, col_head, col_entry;
  int64_t num_heads, rows, nnz;
  int64_t q_block_size, k_block_size;
};

// Lists of units of keys: one for each query token and, with as many lists as KV heads, each group.
// Such a token attends to the keys of its own list alone, as if they were a sequence of their own.
struct Selection {
  bool enabled = false;
  const int32_t* units;  // a negative one names nothing
  int64_t stride_token, stride_list, stride_entry;
  Strided<int32_t> counts;  // (token, list): how many entries are read; all if there are none
  int64_t num_lists, num_entries;
  int64_t unit_size;  // in keys
  bool is_slots;      // units are those of the cache, and not of the token's sequence
  int64_t reach;      // keys that the block table has room for
  // between positions; the call's own windows, which hide keys of a list from its token, are -1
  int64_t window_left, window_right;
};

struct Dropout {
  bool enabled = false;
  uint32_t seed[2], offset;
  uint32_t threshold;  // a probability is kept when its random word reaches the threshold
  float keep_scale;    // of the output, for the probabilities that were dropped
  // where the call's first ones stand in a larger whole
  int64_t first_head = 0, first_row = 0, first_column = 0;
};

struct Attention {
  DType q_dtype, kv_dtype, out_dtype, bias_dtype;
  DType v_dtype;  // kv_dtype, but beside latent queries
  int64_t batch, total_q, num_heads, num_kv_heads, head_dim, head_dim_v;

  const void* q;
  int64_t q_stride_token, q_stride_head;
  const void* latent;  // queries that are multiplied with values, or null; q's dtype
  int64_t latent_stride_token, latent_stride_head;
  KeyValue k, v;
  TokenScales k_scales, v_scales;
  int64_t page_size;    // 0: packed
  int page_shift = -1;  // log2 of page_size, or -1 if that is no power of two
  int64_t num_pages;

  Strided<int32_t> cu_seqlens_q, cu_seqlens_k, seqused_k, block_table;
  Strided<int32_t> k_start, q_position;
  // key j stands at (j / key_run) * key_span + key_offset + j % key_run
  int64_t key_run = 1, key_span = 1, key_offset = 0;
  Strided<float> alibi_slopes, q_descale, k_descale, v_descale;  // (batch, head)
  Strided<float> sinks;                                          // (head)
  const float* out_scale;

  const void* bias;
  int64_t bias_stride_head, bias_stride_query, bias_stride_key;
  const bool* tail;  // of the newest keys, as many as there are queries
  int64_t tail_stride_query, tail_stride_key;

  double softmax_scale;
  float softcap;
  int64_t window_left, window_right;  // -1: unbounded; causal is a right side of 0
  Dropout dropout;
  BlockLayout layout;
  Selection selection;
  bool batch_invariant;

  // Heads that walk the keys together: a kv head's whole group, or one query head when a block
  // layout gives every query head a row of its own.
  int64_t num_groups, group_size;

  void* out;  // (total_q, num_heads, head_dim_v)
  int64_t out_stride_token, out_stride_head;
  float* lse;       // (num_heads, total_q), contiguous
  float* partials;  // results of split sequences, waiting for the merge
};

// Where decode asks for keys and values ahead of their use: the second-level cache, or the first.
// Set once, by engines.cpp, for the processor at hand.
extern bool reads_ahead_into_second_level;

// A group's rows of queries, which decide what serves them: up to `few` read keys in place, for
// more the keys are packed, for up to `tile` of them at once.
struct RowLimits {
  int64_t few, tile;
};

// A piece of work: query tokens of one sequence x head groups x a range of its keys.
struct Task {
  int32_t sequence;
  int32_t token_begin, token_end;
  int32_t group_begin, group_end;
  int32_t few_rows;              // which of the two engines runs it
  int64_t part_begin, part_end;  // keys; or entries of a layout's row or of a list
  int64_t partial;               // offset into Attention::partials, or -1: the result is final
  int64_t merge;                 // which merge waits for it, or -1
  int64_t cost;
};

// The splits of some query tokens under some head groups, merged in order into the output.
struct MergeTask {
  int32_t sequence;
  int32_t token_begin, token_end;
  int32_t group_begin, group_end;
  int32_t num_splits;
  int64_t partial, partial_stride;
};

// Rows of a group in a task or a merge: its query tokens under the group's heads.
template <class Piece>
PAGED_ATTN_INLINE int64_t rows_of(const Attention& a, const Piece& piece) {
  return (piece.token_end - piece.token_begin) * a.group_size;
}
template <class Piece>
PAGED_ATTN_INLINE int64_t token_of(const Attention& a, const Piece& piece, int64_t row) {
  return piece.token_begin + row / a.group_size;
}
PAGED_ATTN_INLINE int64_t head_of(const Attention& a, int64_t group, int64_t row) {
  return group * a.group_size + row % a.group_size;
}
PAGED_ATTN_INLINE int64_t kv_head_of(const Attention& a, int64_t group) {
  return group * a.num_kv_heads / a.num_groups;
}

}  // namespace paged_attn
