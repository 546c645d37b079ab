// Many rows times blocks on Intel AMX, for gemm/block_dots.cpp.
//
// A tile multiplies 16 rows with the weights of a group of 16 columns. Its sums are multiplied by their scales in vectors.
// Those of int8 are exact, and the rest is done in the same order and with the same roundings as in vectors: results are
// the same. Those of bfloat16 are added in another order, as in gemm/amx.h.

#pragma once

#include "gemm/amx.h"
#include "gemm/block_dots.h"
#include "gemm/block_format.h"

#if defined(AMX_TILES)

// What tiles multiply: the weights of a group as they are unpacked, and products.
struct Int8Products {
  typedef int32_t Sum;
  static constexpr int WORDS = GROUP / 4;

  // Unpack word `word` of LANES columns: signed bytes, zero points subtracted.
  template <class Panel>
  static MEMBER __m512i word(const Panel& format, const uint8_t* block, int group, int word, int at) {
    Ints zero = Ints{} + Panel::ZERO;
    if constexpr (Panel::ZEROS) zero = format.zeros(block, group, at);
    return _mm512_sub_epi8(reinterpret_cast<__m512i>(format.word(block, group, word, at)),
                           reinterpret_cast<__m512i>(zero * 0x01010101));  // of at most 32: no carry
  }
  // Return the sums of a row and a group times `scale`, as the vectors of gemm/block_dots.cpp do.
  static MEMBER void add_scaled(Floats& total, const int32_t* sums, Floats scale, const Int8Rows& x, ptrdiff_t at_row) {
    total += to_floats(*reinterpret_cast<const Ints*>(sums)) * scale * x.scales[at_row];
  }
};

struct Bf16Products {
  typedef float Sum;
  static constexpr int WORDS = GROUP / 2;

  template <class Panel>
  static MEMBER __m512i word(const Panel& format, const uint8_t* block, int group, int word, int at) {
    return reinterpret_cast<__m512i>(format.pair(block, group, word / 2, word % 2, at));
  }
  static MEMBER void add_scaled(Floats& total, const float* sums, Floats scale, const Bf16Rows&, ptrdiff_t) {
    total += load(sums) * scale;
  }
};

// Tile `to` += tile `x` times tile `weights`.
#define AMX_ADD_BLOCKS(to, x, weights)                  \
  if constexpr (std::is_same_v<Products, Bf16Products>) \
    _tile_dpbf16ps(to, x, weights);                     \
  else                                                  \
    _tile_dpbssd(to, x, weights)

// A part of a panel: weights in the layout of the instructions, and what their sums are multiplied with.
template <class Rows, bool HALVES, bool MINIMA>
class alignas(64) AmxBlockTile {
  using Products = std::conditional_t<std::is_same_v<Rows, Int8Rows>, Int8Products, Bf16Products>;
  using Sum = typename Products::Sum;
  static constexpr int PARTS = HALVES ? 2 : 1;  // of a group, with a scale each
  static constexpr int WORDS = Products::WORDS;

 public:
  static constexpr int GROUPS = 4 / PARTS;  // so that their sums fit into the L1 cache, too

  // Return the shapes that `multiply` needs for so many rows; they last for all tiles of a panel.
  static AmxTiles shapes(int rows) { return AmxTiles(std::min(rows, AMX_ROWS), WORDS * 4 / PARTS); }

  // Unpack group `group` of a panel's block to place `to`.
  template <class Panel>
  MEMBER void unpack(const Panel& format, const uint8_t* block, int group, int to) {
#pragma GCC unroll 4
    for (int at = 0; at < TILE_COLUMNS; at += LANES) {
#pragma GCC unroll 16
      for (int word = 0; word < WORDS; ++word)
        _mm512_store_si512(weights_[to][word] + at, Products::word(format, block, group, word, at));
#pragma GCC unroll 2
      for (int part = 0; part < PARTS; ++part)
        store(scales_[to][part] + at, format.scale(block, group, at, part));
      if constexpr (MINIMA) store(minima_[to] + at, format.minimum(block, group, at));
    }
  }

  // Add `rows` rows times the first `count` groups to `results` [rows][TILE_COLUMNS], or store them where `place`, the
  // first group's index in the rows, is 0. This thread has `shapes` of so many rows.
  void multiply(const Rows& x, int row, int num_in, int rows, int place, int count, float* results) const {
    const int height = std::min(rows, AMX_ROWS), groups = num_in / GROUP;
    int done = 0;
    while (done < rows) {
      const int first = std::min(done, rows - height);  // the last rows overlap those before
      const auto* numbers = x.numbers + static_cast<ptrdiff_t>(row + first) * num_in + place * GROUP;
      alignas(64) Sum sums[GROUPS][PARTS][AMX_ROWS][TILE_COLUMNS];
      for (int group = 0; group < count; ++group)
        for (int part = 0; part < PARTS; ++part)
          multiply_part(numbers + group * GROUP + part * GROUP / PARTS, num_in * sizeof(*numbers),
                        weights_[group][part * WORDS / PARTS], sums[group][part][0]);
      for (; done < first + height; ++done)
        scale_row(sums, done - first, count, x, static_cast<ptrdiff_t>(row + done) * groups + place, place > 0,
                  results + done * TILE_COLUMNS);
    }
  }

 private:
  // sums[16][TILE_COLUMNS] = 16 rows times a group, or half of one.
  static void multiply_part(const void* numbers, ptrdiff_t row_bytes, const uint32_t* weights, Sum* sums) {
    constexpr int BYTES = TILE_COLUMNS * 4;
    static_assert(TILE_COLUMNS == 4 * AMX_ROWS);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_loadd(4, numbers, row_bytes);
    _tile_loadd(6, weights, BYTES);
    AMX_ADD_BLOCKS(0, 4, 6);
    _tile_loadd(7, weights + 16, BYTES);
    AMX_ADD_BLOCKS(1, 4, 7);
    _tile_loadd(6, weights + 32, BYTES);
    AMX_ADD_BLOCKS(2, 4, 6);
    _tile_loadd(7, weights + 48, BYTES);
    AMX_ADD_BLOCKS(3, 4, 7);
    _tile_stored(0, sums, BYTES);
    _tile_stored(1, sums + 16, BYTES);
    _tile_stored(2, sums + 32, BYTES);
    _tile_stored(3, sums + 48, BYTES);
  }

  // Add a row's sums of groups, times their scales, to its results, or store them; `at_row`: the row's first group.
  MEMBER void scale_row(const Sum (*sums)[PARTS][AMX_ROWS][TILE_COLUMNS], int row, int count, const Rows& x,
                        ptrdiff_t at_row, bool adds, float* results) const {
    Floats total[TILE_VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; ++v) total[v] = adds ? load(results + v * LANES) : Floats{};
    for (int group = 0; group < count; ++group)
#pragma GCC unroll 4
      for (int v = 0; v < TILE_VECTORS; ++v) {
#pragma GCC unroll 2
        for (int part = 0; part < PARTS; ++part)
          Products::add_scaled(total[v], sums[group][part][row] + v * LANES, load(scales_[group][part] + v * LANES), x,
                               at_row + group);
        if constexpr (MINIMA) total[v] -= load(minima_[group] + v * LANES) * x.group_sums[at_row + group];
      }
#pragma GCC unroll 4
    for (int v = 0; v < TILE_VECTORS; ++v) store(results + v * LANES, total[v]);
  }

  uint32_t weights_[GROUPS][WORDS][TILE_COLUMNS];
  float scales_[GROUPS][PARTS][TILE_COLUMNS], minima_[GROUPS][TILE_COLUMNS];
};

#endif
