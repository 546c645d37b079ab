// Linear layers with weights packed once: y = x @ weight.T + bias. Weights are in the model's dtype, or
// int8 (gemm/int8.h), or int4 (gemm/int4.h), or the blocks of a quantised checkpoint (gemm/blocks.h).
//
// A weight [num_out, num_in] is packed in panels of TILE_COLUMNS outputs, each in the order in which the microkernel
// reads it, so that a step streams the weights through the cache once. A float32 panel is [num_in, TILE_COLUMNS]. A
// bfloat16 or int8 panel consists of strips of LANES outputs, each [num_in / n, LANES, n] with n = 2 or 4 inputs per
// word; sixteen words of depth are an AMX tile. Outputs past the last are zeros. A panel of a gated layer holds half a
// panel of gate outputs and the matching half of up outputs, so that the activation is computed in the same pass.

#pragma once

#include <algorithm>

#include "gemm/amx.h"
#include "gemm/byte_dot.h"
#include "threading/parallel_for.h"

// A panel of quantised blocks (gemm/blocks.h). Mirrored in abi.py.
struct BlockPanel {
  const uint8_t* blocks;
  int32_t format;  // a BlockFormat
  int32_t inputs;  // inputs of a block
};

// Mirrored in abi.py.
struct Linear {
  const void* weights;     // panels
  const float* bias;       // bias, scales and offsets are in the order of the packed outputs; null = none
  const float* scales;     // per output, of int8 weights
  const int32_t* zero_point_offsets;  // 128 * sum of an output's weights, for targets with that ZERO_POINT
  const BlockPanel* panels;           // of quantised blocks, one for each panel, instead of `weights`; else null
  int32_t num_out, num_in;
  // 0: the model's dtype, or blocks; 32: float32 in blocks (gemm/bf16x3.h); 8: int8, or blocks with int8 activations
  // (gemm/block_dots.h); 16: blocks with bfloat16 activations (likewise); 4: int4, packed with scales
  int32_t bits;
  int32_t gated;  // a panel's first half are gates of its second half

  // Return how many halves of a panel hold outputs; the second half of the last panel may be padding.
  int halves(int panel) const { return gated || num_out - panel * TILE_COLUMNS > TILE_COLUMNS / 2 ? 2 : 1; }
  int num_panels() const { return (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS; }
};

constexpr int GROUP = 32;  // inputs per scale of int4 weights

constexpr int ROW_BLOCK = 16 * TILE_ROWS;  // rows with sums that stay in the L1 cache
constexpr int AHEAD = 16;                  // prefetch distance in steps: measured, 4 to 8 rows take a third less time
constexpr int WIDENED_DEPTH = 256;         // inputs of a bfloat16 panel that are widened at a time
constexpr int DEPTH_BLOCK = 512;           // inputs of an int8 panel that stay in the L1 cache for a block of rows

// The same 32 KiB for weights of any dtype; even.
template <class W>
constexpr int DEPTH_BLOCK_OF = DEPTH_BLOCK * 64 / TILE_COLUMNS / static_cast<int>(sizeof(W));

// ------------------------------------------------------------------------------------------- packing

// Return the weight's row that is packed as column `column` of a panel; num_out or more = padding.
INLINE int packed_row(int panel, int column, int num_out, bool gated) {
  if (!gated) return panel * TILE_COLUMNS + column;
  const int half = TILE_COLUMNS / 2, unit = panel * half + column % half;
  if (unit >= num_out / 2) return num_out;
  return column < half ? unit : num_out / 2 + unit;
}

constexpr int inputs_per_word(float) { return 1; }
constexpr int inputs_per_word(BFloat16) { return 2; }
constexpr int inputs_per_word(int8_t) { return 4; }

// Adjacent outputs of a panel.
template <class T>
constexpr int STRIP = inputs_per_word(T{}) > 1 ? LANES : TILE_COLUMNS;

// Return the offset of an input of a column in its panel, elements.
template <class T>
INLINE ptrdiff_t packed_place(int num_in, int input, int column) {
  constexpr int PER_WORD = inputs_per_word(T{}), WIDTH = STRIP<T>;
  return static_cast<ptrdiff_t>(column / WIDTH * WIDTH) * num_in +
         static_cast<ptrdiff_t>(input / PER_WORD * WIDTH + column % WIDTH) * PER_WORD + input % PER_WORD;
}

template <class T>
static void pack(const T* weight, int num_out, int num_in, bool gated, int num_threads, T* packed) {
  const int panels = (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS;
  parallel_for(num_threads, panels, [=](int64_t panel) {
    T* to = packed + panel * TILE_COLUMNS * num_in;
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      const int row = packed_row(static_cast<int>(panel), column, num_out, gated);
      const T* from = weight + static_cast<ptrdiff_t>(row) * num_in;
      for (int k = 0; k < num_in; ++k) to[packed_place<T>(num_in, k, column)] = row < num_out ? from[k] : T{};
    }
  });
}

// Widen row `row` of a packed weight that is not gated to float32.
template <class T>
static void unpack_row(const T* packed, int num_in, int row, float* to) {
  const T* from = packed + static_cast<ptrdiff_t>(row / TILE_COLUMNS) * TILE_COLUMNS * num_in;
  for (int k = 0; k < num_in; ++k) to[k] = widen(from[packed_place<T>(num_in, k, row % TILE_COLUMNS)]);
}

// ------------------------------------------------------------------------------------- the inner loop

// Weights that come next, to be fetched while others are multiplied. All of them at once, before the products, would keep
// these from loading anything.
struct NextWeights {
  const void* bytes;
  int size;

