// Linear layers with int4 weights: two nibbles per byte, and a bfloat16 scale for every GROUP inputs of an output, 4.5
// bits per weight in all. A weight is (nibble - 8) * scale. Activations are int8 with a scale for each group.
//
// A panel is stored group by group: for every eight inputs four bytes of each output, the first four inputs in the
// lower nibbles, then the bfloat16 scales of all outputs. Sums within a group are exact in int32; groups are added in
// float32 in order, so a row's result does not depend on the other rows.

#pragma once

#include "gemm/int8.h"

static_assert(GROUP <= 4 * NibbleSums::MAX_WORDS, "the sums of a group are exact");
constexpr int GROUP_BYTES = TILE_COLUMNS * (GROUP / 2 + 2);  // of a panel

// Pack a weight [num_out, num_in] of 0 to 15 and its scales [num_out, num_in / GROUP] into panels.
static void pack_int4(const uint8_t* weight, const BFloat16* scales, int num_out, int num_in, bool gated,
                        int num_threads, uint8_t* packed) {
  const int panels = (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS, groups = num_in / GROUP;
  parallel_for(num_threads, panels, [=](int64_t panel) {
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      const ptrdiff_t row = packed_row(static_cast<int>(panel), column, num_out, gated);
      for (int group = 0; group < groups; ++group) {
        uint8_t* to = packed + (panel * groups + group) * GROUP_BYTES;
        const uint8_t* from = weight + row * num_in + group * GROUP;
        for (int i = 0; i < GROUP / 2; ++i) {
          const int first = i / 4 * 8 + i % 4;
          to[(i / 4 * TILE_COLUMNS + column) * 4 + i % 4] =
              row < num_out ? static_cast<uint8_t>(from[first] | from[first + 4] << 4) : 0x88;
        }
        const BFloat16 scale = row < num_out ? scales[row * groups + group] : BFloat16{0};
        std::memcpy(to + TILE_COLUMNS * (GROUP / 2) + 2 * column, &scale, 2);
      }
    }
  });
}

