// The inner loop of products of bytes: unsigned activations times signed weights, added to int32.

#pragma once

#include "product.h"

// Fours of bytes times fours, added to int32.
INLINE Ints add_fours(Ints sum, Ints weights, uint32_t x) {
#if defined(__AVX512VNNI__) && defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(Words{} + x),
                                                    reinterpret_cast<__m512i>(weights)));
#else
  for (int byte = 0; byte < 4; ++byte)
    sum += (weights << (24 - 8 * byte) >> 24) * static_cast<int32_t>(x >> (8 * byte) & 0xffu);
  return sum;
#endif
}

template <int ROWS, int AHEAD>
INLINE void panel_tile(const uint8_t* x, ptrdiff_t x_row, const int8_t* panel, int depth, int32_t* sums, bool add) {
  Ints sum[ROWS][TILE_VECTORS];
  auto place = [&](int i, int j) { return reinterpret_cast<Ints*>(sums + i * TILE_COLUMNS + j * LANES); };
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add ? *place(i, j) : Ints{};
  for (int k = 0; k < depth; k += 4) {
    Ints weights[TILE_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) {
      weights[j] = *reinterpret_cast<const Ints*>(panel + k * TILE_COLUMNS + 4 * j * LANES);
      if (AHEAD) __builtin_prefetch(panel + (k + 4 * AHEAD) * TILE_COLUMNS + 4 * j * LANES);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      uint32_t four;
      std::memcpy(&four, x + i * x_row + k, 4);
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add_fours(sum[i][j], weights[j], four);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) *place(i, j) = sum[i][j];
}
