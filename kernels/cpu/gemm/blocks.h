// Linear layers with weights in the blocks of a quantised checkpoint: the integers and scales of the file, in panels.
//
// A weight is decoded to float32 within the product, by the format's own formula and with its one rounding, so a result
// has the same bits as that of the float32 weights in gemm/linear.h: inputs are added in order, each weight times the
// activation in float32. Nothing is rounded a second time, and activations are not quantised.
//
// A block is `inputs()` inputs of one output. A panel is stored block after block: scales of all its columns, then
// integers, input after input; the columns of an input are adjacent bytes. Two inputs of four bits share a byte, the
// first in the lower half. One row decodes two panels into registers, which keeps twice as many sums in flight. More
// rows decode a part of a panel into the L1 cache, and multiply it as float32.

#pragma once

#include "gemm/linear.h"

// How blocks are stored; those of GGUF have ggml's numbers. Mirrored in packing.py.
enum BlockFormat : int32_t {
  Q4_0 = 2,
  Q5_0 = 6,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  U4 = 256,  // unsigned four bits with a float32 scale and a zero point: GPTQ, AWQ, W4A16
  I8 = 257,  // bytes with a float32 scale: W8A16, W8A8
};

// sums = one row times a panel, or (`is_pair`) times two panels of the same format.
void multiply_block_row(const BlockPanel* panels, bool is_pair, const float* x, int num_in, float* sums);

// sums[rows][TILE_COLUMNS] = at most ROW_BLOCK rows times a panel.
void multiply_block_rows(const BlockPanel& panel, const float* x, int num_in, int rows, float* sums);

// Decode row `row` of a packed weight that is not gated.
void unpack_block_row(const Linear& linear, int row, float* to);

// Decode row `row` of a file's blocks, which are not packed: an embedding.
void decode_file_row(int32_t format_number, const uint8_t* rows, ptrdiff_t row, int num_in, float* to);

// Compute `count` (1 or 2) panels from `panel` on for all rows; see multiply_panel in gemm/linear.h. use(panel, row,
// sums).
template <class Use>
INLINE void multiply_block_panels(const Linear& linear, int panel, int count, const float* x, int num_rows, Use use) {
  alignas(64) float sums[ROW_BLOCK * TILE_COLUMNS];
  const int num_in = linear.num_in;
  const BlockPanel* panels = linear.panels + panel;
  const bool is_pair = count == 2 && panels[0].format == panels[1].format && panels[0].inputs == panels[1].inputs;
  for (int i = 0; i < count; ++i) {
    float* mine = sums;
    for (int block = 0; block < num_rows; block += ROW_BLOCK) {
      const int rows = std::min(ROW_BLOCK, num_rows - block);
      const float* from = x + static_cast<ptrdiff_t>(block) * num_in;
      if (rows > 1)
        multiply_block_rows(panels[i], from, num_in, rows, sums);
      else if (!is_pair || num_rows > 1)
        multiply_block_row(panels + i, false, from, num_in, sums);
      else if (i == 0)
        multiply_block_row(panels, true, from, num_in, sums);
      else
        mine = sums + TILE_COLUMNS;
      use_rows(linear, panel + i, block, rows, mine,
               [&](int row, const float* results) { use(panel + i, row, results); });
    }
  }
}
