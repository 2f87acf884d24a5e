// Philox-4x32-10 (Salmon et al., SC'11): the dropout mask as a function of a probability's
// sequence, head, row and column alone, so that every device draws the same one.
#pragma once

#include "attention.h"
#include "vec/convert.h"

namespace {

// The halves of 64-bit products, lane by lane.
PAGED_ATTN_INLINE void multiply_wide(U x, uint32_t by, U* high, U* low) {
  const U64 lower_half = U64{} + 0xffffffffu;
  const U64 even = multiply_even(x, by), odd = multiply_even((U)((U64)x >> 32), by);
  *low = (U)((even & lower_half) | odd << 32);
  *high = (U)(even >> 32 | (odd & ~lower_half));
}

// Turns the four counter words of W draws into the words drawn.
PAGED_ATTN_INLINE void philox(U* words, uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    U high_a, low_a, high_b, low_b;
    multiply_wide(words[0], 0xD2511F53u, &high_a, &low_a);
    multiply_wide(words[2], 0xCD9E8D57u, &high_b, &low_b);
    words[0] = high_b ^ words[1] ^ set1(k0), words[1] = low_b;
    words[2] = high_a ^ words[3] ^ set1(k1), words[3] = low_a;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

// A byte for each of the 4 * W columns from `column` on, a multiple of 4: 0 where it is dropped.
PAGED_ATTN_INLINE void draw_kept(const paged_attn::Dropout& dropout, uint32_t place, int64_t row,
                                 int64_t column, uint8_t* bytes) {
  const U lane = __builtin_convertvector(lane_index(), U);
  // a draw is for four neighbouring columns
  U words[4] = {set1(uint32_t(column / 4)) + lane, set1(uint32_t(row)), set1(place),
                set1(dropout.offset)};
  philox(words, dropout.seed[0], dropout.seed[1]);
  U kept = {};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    kept |= select((I)(words[i] >= set1(dropout.threshold)), set1(0xffu << 8 * i), U{});
  memcpy(bytes, &kept, sizeof kept);
}

// Zeroes dropped probabilities. `key`, the index of p[0] in its sequence, is a multiple of 4, and
// `count` is one of W.
PAGED_ATTN_APART void apply_dropout(const paged_attn::Dropout& dropout, int64_t sequence,
                                    int64_t head, int64_t token, int64_t key, float* p, int count) {
  const uint32_t place = uint32_t(sequence) << 16 | uint32_t(head + dropout.first_head);
  const int64_t row = token + dropout.first_row, column = key + dropout.first_column;
  const int skipped = int(column % 4);
  for (int c = 0; c < count; c += 4 * W) {
    uint8_t drawn[8 * W];
    const uint8_t* bytes = drawn + skipped;
    draw_kept(dropout, place, row, column - skipped + c, drawn);
    if (skipped) draw_kept(dropout, place, row, column - skipped + c + 4 * W, drawn + 4 * W);
    for (int i = 0; i < 4 * W && c + i < count; i += W)
      store(p + c + i, select((I)(widen(load_raw(bytes + i)) != U{}), load(p + c + i), F{}));
  }
}

}  // namespace