  // Prefetch the share of `count` of `rows` rows, from `first` on.
  MEMBER void fetch_beside(int first, int count, int rows) const {
    const int lines = (size + 63) / 64;
    for (int line = lines * first / rows; line < lines * (first + count) / rows; ++line)
      __builtin_prefetch(static_cast<const char*>(bytes) + line * 64);
  }
};

// sums[i][j] = or += (`add`) `depth` inputs of ROWS rows times one panel. Each step prefetches LINES vectors from
// `fetched` on: the next ones of float32; one of each of the first LINES strips of other dtypes.
template <int ROWS, int LINES>
INLINE void panel_tile(const float* x, ptrdiff_t x_row, const float* panel, ptrdiff_t, const float* fetched, int depth,
                       float* sums, bool add) {
  multiply_tile<ROWS, TILE_VECTORS, LINES>(x, x_row, 1, panel, TILE_COLUMNS, depth, sums, TILE_COLUMNS, add, fetched);
}

// sum += dot products of pairs of bfloat16, in float32.
INLINE Floats dot_add(Floats sum, Words weights, Words x) {
#if defined(__AVX512BF16__)
  return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(weights),
                                                   reinterpret_cast<__m512bh>(x)));
#else
  const Floats low = reinterpret_cast<Floats>(weights << 16), high = reinterpret_cast<Floats>(weights & 0xffff0000u);
  sum += low * reinterpret_cast<Floats>(x << 16);
  return sum + high * reinterpret_cast<Floats>(x & 0xffff0000u);
#endif
}

// The type of inputs that bfloat16 weights are multiplied with: float32 where no instruction takes pairs of bfloat16,
// so that the inputs are widened once for all panels and not once for each.
#if defined(__AVX512BF16__)
typedef BFloat16 BFloat16Inputs;
#else
typedef float BFloat16Inputs;
#endif

template <class T>
struct InputsOf {
  typedef T Type;
};
template <>
struct InputsOf<BFloat16> {
  typedef BFloat16Inputs Type;
};

// sum += dot products of groups of 4 bytes, in int32.
INLINE Ints dot_add(Ints sum, Words weights, Words x) { return dot_bytes_and_weights(sum, x, weights); }

template <class Number>
struct VectorOf;
template <>
struct VectorOf<float> {
  typedef Floats Type;
};
template <>
struct VectorOf<int32_t> {
  typedef Ints Type;
};

