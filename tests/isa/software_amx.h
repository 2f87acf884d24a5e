// The tile instructions of AMX-BF16 in plain C++, for processors without them: what is included
// ahead of csrc/isa/amx.cpp. After Intel's Software Developer's Manual, volume 2. What the processor
// would refuse with a fault aborts.
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmath>

namespace software_amx {

struct Config {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
struct Tile {
  unsigned char bytes[16][64];
};

inline thread_local Config config;
inline thread_local Tile tiles[8];

inline void check(bool is_allowed) {
  if (!is_allowed) abort();
}

inline void check_tile(int t) {
  check(t >= 0 && t < 8 && config.palette == 1 && config.rows[t] && config.row_bytes[t]);
}

inline void load_config(const void* from) {
  memcpy(&config, from, sizeof config);
  check(config.palette == 1 && config.start_row == 0);
  for (uint8_t byte : config.reserved) check(byte == 0);
  for (int t = 0; t < 16; ++t)
    check(t < 8 ? config.rows[t] <= 16 && config.row_bytes[t] <= 64 && config.row_bytes[t] % 4 == 0
                : config.rows[t] == 0 && config.row_bytes[t] == 0);
  memset(tiles, 0, sizeof tiles);
}

inline void release() { memset(&config, 0, sizeof config); }

inline void zero(int t) {
  check_tile(t);
  memset(&tiles[t], 0, sizeof tiles[t]);
}

inline void load(int t, const void* from, int64_t stride) {
  zero(t);
  for (int r = 0; r < config.rows[t]; ++r)
    memcpy(tiles[t].bytes[r], static_cast<const char*>(from) + r * stride, config.row_bytes[t]);
}

inline void store(int t, void* to, int64_t stride) {
  check_tile(t);
  for (int r = 0; r < config.rows[t]; ++r)
    memcpy(static_cast<char*>(to) + r * stride, tiles[t].bytes[r], config.row_bytes[t]);
}

// Denormal numbers count as zero, going in and coming out.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

inline float operand(const Tile& tile, int row, int i) {
  uint16_t half;
  memcpy(&half, tile.bytes[row] + 2 * i, sizeof half);
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return flushed(x);
}

// TDPBF16PS: first the even halves' products are added, then the odd ones', each with one rounding.
inline void multiply(int sums, int a, int b) {
  check_tile(sums), check_tile(a), check_tile(b);
  check(sums != a && sums != b && a != b);
  const int rows = config.rows[sums], depth = config.row_bytes[a] / 4;
  const int columns = config.row_bytes[sums] / 4;
  check(config.rows[a] == rows && config.rows[b] == depth);
  check(config.row_bytes[b] == config.row_bytes[sums]);
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < columns; ++c) {
      float even = 0, odd = 0, sum;
      for (int k = 0; k < depth; ++k) {
        const Tile &x = tiles[a], &y = tiles[b];
        even = flushed(std::fma(operand(x, r, 2 * k), operand(y, k, 2 * c), even));
        odd = flushed(std::fma(operand(x, r, 2 * k + 1), operand(y, k, 2 * c + 1), odd));
      }
      memcpy(&sum, tiles[sums].bytes[r] + 4 * c, sizeof sum);
      sum = flushed(flushed(sum) + flushed(even + odd));
      memcpy(tiles[sums].bytes[r] + 4 * c, &sum, sizeof sum);
    }
}

}  // namespace software_amx

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig software_amx::load_config
#define _tile_release software_amx::release
#define _tile_zero software_amx::zero
#define _tile_loadd software_amx::load
#define _tile_stored software_amx::store
#define _tile_dpbf16ps software_amx::multiply
