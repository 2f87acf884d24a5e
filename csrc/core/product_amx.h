// Pairs of bfloat16 on Intel's tile registers (AMX-BF16): operands as AVX-512-BF16 has them,
// multiplied 16 rows x 16 columns x 16 operands at a time.
#pragma once

#include "matrix.h"

namespace {

// The bfloat16 of 0 to 127, as a table of low bytes and one of high bytes.
struct IntegerTable {
  alignas(64) uint8_t low[128], high[128];
  constexpr IntegerTable() : low(), high() {
    for (int i = 1, exponent = 0; i < 128; ++i) {
      exponent += i >> (exponent + 1);
      const int bits = (exponent + 127) << 7 | (i << (7 - exponent) & 0x7f);
      low[i] = uint8_t(bits), high[i] = uint8_t(bits >> 8);
    }
  }
};
constexpr IntegerTable INTEGERS;

struct AmxProduct : PairProduct {
  static constexpr int GRAIN = 16;
  static constexpr int ROWS = 32;
  static constexpr int PANEL = 32;  // the columns of a step are contiguous

  // The operands of a cache line's numbers, or of the first n of them and zeros. 8-bit ones, which
  // make two vectors, are looked up 64 at a time: on Intel that saves a third of the shuffles.
  static PAGED_ATTN_INLINE void load_line(const bfloat16* p, int n, F* x) {
    x[0] = n == 32 ? load_operands(p) : load_operands(p, n);
  }
  static PAGED_ATTN_INLINE void load_line(const float8_e4m3fn* p, int n, F* x) {
    const __m512i raw = load_bytes(p, n);
    look_up_line(raw, raw, 0, E4M3, x);
  }
  static PAGED_ATTN_INLINE void load_line(const float8_e5m2* p, int n, F* x) {
    const __m512i raw = load_bytes(p, n);
    look_up_line(raw, raw, 0, E5M2, x);
  }
  static PAGED_ATTN_INLINE void load_line(const int8_t* p, int n, F* x) {
    const __m512i raw = load_bytes(p, n);
    const __m512i magnitude = _mm512_abs_epi8(raw);
    look_up_line(magnitude, raw, _mm512_movepi8_mask(magnitude), INTEGERS, x);
  }

 private:
  // in the order from which `unpacklo` and `unpackhi` restore the original one
  static PAGED_ATTN_INLINE __m512i load_bytes(const void* p, int n) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __mmask64 some = ~uint64_t(0) >> (64 - n);
    return _mm512_permutexvar_epi64(
        order, n == 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8(some, p));
  }
  // `code`: 7 bits of each byte, by which the tables are read; `is_128`: bytes of magnitude 128,
  // which has no 7 bits
  template <class Table>
  static PAGED_ATTN_INLINE void look_up_line(__m512i code, __m512i sign, __mmask64 is_128,
                                             const Table& table, F* x) {
    const auto half = [&](const uint8_t* bytes) __attribute__((always_inline)) {
      return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), code,
                                      _mm512_load_si512(bytes + 64));
    };
    const __m512i low = half(table.low);
    __m512i high = _mm512_mask_mov_epi8(half(table.high), is_128, _mm512_set1_epi8(0x43));
    high = _mm512_ternarylogic_epi32(high, sign, _mm512_set1_epi8(-128), 0xf8);
    x[0] = (F)_mm512_unpacklo_epi8(low, high);
    x[1] = (F)_mm512_unpackhi_epi8(low, high);
  }
};

// The upper half is the bfloat16 of a probability, rounded to the nearest, halfway up;
// probabilities are not negative. An addition takes half a cycle, the processor's own conversion of
// two vectors two.
PAGED_ATTN_INLINE __m512i round_upper(F x) {
  return _mm512_add_epi32((__m512i)x, _mm512_set1_epi32(0x8000));
}

