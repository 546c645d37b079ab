// Products of bfloat16 or of bytes on Intel's AMX tiles, where the machine has them: up to nine times as fast as
// vectors.
//
// A tile is 16 rows of 64 bytes. The strips of gemm/linear.h are what the instructions want already: pairs of inputs,
// or four bytes, sixteen outputs beside each other. Two tiles of rows times two of columns keep eight tiles busy.

#pragma once

#include <type_traits>

#include "simd.h"

constexpr int AMX_ROWS = 16;    // of a tile, at most
template <class T>
constexpr int AMX_INPUTS = 64 / sizeof(T);  // numbers in a tile's row

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define AMX_TILES

#include <sys/syscall.h>
#include <unistd.h>

inline bool amx_granted = false;  // see triolet_use_amx

INLINE bool amx_usable() { return amx_granted; }

// Linux lends the tiles' registers only to a process that asks.
INLINE bool ask_for_amx(bool wanted) {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  amx_granted = wanted && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return amx_granted;
}

// How large each tile is.
class TileShapes {
 public:
  void set(int tile, int rows, int row_bytes) {
    config_[16 + 2 * tile] = static_cast<uint8_t>(row_bytes);
    config_[48 + tile] = static_cast<uint8_t>(rows);
  }
  // For this thread.
  void load() const {
    asm volatile("" : : "r"(config_) : "memory");  // GCC takes the instruction for one that reads eight bytes
    _tile_loadconfig(config_);
  }

 private:
  alignas(64) uint8_t config_[64] = {1};  // palette 1
};

// This thread's tiles, for as long as the object lives; others may set them up in their own way before and after.
// Sums and activations (0 to 5) are `height` rows high, weights (6 and 7) one for every four of the `depth` bytes of a
// row of activations.
class AmxTiles {
 public:
  explicit AmxTiles(int height, int depth = 64) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile)
      shapes.set(tile, tile < 6 ? height : depth / 4, tile == 4 || tile == 5 ? depth : 64);
    shapes.load();
  }
  ~AmxTiles() { _tile_release(); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;
};

// Tile `to` += tile `x` times tile `weights`: bfloat16 to float32, or unsigned times signed bytes to int32.
#define AMX_ADD(to, x, weights)          \
  if constexpr (sizeof(X) == 2)          \
    _tile_dpbf16ps(to, x, weights);      \
  else                                   \
    _tile_dpbusd(to, x, weights)

// Fetch a quarter of what AHEAD_OF_TILE bytes further on will be a tile. Not further: what is read of memory soon after
// it was asked for comes fastest, and evenly between the products, lest they wait for each other.
template <int QUARTER, class W>
INLINE void fetch_weights(const W* tile) {
  constexpr int AHEAD_OF_TILE = 1024, BYTES = AMX_ROWS * 64 / 4;
  const char* from = reinterpret_cast<const char*>(tile) + AHEAD_OF_TILE + QUARTER * BYTES;
#pragma GCC unroll 4
  for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(from + byte);
}

// What is fetched while tiles are multiplied: nothing, the weights that they need next, or some of the next panel.
enum class Fetch { NOTHING, OWN, NEXT };
constexpr int NEXT_BYTES = 256;  // of the next panel, with each product of four tiles

// sums[i][j] of two tiles of rows and two of columns, which are two strips from `left` and `right` on.
template <Fetch FETCH, class X, class W, class Sum>
INLINE void amx_tiles(const X* upper, const X* lower, ptrdiff_t x_bytes, const W* left, const W* right, int depth,
                      Sum* upper_sums, Sum* lower_sums, ptrdiff_t sums_bytes, const char* next) {
  constexpr bool COLD = FETCH == Fetch::OWN;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  constexpr int TILE = AMX_ROWS * 64 / sizeof(W);
  for (int k = 0; k < depth; k += AMX_INPUTS<X>, left += TILE, right += TILE) {
    if (COLD) fetch_weights<0>(left), fetch_weights<0>(right);
    if (FETCH == Fetch::NEXT)
      for (const char* end = next + NEXT_BYTES; next < end; next += 64) __builtin_prefetch(next, 0, 2);
    _tile_loadd(4, upper + k, x_bytes);
    _tile_loadd(6, left, 64);
    if (COLD) fetch_weights<1>(left), fetch_weights<1>(right);
    AMX_ADD(0, 4, 6);
    _tile_loadd(7, right, 64);
    if (COLD) fetch_weights<2>(left), fetch_weights<2>(right);
    AMX_ADD(1, 4, 7);
    _tile_loadd(5, lower + k, x_bytes);
    if (COLD) fetch_weights<3>(left), fetch_weights<3>(right);
    AMX_ADD(2, 5, 6);
    AMX_ADD(3, 5, 7);
  }
  _tile_stored(0, upper_sums, sums_bytes);
  _tile_stored(1, upper_sums + 16, sums_bytes);
  _tile_stored(2, lower_sums, sums_bytes);
  _tile_stored(3, lower_sums + 16, sums_bytes);
}

