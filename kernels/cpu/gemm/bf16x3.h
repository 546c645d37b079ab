// FP32 GEMM on AMX by BF16x3 splitting: six of the nine partial products, summed in FP32. Up to twice as fast as
// float32 vectors.
//
// A float32 number is exactly the sum of three bfloat16 parts: its upper 16 bits, those of the remainder, and the
// remainder of that. Products of parts are exact in float32. The three omitted products are smaller than the rounding
// error of the sum. Source: Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype For
// Higher-Precision Computations", 2019.
//
// The weights stay float32 in memory, in blocks. A block is split into the L1 cache while the tiles multiply the block
// before it. The order of a row's sums does not depend on the number of rows.

#pragma once

#include "gemm/linear.h"
#include "scratch.h"

constexpr int PARTS = 3;
constexpr int BLOCK_INPUTS = 32, BLOCK_COLUMNS = 32;  // of a block
constexpr int BLOCK_NUMBERS = BLOCK_INPUTS * BLOCK_COLUMNS;
constexpr int TILE_WORDS = AMX_ROWS * 16;             // pairs of bfloat16 in a tile
constexpr int SPLIT_WORDS = 2 * PARTS * TILE_WORDS;  // of a split block: a left and a right column tile of each part
constexpr int KEPT_BLOCKS = 5;                        // split blocks that stay in the L1 cache for all rows
constexpr int KEPT_ROWS = 512;                        // rows with sums that stay in the L2 cache

INLINE int num_blocks(int num_in) { return (num_in + BLOCK_INPUTS - 1) / BLOCK_INPUTS; }