// The same for bfloat16 and int8. strip: elements from one strip to the next.
template <int ROWS, int LINES, class X, class W, class Sum>
INLINE void panel_tile(const X* x, ptrdiff_t x_row, const W* panel, ptrdiff_t strip, const W* fetched, int depth,
                       Sum* sums, bool add) {
  using Sums = typename VectorOf<Sum>::Type;
  constexpr int PER_WORD = inputs_per_word(W{});
  Sums sum[ROWS][TILE_VECTORS];
  auto place = [&](int i, int j) { return reinterpret_cast<Sums*>(sums + i * TILE_COLUMNS + j * LANES); };
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add ? *place(i, j) : Sums{};
  for (int k = 0; k < depth; k += PER_WORD) {
    Words weights[TILE_VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) {
      weights[j] = *reinterpret_cast<const Words*>(panel + j * strip + k * LANES);
      if (j < LINES) __builtin_prefetch(fetched + j * strip + k * LANES);
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Words some = Words{} + load_word(x + i * x_row + k);
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = dot_add(sum[i][j], weights[j], some);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) *place(i, j) = sum[i][j];
}

// The same for bfloat16 weights and widened inputs, with the same bits. The even inputs of a word come before the odd
// ones, so that one vector of each strip is in a register at a time: both and the sums do not fit.
template <int ROWS, int LINES>
INLINE void panel_tile(const float* x, ptrdiff_t x_row, const BFloat16* panel, ptrdiff_t strip, const BFloat16* fetched,
                       int depth, float* sums, bool add) {
  Floats sum[ROWS][TILE_VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add ? load(sums + i * TILE_COLUMNS + j * LANES) : Floats{};
  for (int k = 0; k < depth; k += 2) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      Floats weights[TILE_VECTORS];
#pragma GCC unroll 4
      for (int j = 0; j < TILE_VECTORS; ++j) {
        const Words word = *reinterpret_cast<const volatile Words*>(panel + j * strip + k * LANES);
        weights[j] = reinterpret_cast<Floats>(odd ? word & 0xffff0000u : word << 16);
        if (!odd && j < LINES) __builtin_prefetch(fetched + j * strip + k * LANES);
      }
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] += weights[j] * x[i * x_row + k + odd];
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) store(sums + i * TILE_COLUMNS + j * LANES, sum[i][j]);
}

// Widen inputs [first, first + depth) of a bfloat16 panel to a part of a float32 panel; `first` and `depth` are even.
INLINE void widen_panel(const BFloat16* panel, int num_in, int first, int depth, float* to) {
  for (int j = 0; j < TILE_VECTORS; ++j) {
    const BFloat16* strip = panel + (static_cast<ptrdiff_t>(j) * num_in + first) * LANES;
    float* column = to + j * LANES;
    for (int k = 0; k < depth; k += 2) {
      const Words both = *reinterpret_cast<const Words*>(strip + k * LANES);
      __builtin_prefetch(strip + (k + WIDENED_DEPTH) * LANES);
      store(column + k * TILE_COLUMNS, reinterpret_cast<Floats>(both << 16));
      store(column + (k + 1) * TILE_COLUMNS, reinterpret_cast<Floats>(both & 0xffff0000u));
    }
  }
}

// Add the inputs of a bfloat16 panel to the sums of many rows: it is widened once for all of them, in parts.
__attribute__((noinline)) static void add_widened_inputs(const float* x, ptrdiff_t x_row, const BFloat16* panel,
                                                         int num_in, int rows, float* sums) {
  alignas(64) float part[WIDENED_DEPTH * TILE_COLUMNS];
  for (int k = 0; k < num_in; k += WIDENED_DEPTH) {
    const int depth = std::min(WIDENED_DEPTH, num_in - k);
    widen_panel(panel, num_in, k, depth, part);
    in_groups(rows, [&](auto size, int first) {
      panel_tile<size.value, 0>(x + first * x_row + k, x_row, part, 0, part, depth, sums + first * TILE_COLUMNS, k > 0);
    });
  }
}

