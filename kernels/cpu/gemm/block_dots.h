// Linear layers with weights in the blocks of a quantised checkpoint, multiplied as integers: with activations rounded
// to int8 with a scale for every GROUP inputs, or with bfloat16 activations where an instruction takes pairs of them.
// Their products replace the float32 products of gemm/blocks.h.
//
// With int8, sums of a group are exact in integers, with zero points; where the format has integer scales and AVX2 sums
// pairs, those of 256 inputs are. With bfloat16, integers of up to 8 bits are exact,
// products with them are, too, and their sums are float32. A sum is multiplied by its scale once. Sums are
// added in float32 in order, so that a row's result does not depend on the other rows. Weights are not rounded a second
// time.
//
// A panel is stored block after block, in as many bytes as that of gemm/blocks.h, in the order in which it is read:
// factors of all its columns, then for each group scales, minima, and words of four inputs of each column. One that is
// read from its first byte to its last comes from memory twice as fast as one whose scales lie together at its head. Of
// weights with four or five bits, a word's lower nibbles are four inputs and its upper ones the next four; fifth bits
// are in words of their own. Of six bits, three words hold four: the upper two bits of each are a part of the fourth.
// Few rows are multiplied with the panel as it is; for more, a part of it at a time is unpacked into the L1 cache. With
// AMX, tiles multiply them (gemm/amx_blocks.h): with the same results of int8; sums of bfloat16 are added in another
// order, the same one for any number of rows above TILE_ROWS.

#pragma once

#include "gemm/blocks.h"
#include "gemm/int8.h"

// Rows of bfloat16. Of every four numbers the second and the third are exchanged, as the words of blocks are unpacked in
// this order.
struct Bf16Rows {
  BFloat16* numbers;  // [rows, num_in]
  float* group_sums;  // [rows, num_in / GROUP]

  // Return `count` rows in memory of their own, of `num_floats` numbers of float32.
  static Bf16Rows in(float* memory, size_t count, int num_in) {
    return {reinterpret_cast<BFloat16*>(memory + count * (num_in / GROUP)), memory};
  }
  static size_t num_floats(size_t count, int num_in) { return count * (num_in / GROUP + (num_in + 1) / 2); }

  Bf16Rows from(ptrdiff_t row, const Linear& linear) const {
    return {numbers + row * linear.num_in, group_sums + row * (linear.num_in / GROUP)};
  }
  void put(const BFloat16* from, int row, int num_in) const {
    BFloat16* to = numbers + static_cast<ptrdiff_t>(row) * num_in;
    for (int i = 0; i < num_in; i += 4) {
      to[i] = from[i], to[i + 1] = from[i + 2], to[i + 2] = from[i + 1], to[i + 3] = from[i + 3];
    }
    for (int group = 0; group < num_in / GROUP; ++group) {
      Floats sums = {};
      for (int i = 0; i < GROUP; i += LANES) sums += load(from + group * GROUP + i);
      group_sums[static_cast<ptrdiff_t>(row) * (num_in / GROUP) + group] = sum_lanes(sums);
    }
  }
};

// sums[rows][TILE_COLUMNS] = rows from `row` on, at most ROW_BLOCK, times a panel.
void dot_block_rows(const BlockPanel& panel, const Int8Rows& x, int row, int num_in, int rows, float* sums);
void dot_block_rows(const BlockPanel& panel, const Bf16Rows& x, int row, int num_in, int rows, float* sums);

// Compute one panel for all rows; see multiply_panel in gemm/linear.h. use(row, sums).
template <class Rows, class Use>
INLINE void dot_block_panel(const Linear& linear, int panel, const Rows& x, int num_rows, Use use) {
  alignas(64) float sums[ROW_BLOCK * TILE_COLUMNS];
  for (int block = 0; block < num_rows; block += ROW_BLOCK) {
    const int rows = std::min(ROW_BLOCK, num_rows - block);
    dot_block_rows(linear.panels[panel], x, block, linear.num_in, rows, sums);
    use_rows(linear, panel, block, rows, sums, use);
  }
}