// Pack a weight for tiles: each panel as its left, then its right columns, each as blocks [BLOCK_INPUTS,
// BLOCK_COLUMNS]. Inputs past the last are zeros.
INLINE void pack_bf16x3_blocks(const float* weight, int num_out, int num_in, bool gated, int num_threads,
                               float* packed) {
  const int halves = TILE_COLUMNS / BLOCK_COLUMNS, padded = num_blocks(num_in) * BLOCK_INPUTS;
  const int panels = (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS;
  parallel_for(num_threads, panels * halves, [=](int64_t half) {
    float* to = packed + half * padded * BLOCK_COLUMNS;
    for (int column = 0; column < BLOCK_COLUMNS; ++column) {
      const int in_panel = static_cast<int>(half % halves) * BLOCK_COLUMNS + column;
      const int row = packed_row(static_cast<int>(half / halves), in_panel, num_out, gated);
      for (int k = 0; k < padded; ++k)
        to[k * BLOCK_COLUMNS + column] =
            row < num_out && k < num_in ? weight[static_cast<ptrdiff_t>(row) * num_in + k] : 0.0f;
    }
  });
}

// Split activations: tiles of 16 rows and BLOCK_INPUTS inputs, [ceil(rows / 16), blocks, PARTS]. Rows past the last are
// not initialised: a row of a tile product depends on no other row.
struct Bf16x3Rows {
  uint32_t* tiles;
  int blocks;

  static size_t num_words(size_t rows, int num_in) {
    return (rows + AMX_ROWS - 1) / AMX_ROWS * num_blocks(num_in) * PARTS * TILE_WORDS;
  }
  uint32_t* at(int row, int block) const {
    const ptrdiff_t tile = (static_cast<ptrdiff_t>(row / AMX_ROWS) * blocks + block) * PARTS;
    return tiles + tile * TILE_WORDS + row % AMX_ROWS * 16;
  }
  Bf16x3Rows from(int row) const { return {at(row, 0), blocks}; }  // row: a multiple of AMX_ROWS
};

#if defined(AMX_TILES)

INLINE Words upper_half(Words x) { return x & 0xffff0000u; }

INLINE Words without(Words x, Words part) {
  return reinterpret_cast<Words>(reinterpret_cast<Floats>(x) - reinterpret_cast<Floats>(part));
}

// Weights are truncated; activations are rounded to nearest, which makes the omitted products smaller and their mean
// zero.
INLINE Words nearest_part(Words x) {
  return upper_half((x & 0x7fffffffu) < 0x7f7f0000u ? x + 0x8000u : x);  // a finite number must not round to infinity
}

// Split BLOCK_INPUTS inputs of a row into the three tiles of a block.
INLINE void split_inputs(const float* from, uint32_t* to) {
  for (int half = 0; half < 2; ++half) {
    Words x = reinterpret_cast<Words>(load(from + half * LANES));
    for (int part = 0; part < PARTS; ++part) {
      const Words next = nearest_part(x);
      *reinterpret_cast<Shorts*>(to + part * TILE_WORDS + half * 8) = __builtin_convertvector(next >> 16, Shorts);
      x = without(x, next);
    }
  }
}

INLINE void split_row(const float* from, int num_in, int row, const Bf16x3Rows& to) {
  const int whole = num_in / BLOCK_INPUTS;
  for (int block = 0; block < whole; ++block) split_inputs(from + block * BLOCK_INPUTS, to.at(row, block));
  if (whole == to.blocks) return;
  float last[BLOCK_INPUTS] = {};
  std::copy(from + whole * BLOCK_INPUTS, from + num_in, last);
  split_inputs(last, to.at(row, whole));
}

INLINE void split_row(const BFloat16*, int, int, const Bf16x3Rows&) {}  // never called: BF16x3 is for float32

// Split two vectors of adjacent inputs and store them interleaved in the three tiles of a block.
INLINE void split_pairs(Words even, Words odd, uint32_t* to) {
#pragma GCC unroll 3
  for (int part = 0; part < PARTS; ++part) {
    constexpr int A_OR_B_AND_C = 0xf8;
    _mm512_store_si512(to + part * TILE_WORDS,
                       _mm512_ternarylogic_epi32(reinterpret_cast<__m512i>(even >> 16), reinterpret_cast<__m512i>(odd),
                                                 _mm512_set1_epi32(static_cast<int>(0xffff0000u)),
                                                 A_OR_B_AND_C));
    even = without(even, upper_half(even));
    odd = without(odd, upper_half(odd));
  }
}

constexpr int SPLITS = BLOCK_INPUTS / 2 * 2;  // vectors of pairs in a block: the units of work of split_some

constexpr int NEAR = 10 * BLOCK_COLUMNS, FAR = 3 * BLOCK_NUMBERS;  // prefetch distances: to L1, to L2

// Split vectors [first, last) of a block, in memory order.
INLINE void split_some(const float* block, int first, int last, uint32_t* to) {
#pragma GCC unroll 8
  for (int i = first; i < last; ++i) {
    const float* from = block + i / 2 * 2 * BLOCK_COLUMNS + i % 2 * LANES;
    split_pairs(*reinterpret_cast<const Words*>(from), *reinterpret_cast<const Words*>(from + BLOCK_COLUMNS),
                to + i % 2 * PARTS * TILE_WORDS + i / 2 * 16);
    __builtin_prefetch(from + NEAR);
    __builtin_prefetch(from + NEAR + BLOCK_COLUMNS);
    __builtin_prefetch(from + FAR, 0, 2);
    __builtin_prefetch(from + FAR + BLOCK_COLUMNS, 0, 2);
  }
}

#define LOAD_ROWS(part)                            \
  _tile_loadd(4, upper + part * TILE_WORDS, 64);   \
  if constexpr (BOTH) _tile_loadd(5, lower + part * TILE_WORDS, 64)
#define LOAD_WEIGHTS(part)                         \
  _tile_loadd(6, weights + part * TILE_WORDS, 64); \
  _tile_loadd(7, weights + (PARTS + part) * TILE_WORDS, 64)
#define ADD_PRODUCTS(product)                          \
  _tile_dpbf16ps(0, 4, 6);                          \
  _tile_dpbf16ps(1, 4, 7);                          \
  if constexpr (BOTH) {                             \
    _tile_dpbf16ps(2, 5, 6);                        \
    _tile_dpbf16ps(3, 5, 7);                        \
  }                                                 \
  interleave(product)
#define ALL_WRITTEN() asm volatile("" ::: "memory")  // the compiler does not know that tile loads read memory

constexpr int NUM_PRODUCTS = 6;  // partial products of a block

// Add a block to the sums of one or two (BOTH) row tiles. `interleave` is called with
// 0 to NUM_PRODUCTS - 1 after each partial product.
template <bool BOTH, class Interleave>
INLINE void add_block(const uint32_t* upper, const uint32_t* lower, const uint32_t* weights, Interleave interleave) {
  LOAD_ROWS(0);
  LOAD_WEIGHTS(2);
  ADD_PRODUCTS(0);
  LOAD_WEIGHTS(1);
  ADD_PRODUCTS(1);
  LOAD_ROWS(1);
  ADD_PRODUCTS(2);
  LOAD_WEIGHTS(0);
  ADD_PRODUCTS(3);
  LOAD_ROWS(0);
  ADD_PRODUCTS(4);
  LOAD_ROWS(2);
  ADD_PRODUCTS(5);
}

#undef LOAD_ROWS
#undef LOAD_WEIGHTS
#undef ADD_PRODUCTS

// One thread's part of a GEMM. The tile configuration is kept from panel to panel. While the last block of a panel is
// multiplied, the first block of the next panel in memory is split; packed weights therefore end with a spare block.
class Bf16x3Product {
 public:
  explicit Bf16x3Product(int num_rows)
      : height_(std::min(num_rows, AMX_ROWS)), tiles_(height_),
        depth_(num_rows <= 2 * AMX_ROWS ? 2 : 2 * KEPT_BLOCKS) {}

  // `use(row, sums)` is called with the TILE_COLUMNS results of every row, bias included.
  template <class Use>
  void panel(const Linear& linear, int panel, const Bf16x3Rows& x, int num_rows, Use use) {
    static thread_local Scratch scratch;
    float* sums = scratch.floats(static_cast<size_t>(round_up(std::min(num_rows, KEPT_ROWS), AMX_ROWS)) * TILE_COLUMNS);
    const float* weights = static_cast<const float*>(linear.weights) +
                           static_cast<ptrdiff_t>(panel) * x.blocks * BLOCK_INPUTS * TILE_COLUMNS;
    for (int first = 0; first < num_rows; first += KEPT_ROWS) {
      const int rows = std::min(KEPT_ROWS, num_rows - first);
      multiply(x.from(first), weights, linear.halves(panel), rows, sums);
      use_rows(linear, panel, first, rows, sums, use);
    }
  }

 private:
  // Compute sums [rows, TILE_COLUMNS] of the panel's first `halves` halves; rows are rounded up to whole tiles.
  void multiply(const Bf16x3Rows& x, const float* weights, int halves, int rows, float* sums) {
    if (weights != split_) split_some(weights, 0, SPLITS, slot_address(slot_));
    ALL_WRITTEN();
    split_ = weights;
    const int parts = (x.blocks + KEPT_BLOCKS - 1) / KEPT_BLOCKS;
    for (int part = 0; part < halves * parts; ++part) {
      const int first = x.blocks * (part % parts) / parts, last = x.blocks * (part % parts + 1) / parts;
      float* mine = sums + part / parts * BLOCK_COLUMNS;
      const int slot = slot_;
      rows > AMX_ROWS ? first_rows<true>(x, first, last, mine) : first_rows<false>(x, first, last, mine);
      for (int row = 2 * AMX_ROWS; row < rows; row += 2 * AMX_ROWS) {
        float* to = mine + row * TILE_COLUMNS;
        if (rows - row > AMX_ROWS)
          other_rows<true>(x.from(row), first, last, slot, to);
        else
          other_rows<false>(x.from(row), first, last, slot, to);
      }
    }
  }

  // Add input blocks [first, last) to the sums of the first rows. Block `first` has been split; the block after each
  // one is split during its products.
  template <bool BOTH>
  __attribute__((noinline)) void first_rows(const Bf16x3Rows& x, int first, int last, float* sums) {
    clear_tiles();
    for (int block = first; block < last; ++block) {
      const uint32_t* here = slot_address(slot_);
      uint32_t* to = slot_address(++slot_);
      const float* next = split_ += BLOCK_NUMBERS;
      add_block<BOTH>(x.at(0, block), x.at(AMX_ROWS, block), here, [&](int product) {
        split_some(next, product * SPLITS / NUM_PRODUCTS, (product + 1) * SPLITS / NUM_PRODUCTS, to);
      });
      ALL_WRITTEN();
    }
    take_tiles<BOTH>(sums, first > 0);
  }

  // Add input blocks [first, last) to the sums of later rows; the split blocks are in the slots from `slot` on.
  template <bool BOTH>
  __attribute__((noinline)) void other_rows(const Bf16x3Rows& x, int first, int last, int slot, float* sums) {
    clear_tiles();
    for (int block = first; block < last; ++block)
      add_block<BOTH>(x.at(0, block), x.at(AMX_ROWS, block), slot_address(slot + block - first), [](int) {});
    take_tiles<BOTH>(sums, first > 0);
  }

  static void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }

  // Store the tiles to the sums, or add them. Adding partial sums of a few blocks reduces the rounding error.
  template <bool BOTH>
  void take_tiles(float* sums, bool add) {
    float* to = add ? part_ : sums;
    const ptrdiff_t step = add ? BLOCK_COLUMNS : TILE_COLUMNS, bytes = step * sizeof(float);
    _tile_stored(0, to, bytes);
    _tile_stored(1, to + LANES, bytes);
    if constexpr (BOTH) {
      _tile_stored(2, to + AMX_ROWS * step, bytes);
      _tile_stored(3, to + AMX_ROWS * step + LANES, bytes);
    }
    for (int row = 0; add && row < (BOTH ? 2 * AMX_ROWS : height_); ++row)
      for (int j = 0; j < BLOCK_COLUMNS; j += LANES) {
        float* sum = sums + row * TILE_COLUMNS + j;
        store(sum, load(sum) + load(part_ + row * BLOCK_COLUMNS + j));
      }
  }

  uint32_t* slot_address(unsigned slot) { return slots_ + slot % depth_ * SPLIT_WORDS; }

  const int height_;
  const AmxTiles tiles_;
  const unsigned depth_;
  unsigned slot_ = 0;
  const float* split_ = nullptr;  // the block that is split in the current slot
  alignas(64) float part_[2 * AMX_ROWS * BLOCK_COLUMNS];
  alignas(64) uint32_t slots_[2 * KEPT_BLOCKS * SPLIT_WORDS];
};

#else

template <class T>
INLINE void split_row(const T*, int, int, const Bf16x3Rows&) {}

class Bf16x3Product {
 public:
  explicit Bf16x3Product(int) {}
  template <class Use>
  void panel(const Linear&, int, const Bf16x3Rows&, int, Use) {}
};

#endif
