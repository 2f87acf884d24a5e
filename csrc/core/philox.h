// Philox-4x32-10 (Salmon et al., SC'11): the dropout mask as a pure function of where a probability
// stands, so that every device draws the same one.
#pragma once

#include "attention.h"

namespace {

struct PhiloxWords {
  uint32_t word[4];
};

PAGED_ATTN_INLINE PhiloxWords philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3,
                                     uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c0;
    const uint64_t b = uint64_t(0xCD9E8D57u) * c2;
    const uint32_t x0 = uint32_t(b >> 32) ^ c1 ^ k0;
    const uint32_t x2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c0 = x0, c1 = uint32_t(b), c2 = x2, c3 = uint32_t(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// Zeroes dropped probabilities; `key` is the index of p[0] in its sequence and a multiple of 4.
inline void apply_dropout(const paged_attn::Dropout& dropout, int64_t sequence, int64_t head,
                          int64_t token, int64_t key, float* p, int count) {
  const uint32_t place = uint32_t(sequence) << 16 | uint32_t(head);
  for (int c = 0; c < count; c += 4) {
    const PhiloxWords r = philox(uint32_t((key + c) / 4), uint32_t(token), place, dropout.offset,
                                 dropout.seed[0], dropout.seed[1]);
    for (int i = 0; i < 4; ++i)
      if (r.word[i] < dropout.threshold) p[c + i] = 0.f;
  }
}

}  // namespace
