// GEMM microkernel: a matrix that is read element by element times one that is read in vectors. It is the inner loop of
// linear layers (activations times packed weights) and of prefill attention (keys times queries, values times weights).

#pragma once

#include <type_traits>

#include "simd.h"

// Columns (in vectors) and rows of a tile: as many sums as fit into the registers, beside the operands.
constexpr int TILE_VECTORS = REGISTERS == 32 ? 4 : 2;
constexpr int TILE_ROWS = 6;
constexpr int TILE_COLUMNS = TILE_VECTORS * LANES;

// c[i][j] = or += (`add`) sum over k of a[i * a_row + k * a_step] * b[k * b_step + j], for ROWS rows and VECTORS *
// LANES columns. Each element is summed in the order of k, so a row's result does not depend on the size of the tile.
// LINES: vectors from `fetched` on that each step prefetches, for a `b` that is in memory.
template <int ROWS, int VECTORS, int LINES = 0>
INLINE void multiply_tile(const float* a, ptrdiff_t a_row, ptrdiff_t a_step, const float* b, ptrdiff_t b_step,
                          int depth, float* c, ptrdiff_t c_row, bool add, const float* fetched = nullptr) {
  Floats sum[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) sum[i][j] = add ? load(c + i * c_row + j * LANES) : Floats{};
  for (int k = 0; k < depth; ++k) {
    Floats column[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; ++j) {
      column[j] = load(b + k * b_step + j * LANES);
      if (j < LINES) __builtin_prefetch(fetched + (k * LINES + j) * LANES);
    }
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

// Call `work(rows, first)` for groups of at most MOST rows of nearly equal size; `rows` is a compile-time constant.
template <int MOST = TILE_ROWS, class Work>
INLINE void in_groups(int rows, Work work) {
  static_assert(MOST <= TILE_ROWS);
  const int groups = (rows + MOST - 1) / MOST;
  for (int group = 0, first = 0; group < groups; ++group) {
    const int size = rows / groups + (group < rows % groups);
    switch (size) {
      case 1: work(std::integral_constant<int, 1>{}, first); break;
      case 2: work(std::integral_constant<int, 2>{}, first); break;
      case 3: work(std::integral_constant<int, 3>{}, first); break;
      case 4: if constexpr (MOST >= 4) work(std::integral_constant<int, 4>{}, first); break;
      case 5: if constexpr (MOST >= 5) work(std::integral_constant<int, 5>{}, first); break;
      case 6: if constexpr (MOST >= 6) work(std::integral_constant<int, 6>{}, first); break;
    }
    first += size;
  }
}

// The same as multiply_tile, for any number of rows.
template <int VECTORS>
__attribute__((noinline)) static void multiply(int rows, const float* a, ptrdiff_t a_row, ptrdiff_t a_step,
                                               const float* b, ptrdiff_t b_step, int depth, float* c, ptrdiff_t c_row,
                                               bool add) {
  in_groups(rows, [&](auto size, int i) {
    multiply_tile<size.value, VECTORS>(a + i * a_row, a_row, a_step, b, b_step, depth, c + i * c_row, c_row, add);
  });
}