// The product of probabilities and values in prefill_amx.h: keys 16 apart are a pair, so that
// sixteen consecutive keys are the same half of all operands of a tile.
// decode_amx_invariant.h depends on that.
struct AmxValueProduct : AmxProduct {
  static constexpr int APART = W;
  static PAGED_ATTN_INLINE F narrow(const F* x) {
    const __m512i low = _mm512_srli_epi32(round_upper(x[0]), 16);
    return (F)_mm512_mask_mov_epi16(low, 0xaaaaaaaa, round_upper(x[1]));
  }
};

// Operands of one probability each: bfloat16 in the lower half, zero in the upper one.
struct AmxHalves : PairProduct {
  static constexpr int DEPTH = 1;
  static PAGED_ATTN_INLINE F narrow(const F* x) {
    return (F)_mm512_srli_epi32(round_upper(x[0]), 16);
  }
};

// The lanes of a, then those of b, in another order.
PAGED_ATTN_INLINE F merge_lanes(F a, F b, I order) {
  return (F)_mm512_permutex2var_ps((__m512)a, (__m512i)order, (__m512)b);
}

// Transposes N vectors, an (N, W) matrix, to (W, N); N is a power of two. Each step is a perfect
// shuffle.
template <int N>
PAGED_ATTN_INLINE void interleave(F* x) {
  constexpr I LOW = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, HIGH = LOW + 8;
#pragma GCC unroll 4
  for (int done = 1; done < N; done *= 2) {
    F y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      y[2 * i] = merge_lanes(x[i], x[i + N / 2], LOW);
      y[2 * i + 1] = merge_lanes(x[i], x[i + N / 2], HIGH);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = y[i];
  }
}

// The reverse: transposes (W, N) to (N, W).
template <int N>
PAGED_ATTN_INLINE void uninterleave(F* x) {
  constexpr I EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
#pragma GCC unroll 4
  for (int done = 1; done < N; done *= 2) {
    F y[N];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      y[i] = merge_lanes(x[2 * i], x[2 * i + 1], EVEN);
      y[i + N / 2] = merge_lanes(x[2 * i], x[2 * i + 1], ODD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) x[i] = y[i];
  }
}

// Registers 0 to 3 hold sums, 4 and 5 operands of rows, 6 and 7 of columns.
struct alignas(64) AmxRegisters {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Registers for decode_amx.h with that many rows. 0: keys or values. 1 and 2: queries and
// scores, (16, ROWS). 3 to 7: probabilities and sums, each row twice, 16 rows at most.
template <int ROWS>
struct AmxRowsRegisters : AmxRegisters {
  constexpr AmxRowsRegisters() {
    for (int i = 1; i < 3; ++i) row_bytes[i] = ROWS * 4;
    for (int i = 3; i < 8; ++i) rows[i] = ROWS < 8 ? 2 * ROWS : 16;
  }
};

// GCC's intrinsic that loads a tile does not tell the compiler that it reads memory. This does,
// before and after the load, so that no store is moved across it.
PAGED_ATTN_INLINE void declare_read(const void* from) {
  asm volatile("" : : "m"(*(const char (*)[1 << 16]) from));
}
#define PAGED_ATTN_LOAD_TILE(tile, from, stride) \
  do {                                           \
    declare_read(from);                          \
    _tile_loadd(tile, from, stride);             \
    declare_read(from);                          \
  } while (0)

// A square of sums in registers 0 to 3: two vectors of columns if `wide`, twice 16 rows if `tall`.
// Strides count floats.
struct AmxSquare {
  bool wide, tall;

