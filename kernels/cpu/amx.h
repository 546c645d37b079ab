// Products of bfloat16 on Intel's AMX tiles, where the machine has them: up to nine times as fast as its vectors.
//
// A tile is 16 rows of 64 bytes. The packed panels of linear.h are what the instruction wants already: pairs of inputs,
// outputs beside each other. Two tiles of rows times two of columns keep eight tiles busy.

#pragma once

#include "simd.h"

constexpr int AMX_ROWS = 16;    // of a tile, at most
constexpr int AMX_INPUTS = 32;  // bfloat16 numbers in a tile's row

#if defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)

#include <sys/syscall.h>
#include <unistd.h>

// Linux lends the tiles' registers only to a process that asks.
INLINE bool amx_usable() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return granted;
}

// This thread's tiles, for as long as the object lives; others may set them up in their own way before and after.
// Sums and activations (0 to 5) are `height` rows high, weights (6 and 7) always AMX_ROWS.
class AmxTiles {
 public:
  explicit AmxTiles(int height) {
    alignas(64) uint8_t config[64] = {1};  // palette 1; then, from byte 16, bytes per row, and from 48, rows
    for (int tile = 0; tile < 8; ++tile) {
      config[16 + 2 * tile] = 64;
      config[48 + tile] = static_cast<uint8_t>(tile < 6 ? height : AMX_ROWS);
    }
    _tile_loadconfig(config);
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// sums[i][j] = the first `depth` inputs of x, a multiple of AMX_INPUTS, times a panel of `columns` (a multiple of 32).
// The last tiles reach back over rows that are done already, rather than past the end.
static void amx_product(const BFloat16* x, ptrdiff_t x_row, const BFloat16* panel, int columns, int rows, int depth,
                        float* sums) {
  const int height = rows < AMX_ROWS ? rows : AMX_ROWS;
  const AmxTiles tiles(height);
  const ptrdiff_t x_bytes = x_row * 2, panel_bytes = columns * 4, sums_bytes = columns * 4;
  for (int first = 0; first < rows; first += 2 * AMX_ROWS) {
    const ptrdiff_t last = rows - height;
    const ptrdiff_t upper = first < last ? first : last, lower = first + AMX_ROWS < last ? first + AMX_ROWS : last;
    for (int column = 0; column < columns; column += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int k = 0; k < depth; k += AMX_INPUTS) {
        const BFloat16* weights = panel + static_cast<ptrdiff_t>(k) * columns + 2 * column;
        _tile_loadd(4, x + upper * x_row + k, x_bytes);
        _tile_loadd(5, x + lower * x_row + k, x_bytes);
        _tile_loadd(6, weights, panel_bytes);
        _tile_loadd(7, weights + 32, panel_bytes);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, sums + upper * columns + column, sums_bytes);
      _tile_stored(1, sums + upper * columns + column + 16, sums_bytes);
      _tile_stored(2, sums + lower * columns + column, sums_bytes);
      _tile_stored(3, sums + lower * columns + column + 16, sums_bytes);
    }
  }
}

#else

INLINE bool amx_usable() { return false; }
INLINE void amx_product(const BFloat16*, ptrdiff_t, const BFloat16*, int, int, int, float*) {}

#endif
