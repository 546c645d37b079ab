// GEMM of bfloat16 or int8 on Intel AMX: up to nine times as fast as vectors.
//
// A tile is 16 rows of 64 bytes. The strips of gemm/linear.h have the layout of the instructions (VNNI): pairs of
// bfloat16, or 4 bytes, of sixteen adjacent outputs. Two row tiles times two column tiles use all eight tile registers.

#pragma once

#include <type_traits>

#include "simd.h"

constexpr int AMX_ROWS = 16;  // of a tile, maximum
template <class T>
constexpr int AMX_INPUTS = 64 / sizeof(T);  // elements in a row of a tile

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__) && defined(__linux__)
#define AMX_TILES

#include <sys/syscall.h>
#include <unistd.h>

inline bool amx_granted = false;  // see triolet_use_amx

INLINE bool amx_usable() { return amx_granted; }

// Request AMX from Linux, which saves the tile registers only for processes that ask (arch_prctl).
INLINE bool request_amx(bool wanted) {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18;
  amx_granted = wanted && syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
  return amx_granted;
}

// AMX tile configuration: rows and row bytes of each tile.
class TileShapes {
 public:
  void set(int tile, int rows, int row_bytes) {
    config_[16 + 2 * tile] = static_cast<uint8_t>(row_bytes);
    config_[48 + tile] = static_cast<uint8_t>(rows);
  }
  // Load the configuration into this thread.
  void load() const {
    asm volatile("" : : "r"(config_) : "memory");  // GCC believes that the instruction reads only eight bytes
    _tile_loadconfig(config_);
  }

 private:
  alignas(64) uint8_t config_[64] = {1};  // palette 1
};

// Tile configuration of this thread, released by the destructor. Sums (0 to 3) and activations (4 and 5) have `height`
// rows; weights (6 and 7) have one row for every four of the `depth` bytes of a row of activations.
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

// Prefetch a quarter of the tile that begins AHEAD_OF_TILE bytes after this one. Not further: data that is used
// soon after its prefetch arrives fastest. Spread evenly between the products, so that prefetches do not queue.
template <int QUARTER, class W>
INLINE void fetch_weights(const W* tile) {
  constexpr int AHEAD_OF_TILE = 1024, BYTES = AMX_ROWS * 64 / 4;
  const char* from = reinterpret_cast<const char*>(tile) + AHEAD_OF_TILE + QUARTER * BYTES;
#pragma GCC unroll 4
  for (int byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(from + byte);
}

// Prefetched while tiles are multiplied: nothing, the next weights of this panel (OWN), or a part of the next panel.
enum class Fetch { NOTHING, OWN, NEXT };
constexpr int NEXT_BYTES = 256;  // of the next panel, with each product of four tiles

// Compute two row tiles times two column tiles; `left` and `right` are the strips of the columns.
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

// sums[i][j] = x times a panel, over the first `depth` inputs (a multiple of AMX_INPUTS).
//
// columns: of the panel, a multiple of 32. strip: elements from one strip to the next.
// rows_before: rows that have been multiplied with this panel before. The first rows prefetch the panel itself, later
// ones the next panel. The last row tiles overlap the ones before, so that nothing past the last row is read.
template <class X, class W, class Sum>
static void amx_multiply(const X* x, ptrdiff_t x_row, const W* panel, ptrdiff_t strip, int columns, int rows, int depth,
                        int rows_before, Sum* sums) {
  const int height = rows < AMX_ROWS ? rows : AMX_ROWS;
  const AmxTiles tiles(height);
  for (int first = 0; first < rows; first += 2 * AMX_ROWS) {
    const ptrdiff_t last = rows - height;
    const ptrdiff_t upper = first < last ? first : last, lower = first + AMX_ROWS < last ? first + AMX_ROWS : last;
    const int row_pass = (rows_before + first) / (2 * AMX_ROWS);
    for (int column = 0; column < columns; column += 32) {
      const W* left = panel + column / 16 * strip;
      const ptrdiff_t products = depth / AMX_INPUTS<X>, fetched = (row_pass * columns + column) / 32 - columns / 32;
      const char* next = reinterpret_cast<const char*>(panel + columns / 16 * strip) + fetched * products * NEXT_BYTES;
      auto multiply = [&](auto fetch) {
        amx_tiles<fetch.value>(x + upper * x_row, x + lower * x_row, x_row * sizeof(X), left, left + strip, depth,
                               sums + upper * columns + column, sums + lower * columns + column, columns * 4, next);
      };
      if (row_pass == 0)
        multiply(std::integral_constant<Fetch, Fetch::OWN>{});
      else if ((fetched + 1) * NEXT_BYTES <= columns * 64)
        multiply(std::integral_constant<Fetch, Fetch::NEXT>{});
      else
        multiply(std::integral_constant<Fetch, Fetch::NOTHING>{});
    }
  }
}

// sums[i][j] = one int4 group: signed bytes of x times unsigned weights, `depth` inputs of AmxTiles; see amx_multiply.
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
INLINE bool request_amx(bool) { return false; }
template <class X, class W, class Sum>
INLINE void amx_multiply(const X*, ptrdiff_t, const W*, ptrdiff_t, int, int, int, int, Sum*) {}

#endif
