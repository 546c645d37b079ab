// A linear layer by BF16x3 splitting, for test_cpu_bf16x3.py: all that a decoder does with one, in one call.

#include <vector>

#include "gemm/bf16x3.h"

EXPORT int has_tiles() { return request_amx(true); }

// out: [rows, num_out rounded up to whole panels], in the panels' order
EXPORT void multiply(const float* weight, const float* bias, int num_out, int num_in, int gated, const float* x,
                     int rows,
                     float* out) {
  Linear linear{};
  linear.gated = gated;
  linear.num_out = num_out;
  linear.num_in = num_in;
  linear.bits = 32;
  linear.bias = bias;
  const int panels = linear.num_panels(), width = panels * TILE_COLUMNS, blocks = num_blocks(num_in);
  std::vector<float> packed(static_cast<size_t>(width) * blocks * BLOCK_INPUTS + BLOCK_NUMBERS);
  pack_bf16x3_blocks(weight, num_out, num_in, gated, 1, packed.data());
  linear.weights = packed.data();
  Scratch scratch;
  const size_t words = Bf16x3Rows::num_words(rows, num_in);
  const Bf16x3Rows bf16x3_rows{reinterpret_cast<uint32_t*>(scratch.floats(words)), blocks};
  std::fill(bf16x3_rows.tiles, bf16x3_rows.tiles + words, 0x7fc17fc1u);  // NaN where no row is written
  for (int row = 0; row < rows; ++row) split_row(x + static_cast<ptrdiff_t>(row) * num_in, num_in, row, bf16x3_rows);
  Bf16x3Product product(rows);
  for (int panel = 0; panel < panels; ++panel)
    product.panel(linear, panel, bf16x3_rows, rows, [&](int row, const float* sums) {
      std::copy(sums, sums + TILE_COLUMNS, out + static_cast<ptrdiff_t>(row) * width + panel * TILE_COLUMNS);
    });
}