// Add the inputs from `done` on to the sums of the inputs before. The first rows of a `cold` panel prefetch it from
// memory; later rows find it in the cache and prefetch the next panel.
template <class X, class W, class Sum>
__attribute__((noinline)) static void add_inputs(const X* x, ptrdiff_t x_row, const W* panel, int num_in, int done,
                                                 int rows, bool cold, Sum* sums) {
  constexpr int PER_WORD = inputs_per_word(W{});
  const int groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
  if constexpr (sizeof(X) > sizeof(W))
    if (groups > 4) return add_widened_inputs(x, x_row, panel, num_in, rows, sums);
  // One group of rows reads the panel once: no blocking.
  const int depth_block = groups == 1 ? num_in : DEPTH_BLOCK_OF<W>;
  for (int k = done; k < num_in; k += depth_block)
    in_groups(rows, [&](auto size, int first) {
      constexpr int ROWS = size.value;
      const X* from = x + first * x_row + k;
      const W* part = panel + static_cast<ptrdiff_t>(k) * STRIP<W>;
      const W* next = part + static_cast<ptrdiff_t>(num_in) * TILE_COLUMNS;
      const int depth = std::min(depth_block, num_in - k), group = first / (rows / groups);
      const ptrdiff_t strip = static_cast<ptrdiff_t>(PER_WORD > 1 ? num_in : depth) * LANES;
      Sum* mine = sums + first * TILE_COLUMNS;
      if (cold && first == 0)
        panel_tile<ROWS, TILE_VECTORS>(from, x_row, part, strip, part + AHEAD * PER_WORD * STRIP<W>, depth, mine,
                                       k > 0);
      else if (cold && groups > 3 && group <= TILE_VECTORS)  // fewer groups are too short to hide the prefetches
        panel_tile<ROWS, 1>(from, x_row, part, strip, next + (group - 1) * strip, depth, mine, k > 0);
      else
        panel_tile<ROWS, 0>(from, x_row, part, strip, part, depth, mine, k > 0);
    });
}

// Multiply the leading inputs on AMX; return how many. None for few rows, where memory bandwidth is the limit. See
// amx_multiply for rows_before.
template <class X, class W, class Sum>
INLINE int leading_inputs(const X* x, ptrdiff_t x_row, const W* panel, int num_in, int rows, int rows_before,
                          Sum* sums) {
  const int depth = num_in / AMX_INPUTS<X> * AMX_INPUTS<X>;
  if (sizeof(X) == 4 || rows <= TILE_ROWS || depth == 0 || !amx_usable()) return 0;
  if constexpr (sizeof(X) < 4)
    amx_multiply(x, x_row, panel, static_cast<ptrdiff_t>(num_in) * LANES, TILE_COLUMNS, rows, depth, rows_before, sums);
  return depth;
}

// Add the bias and call `use(row, sums)` for each row.
template <class Use>
INLINE void use_rows(const Linear& linear, int panel, int first, int rows, float* sums, Use use) {
  for (int row = 0; row < rows; ++row) {
    float* mine = sums + row * TILE_COLUMNS;
    if (linear.bias)
      for (int j = 0; j < TILE_COLUMNS; j += LANES)
        store(mine + j, load(mine + j) + load(linear.bias + panel * TILE_COLUMNS + j));
    use(first + row, mine);
  }
}

// Compute one panel for all rows: `use(row, sums)` is called with the TILE_COLUMNS results of every row, bias included.
// W: dtype of the weights; `x` is of InputsOf<W>.
template <class W, class X, class Use>
INLINE void multiply_panel(const Linear& linear, int panel, const X* x, ptrdiff_t x_row, int num_rows, Use use) {
  alignas(64) float sums[ROW_BLOCK * TILE_COLUMNS];
  const int num_in = linear.num_in;
  const W* weights = static_cast<const W*>(linear.weights) + static_cast<ptrdiff_t>(panel) * TILE_COLUMNS * num_in;
  for (int block = 0; block < num_rows; block += ROW_BLOCK) {
    const int rows = std::min(ROW_BLOCK, num_rows - block);
    const X* from = x + block * x_row;
    const int done = leading_inputs(from, x_row, weights, num_in, rows, block, sums);
    add_inputs(from, x_row, weights, num_in, done, rows, block == 0, sums);
    use_rows(linear, panel, block, rows, sums, use);
  }
}