  // From C if `add`, else from zero.
  PAGED_ATTN_INLINE void begin(const float* c, int64_t stride, bool add) const {
    if (add) {
      const float* low = c + W * stride;
      PAGED_ATTN_LOAD_TILE(0, c, stride * BYTES);
      if (wide) PAGED_ATTN_LOAD_TILE(1, c + W, stride * BYTES);
      if (tall) PAGED_ATTN_LOAD_TILE(2, low, stride * BYTES);
      if (tall && wide) PAGED_ATTN_LOAD_TILE(3, low + W, stride * BYTES);
    } else {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  PAGED_ATTN_INLINE void load_rows(const float* a, int64_t stride) const {
    PAGED_ATTN_LOAD_TILE(4, a, stride * BYTES);
    if (tall) PAGED_ATTN_LOAD_TILE(5, a + W * stride, stride * BYTES);
  }
  PAGED_ATTN_INLINE void multiply(const float* columns, int64_t stride) const {
    PAGED_ATTN_LOAD_TILE(6, columns, stride * BYTES);
    _tile_dpbf16ps(0, 4, 6);
    if (tall) _tile_dpbf16ps(2, 5, 6);
    if (wide) {
      PAGED_ATTN_LOAD_TILE(7, columns + W, stride * BYTES);
      _tile_dpbf16ps(1, 4, 7);
      if (tall) _tile_dpbf16ps(3, 5, 7);
    }
  }
  PAGED_ATTN_INLINE void store(float* c, int64_t stride) const {
    float* low = c + W * stride;
    _tile_stored(0, c, stride * BYTES);
    if (wide) _tile_stored(1, c + W, stride * BYTES);
    if (tall) _tile_stored(2, low, stride * BYTES);
    if (tall && wide) _tile_stored(3, low + W, stride * BYTES);
  }

 private:
  static constexpr int64_t BYTES = sizeof(float);
};

// C (16 x rows, 16 x panels) = A (16 x rows, 16 x steps) @ B, or C += that, by squares of 32 x 32.
// The caller runs it step by step, with vector instructions between the steps, which run at the
// same time. Two panels are multiplied by all rows while they are in L1.
struct AmxWork {
  const float* a;
  int64_t stride_a;
  const float* b;
  int64_t stride_b;  // from one pair of panels to the next
  float* c;
  int64_t stride_c;
  int steps, panels, rows;
  bool add;
  int step, row;

  int left() const { return (panels + 1) / 2 * ((rows + 1) / 2) * steps; }

  // One step of a square. Needs panels > 0.
  PAGED_ATTN_INLINE void take() { take_steps<1>(panels > 1, rows - row > 1); }

  // Two steps of a whole square are code without a branch.
  PAGED_ATTN_INLINE bool has_two() const {
    return panels > 1 && rows - row > 1 && steps - step > 1;
  }
  PAGED_ATTN_INLINE void take_two() { take_steps<2>(true, true); }

 private:
  template <int STEPS>
  PAGED_ATTN_INLINE void take_steps(bool wide, bool tall) {
    constexpr int64_t PANEL = AmxProduct::PANEL;
    const AmxSquare sums = {wide, tall};
    float* top = c + row * W * stride_c;
    if (step == 0) sums.begin(top, stride_c, add);
#pragma GCC unroll 2
    for (int i = step; i < step + STEPS; ++i) {
      const float *left = a + row * W * stride_a + i * W, *columns = b + i * W * PANEL;
      sums.load_rows(left, stride_a);
      sums.multiply(columns, PANEL);
    }
    if ((step += STEPS) < steps) return;
    sums.store(top, stride_c);
    step = 0;
    row += 2;
    if (row < rows) return;
    row = 0;
    panels -= 2;
    c += 2 * W;
    b += stride_b;
  }
};

// All steps at once, for callers that have nothing else to compute meanwhile.
template <>
struct Matrix<AmxProduct> {
  static constexpr int ROW_STEP = W;

  static inline void multiply(const float* a, int64_t stride_a, int64_t rows, const float* b,
                              int64_t stride_b, int64_t begin, int64_t end, float* c,
                              int64_t stride_c, int64_t depth, bool add, Fetch fetch = {}) {
    AmxWork work = {a,
                    stride_a,
                    b + begin / AmxProduct::PANEL * stride_b,
                    stride_b,
                    c + begin,
                    stride_c,
                    int(depth / AmxProduct::GRAIN),
                    int((end - begin) / W),
                    int((rows + W - 1) / W),
                    add,
                    0,
                    0};
    fetch.per_call = (fetch.lines() + work.left() - 1) / work.left();
    while (work.panels > 0) {
      fetch.issue();
      work.take();
    }
  }
};

}  // namespace