// sums[i][j] = the first `depth` inputs of x, a multiple of AMX_INPUTS, times a panel of `columns` (a multiple of 32)
// in strips that are `strip` elements apart. The last tiles reach back over rows that are done already, rather than
// past the end. With the panel's first rows it is fetched, and with those after them the panel that lies behind it;
// `above` rows of the same have been multiplied before.
template <class X, class W, class Sum>
static void amx_multiply(const X* x, ptrdiff_t x_row, const W* panel, ptrdiff_t strip, int columns, int rows, int depth,
                        int above, Sum* sums) {
  const int height = rows < AMX_ROWS ? rows : AMX_ROWS;
  const AmxTiles tiles(height);
  for (int first = 0; first < rows; first += 2 * AMX_ROWS) {
    const ptrdiff_t last = rows - height;
    const ptrdiff_t upper = first < last ? first : last, lower = first + AMX_ROWS < last ? first + AMX_ROWS : last;
    const int turn = (above + first) / (2 * AMX_ROWS);
    for (int column = 0; column < columns; column += 32) {
      const W* left = panel + column / 16 * strip;
      const ptrdiff_t products = depth / AMX_INPUTS<X>, fetched = (turn * columns + column) / 32 - columns / 32;
      const char* next = reinterpret_cast<const char*>(panel + columns / 16 * strip) + fetched * products * NEXT_BYTES;
      auto multiply = [&](auto fetch) {
        amx_tiles<fetch.value>(x + upper * x_row, x + lower * x_row, x_row * sizeof(X), left, left + strip, depth,
                               sums + upper * columns + column, sums + lower * columns + column, columns * 4, next);
      };
      if (turn == 0)
        multiply(std::integral_constant<Fetch, Fetch::OWN>{});
      else if ((fetched + 1) * NEXT_BYTES <= columns * 64)
        multiply(std::integral_constant<Fetch, Fetch::NEXT>{});
      else
        multiply(std::integral_constant<Fetch, Fetch::NOTHING>{});
    }
  }
}

// sums[i][j] = a few signed bytes of x times unsigned ones, as many as AmxTiles was told; see above.
INLINE void amx_int4_group(const uint8_t* x, ptrdiff_t x_row, const uint8_t* weights, int columns, int rows,
                           int32_t* sums) {
  const int last = rows < AMX_ROWS ? 0 : rows - AMX_ROWS;
  const ptrdiff_t bytes = columns * 4;
  for (int first = 0; first < rows; first += 2 * AMX_ROWS) {
    const ptrdiff_t upper = first < last ? first : last, lower = first + AMX_ROWS < last ? first + AMX_ROWS : last;
    _tile_loadd(4, x + upper * x_row, x_row);
    _tile_loadd(5, x + lower * x_row, x_row);
    for (int column = 0; column < columns; column += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      _tile_loadd(6, weights + 4 * column, bytes);
      _tile_loadd(7, weights + 4 * column + 64, bytes);
      _tile_dpbsud(0, 4, 6);
      _tile_dpbsud(1, 4, 7);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
      _tile_stored(0, sums + upper * columns + column, bytes);
      _tile_stored(1, sums + upper * columns + column + 16, bytes);
      _tile_stored(2, sums + lower * columns + column, bytes);
      _tile_stored(3, sums + lower * columns + column + 16, bytes);
    }
  }
}

#else

INLINE bool amx_usable() { return false; }
INLINE bool ask_for_amx(bool) { return false; }
template <class X, class W, class Sum>
INLINE void amx_multiply(const X*, ptrdiff_t, const W*, ptrdiff_t, int, int, int, int, Sum*) {}

#endif
