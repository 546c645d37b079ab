// The product of a small matrix that is read element by element with one that is read in vectors: the inner loop of
// linear layers (activations times packed weights) and of attention (keys times queries, values times weights).

#pragma once

#include "simd.h"

// Vectors beside each other in one tile, and rows under each other: as many sums as fit into the registers, beside the
// vectors that are multiplied.
constexpr int TILE_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

// c[i][j] (+)= sum over k of a[i * a_row + k * a_step] * b[k * b_step + j], for ROWS rows and VECTORS * LANES columns.
// Each element is summed in the order of k, whatever the tile: a row's result does not depend on its neighbours.
template <int ROWS, int VECTORS>
INLINE void multiply_tile(const float* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t b_step,
                          int depth, float* c, ptrdiff_t c_row, bool add) {
  Floats sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = add ? load(c + i * c_row + j * LANES) : Floats{};
  for (int k = 0; k < depth; ++k) {
    Floats column[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) column[j] = load(b + k * b_step + j * LANES);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; ++j) sum[i][j] += column[j] * a[i * a_row + k * a_step];
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) store(c + i * c_row + j * LANES, sum[i][j]);
}

// The same for any number of rows.
template <int VECTORS>
static void multiply(int rows, const float* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t b_step,
                     int depth, float* c, ptrdiff_t c_row, bool add) {
  int i = 0;
  for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
    multiply_tile<TILE_ROWS, VECTORS>(a + i * a_row, a_row, a_step, b, b_step, depth, c + i * c_row, c_row, add);
  for (; i < rows; ++i)
    multiply_tile<1, VECTORS>(a + i * a_row, a_row, a_step, b, b_step, depth, c + i * c_row, c_row, add);
}