// sums[i][j] = or += groups [first, first + count) of ROWS rows times one panel. AHEAD: prefetch distance in groups.
template <int ROWS, int AHEAD>
INLINE void int4_tile(const Int8Rows& x, int row, int num_in, const uint8_t* panel, int first, int count,
                       float* sums) {
  constexpr int PAIR = 2;  // vectors at once: sums and weights of more would not fit into the registers
  const int groups = num_in / GROUP;
  const uint8_t* numbers = x.numbers + static_cast<ptrdiff_t>(row) * num_in;
  const float* scales = x.scales + static_cast<ptrdiff_t>(row) * groups;
  const int32_t* zero_point_offsets = x.zero_point_offsets + static_cast<ptrdiff_t>(row) * groups;
  Floats total[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) total[i][j] = first ? load(sums + i * TILE_COLUMNS + j * LANES) : Floats{};
  for (int group = first; group < first + count; ++group) {
    const uint8_t* weights = panel + static_cast<ptrdiff_t>(group) * GROUP_BYTES;
    if (AHEAD)
#pragma GCC unroll 32
      for (int line = 0; line < GROUP_BYTES; line += 64) __builtin_prefetch(weights + AHEAD * GROUP_BYTES + line);
#pragma GCC unroll 2
    for (int pair = 0; pair < TILE_VECTORS; pair += PAIR) {
      NibbleSums sum[ROWS][PAIR];
#pragma GCC unroll 4
      for (int eight = 0; eight < GROUP / 8; ++eight) {
        Words low[PAIR], high[PAIR];
#pragma GCC unroll 2
        for (int j = 0; j < PAIR; ++j) {
          const uint8_t* from = weights + (eight * TILE_COLUMNS + (pair + j) * LANES) * 4;
          const Words both = *reinterpret_cast<const Words*>(from);
          low[j] = both & 0x0f0f0f0fu;
          high[j] = both >> 4 & 0x0f0f0f0fu;
        }
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const uint8_t* from = numbers + static_cast<ptrdiff_t>(i) * num_in + group * GROUP + 8 * eight;
          const Words first_four = Words{} + load_word(from), second_four = Words{} + load_word(from + 4);
#pragma GCC unroll 2
          for (int j = 0; j < PAIR; ++j) {
            sum[i][j].add(low[j], first_four);
            sum[i][j].add(high[j], second_four);
          }
        }
      }
#pragma GCC unroll 2
      for (int j = 0; j < PAIR; ++j) {
        const uint8_t* from = weights + TILE_COLUMNS * (GROUP / 2) + (pair + j) * LANES * 2;
        const Floats scale = load(reinterpret_cast<const BFloat16*>(from));
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const Ints whole = sum[i][j].total() + zero_point_offsets[i * groups + group];
          total[i][pair + j] += __builtin_convertvector(whole, Floats) * (scale * scales[i * groups + group]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) store(sums + i * TILE_COLUMNS + j * LANES, total[i][j]);
}

// Multiply all groups of a panel with many rows on AMX, in the same order; return false if AMX does not apply.
__attribute__((noinline)) static bool add_int4_groups_amx(const Int8Rows& x, int row, int num_in, const uint8_t* panel,
                                                          int rows, float* sums) {
#if defined(AMX_TILES)
  if (rows <= AMX_ROWS || !amx_usable()) return false;  // measured: 8 rows take an eighth longer on AMX
  alignas(64) int32_t products[ROW_BLOCK * TILE_COLUMNS];
  alignas(64) uint8_t whole[GROUP * TILE_COLUMNS];
  const AmxTiles tiles(std::min(rows, AMX_ROWS), GROUP);
  const int groups = num_in / GROUP;
  std::fill(sums, sums + rows * TILE_COLUMNS, 0.0f);
  for (int group = 0; group < groups; ++group) {
    const uint8_t* weights = panel + static_cast<ptrdiff_t>(group) * GROUP_BYTES;
    for (int eight = 0; eight < GROUP / 8; ++eight)
      for (int j = 0; j < TILE_COLUMNS * 4; j += 64) {
        const Words both = *reinterpret_cast<const Words*>(weights + eight * TILE_COLUMNS * 4 + j);
        *reinterpret_cast<Words*>(whole + 2 * eight * TILE_COLUMNS * 4 + j) = both & 0x0f0f0f0fu;
        *reinterpret_cast<Words*>(whole + (2 * eight + 1) * TILE_COLUMNS * 4 + j) = both >> 4 & 0x0f0f0f0fu;
      }
    const uint8_t* numbers = x.numbers + static_cast<ptrdiff_t>(row) * num_in + group * GROUP;
    amx_int4_group(numbers, num_in, whole, TILE_COLUMNS, rows, products);
    Floats scale[TILE_VECTORS];
    for (int j = 0; j < TILE_VECTORS; ++j)
      scale[j] = load(reinterpret_cast<const BFloat16*>(weights + TILE_COLUMNS * (GROUP / 2)) + j * LANES);
    for (int i = 0; i < rows; ++i) {
      const ptrdiff_t place = static_cast<ptrdiff_t>(row + i) * groups + group;
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; ++j) {
        const Ints sum =
            *reinterpret_cast<const Ints*>(products + i * TILE_COLUMNS + j * LANES) + x.zero_point_offsets[place];
        float* total = sums + i * TILE_COLUMNS + j * LANES;
        store(total, load(total) + __builtin_convertvector(sum, Floats) * (scale[j] * x.scales[place]));
      }
    }
  }
  return true;
#else
  return false;
#endif
}

// Multiply all groups of a panel with some rows. The first rows of a cold panel prefetch it; it stays in the cache for
// the others.
__attribute__((noinline)) static void add_int4_groups(const Int8Rows& x, int row, int num_in, const uint8_t* panel,
                                                      int rows, bool cold, float* sums) {
  if (add_int4_groups_amx(x, row, num_in, panel, rows, sums)) return;
  constexpr int GROUPS_AHEAD = 4;
  const int groups = num_in / GROUP, deep = rows <= TILE_ROWS ? groups : DEPTH_BLOCK / GROUP;
  for (int group = 0; group < groups; group += deep)
    in_groups(rows, [&](auto size, int first) {
      const int count = std::min(deep, groups - group);
      float* mine = sums + first * TILE_COLUMNS;
      if (cold && first == 0)
        int4_tile<size.value, GROUPS_AHEAD>(x, row + first, num_in, panel, group, count, mine);
      else
        int4_tile<size.value, 0>(x, row + first, num_in, panel, group, count, mine);
    });
}

// Compute one panel for all rows; see multiply_panel in gemm/linear.h.
template <class Use>
INLINE void multiply_int4_panel(const Linear& linear, int panel, const Int8Rows& x, int num_rows, Use use) {
  alignas(64) float sums[ROW_BLOCK * TILE_COLUMNS];
  const uint8_t* weights = static_cast<const uint8_t*>(linear.weights) +
                           static_cast<ptrdiff_t>(panel) * (linear.num_in / GROUP) * GROUP_BYTES;
  for (int block = 0; block < num_rows; block += ROW_BLOCK) {
    const int rows = std::min(ROW_BLOCK, num_rows - block);
    add_int4_groups(x, block, linear.num_in, weights, rows, block == 0, sums);
    use_rows(linear, panel, block, rows, sums, use);
  }
}
