// Many rows of int8 times blocks on Intel AMX, for gemm/block_dots.cpp.
//
// A tile multiplies 16 rows with the weights of a group of 16 columns, zero points subtracted, so that its sums are those
// of vectors, exactly. They are multiplied by their scales in vectors, in the same order and with the same roundings.

#pragma once

#include "gemm/amx.h"
#include "gemm/block_format.h"
#include "gemm/int8.h"

#if defined(AMX_TILES)

// A part of a panel: signed weights in the layout of the instructions, and what their sums are multiplied with.
template <bool HALVES, bool MINIMA>
class alignas(64) AmxBlockTile {
 public:
  static constexpr int PARTS = HALVES ? 2 : 1;  // of a group, with a scale each
  static constexpr int GROUPS = 4 / PARTS;  // so that their sums fit into the L1 cache, too

  // Unpack group `group` of a panel's block to place `to`.
  template <class Panel>
  MEMBER void unpack(const Panel& format, const uint8_t* block, int group, int to) {
#pragma GCC unroll 4
    for (int at = 0; at < TILE_COLUMNS; at += LANES) {
      Ints zero = Ints{} + Panel::ZERO;
      if constexpr (Panel::ZEROS) zero = format.zeros(block, group, at);
      const __m512i zeros = reinterpret_cast<__m512i>(zero * 0x01010101);  // at most 32: no carry
#pragma GCC unroll 8
      for (int word = 0; word < WORDS; ++word)
        _mm512_store_si512(weights_[to][word] + at, _mm512_sub_epi8(reinterpret_cast<__m512i>(
                                                                        format.word(block, group, word, at)), zeros));
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; ++part)
        store(scales_[to][part] + at, format.scale(block, group, at, part));
      if constexpr (MINIMA) store(minima_[to] + at, format.minimum(block, group, at));
    }
  }

  // Add `rows` rows times the first `count` groups to `results` [rows][TILE_COLUMNS], or store them where `place`, the
  // first group's index in the rows, is 0.
  void multiply(const Int8Rows& x, int row, int num_in, int rows, int place, int count, float* results) const {
    const int height = std::min(rows, AMX_ROWS), groups = num_in / GROUP;
    const AmxTiles shapes(height, GROUP / PARTS);
    int done = 0;
    while (done < rows) {
      const int first = std::min(done, rows - height);  // the last rows overlap those before
      const uint8_t* numbers = x.numbers + static_cast<ptrdiff_t>(row + first) * num_in + place * GROUP;
      alignas(64) int32_t sums[GROUPS][PARTS][AMX_ROWS][TILE_COLUMNS];
      for (int group = 0; group < count; ++group)
        for (int part = 0; part < PARTS; ++part)
          multiply_part(numbers + group * GROUP + part * GROUP / PARTS, num_in,
                        weights_[group][part * WORDS / PARTS], sums[group][part][0]);
      for (; done < first + height; ++done) {
        const ptrdiff_t at_row = static_cast<ptrdiff_t>(row + done) * groups + place;
        scale_row(sums, done - first, count, x.scales + at_row, x.group_sums + at_row, place > 0,
                  results + done * TILE_COLUMNS);
      }
    }
  }

 private:
  static constexpr int WORDS = GROUP / 4;

  // sums[16][TILE_COLUMNS] = 16 rows times a group, or half of one.
  static void multiply_part(const uint8_t* numbers, int num_in, const uint32_t* weights, int32_t* sums) {
    constexpr int BYTES = TILE_COLUMNS * 4;
    static_assert(TILE_COLUMNS == 4 * AMX_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, numbers, num_in);
    _tile_loadd(6, weights, BYTES);
    _tile_dpbssd(0, 4, 6);
    _tile_loadd(7, weights + 16, BYTES);
    _tile_dpbssd(1, 4, 7);
    _tile_loadd(6, weights + 32, BYTES);
    _tile_dpbssd(2, 4, 6);
    _tile_loadd(7, weights + 48, BYTES);
    _tile_dpbssd(3, 4, 7);
    _tile_stored(0, sums, BYTES);
    _tile_stored(1, sums + 16, BYTES);
    _tile_stored(2, sums + 32, BYTES);
    _tile_stored(3, sums + 48, BYTES);
  }

  // Add a row's sums of groups, times their scales, to its results, or store them.
  MEMBER void scale_row(const int32_t (*sums)[PARTS][AMX_ROWS][TILE_COLUMNS], int row, int count, const float* scales,
                        const float* group_sums, bool adds, float* results) const {
    Floats total[TILE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; ++v) total[v] = adds ? load(results + v * LANES) : Floats{};
    for (int group = 0; group < count; ++group)
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; ++v) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; ++part) {
          const Ints sum = *reinterpret_cast<const Ints*>(sums[group][part][row] + v * LANES);
          total[v] += to_floats(sum) * load(scales_[group][part] + v * LANES) * scales[group];
        }
        if constexpr (MINIMA) total[v] -= load(minima_[group] + v * LANES) * group_sums[group];
      }
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; ++v) store(results + v * LANES, total[v]);
  }

  uint32_t weights_[GROUPS][WORDS][TILE_COLUMNS];
  float scales_[GROUPS][PARTS][TILE_COLUMNS], minima_[GROUPS][TILE_COLUMNS];
};

#endif
