// Linear layers with weights packed once: y = x @ weight.T + bias. Weights are in the model's dtype, or
// int8 (gemm/int8.h), or int4 (gemm/int4.h).
//
// A weight [num_out, num_in] lies in panels of TILE_COLUMNS outputs, each panel in the order in which the inner loop
// reads it, so that a step streams the weights through the cache once: for every input the numbers of all its outputs.
// Bfloat16 and bytes lie in strips of LANES outputs, one strip of a panel after the other: for every two, or four,
// inputs the numbers of the strip's outputs. Sixteen such steps are a tile of AMX as it is. Outputs past the last are
// zeros. A panel of a gated layer holds half a panel of gates and the half of ups that they go with: the activation is
// part of the same pass.

#pragma once

#include <algorithm>

#include "gemm/amx.h"
#include "gemm/byte_dot.h"
#include "threading/parallel_for.h"

// Mirrored in abi.py.
struct Linear {
  const void* weights;     // panels
  const float* bias;       // this and the next two in the panels' order of outputs; null = none
  const float* scales;     // that bytes are to be multiplied by
  const int32_t* zero_point_offsets;  // 128 * sum of an output's weights: activations are stored with 128 added
  int32_t num_out, num_in;
  int32_t bits;  // 0: the weights are in the model's dtype; 32: float32 in blocks (gemm/bf16x3.h); 8: bytes; 4: halves
                 // of bytes, their scales beside them
  int32_t gated;  // whether the halves of a panel go together

  // How many of a panel's halves hold outputs. The last panel's second one may be all zeros.
  int halves(int panel) const { return gated || num_out - panel * TILE_COLUMNS > TILE_COLUMNS / 2 ? 2 : 1; }
  int num_panels() const { return (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS; }
};

constexpr int GROUP = 32;  // inputs whose halves of bytes have one scale

constexpr int ROW_BLOCK = 16 * TILE_ROWS;  // rows whose sums stay in the first-level cache
constexpr int AHEAD = 16;                  // steps that a panel is fetched ahead: a third off the time of 4 to 8 rows
constexpr int DEPTH_BLOCK = 512;           // inputs of a panel of bytes that stay there while those rows pass

// The same for weights of any kind: 32 KiB; even.
template <class W>
constexpr int DEPTH_BLOCK_OF = DEPTH_BLOCK * 64 / TILE_COLUMNS / static_cast<int>(sizeof(W));

// ------------------------------------------------------------------------------------------- packing

// The row of the weight that is column `column` of a panel; num_out or more = none.
INLINE int packed_row(int panel, int column, int num_out, bool gated) {
  if (!gated) return panel * TILE_COLUMNS + column;
  const int half = TILE_COLUMNS / 2, unit = panel * half + column % half;
  if (unit >= num_out / 2) return num_out;
  return column < half ? unit : num_out / 2 + unit;
}

constexpr int inputs_per_word(float) { return 1; }
constexpr int inputs_per_word(BFloat16) { return 2; }
constexpr int inputs_per_word(int8_t) { return 4; }

// Outputs of a panel that lie beside each other.
template <class T>
constexpr int STRIP = inputs_per_word(T{}) > 1 ? LANES : TILE_COLUMNS;

// Where an input of a column lies in its panel.
template <class T>
INLINE ptrdiff_t packed_place(int num_in, int input, int column) {
  constexpr int TOGETHER = inputs_per_word(T{}), WIDE = STRIP<T>;
  return static_cast<ptrdiff_t>(column / WIDE * WIDE) * num_in +
         static_cast<ptrdiff_t>(input / TOGETHER * WIDE + column % WIDE) * TOGETHER + input % TOGETHER;
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

// Row `row` of a weight that was packed and not gated, as float32.
template <class T>
static void unpack_row(const T* packed, int num_in, int row, float* to) {
  const T* from = packed + static_cast<ptrdiff_t>(row / TILE_COLUMNS) * TILE_COLUMNS * num_in;
  for (int k = 0; k < num_in; ++k) to[k] = widen(from[packed_place<T>(num_in, k, row % TILE_COLUMNS)]);
}

// ------------------------------------------------------------------------------------- the inner loop

// sums[i][j] (+)= some inputs of ROWS rows times one panel. Each step fetches LINES vectors of what is at `fetched`: of
// floats, which lie in the order of the steps, those that come next; of others one of each of the first strips.
template <int ROWS, int LINES>
INLINE void panel_tile(const float* x, ptrdiff_t x_row, const float* panel, ptrdiff_t, const float* fetched, int depth,
                       float* sums, bool add) {
  multiply_tile<ROWS, TILE_VECTORS, LINES>(x, x_row, 1, panel, TILE_COLUMNS, depth, sums, TILE_COLUMNS, add, fetched);
}

// Pairs of bfloat16 times pairs, added to float32.
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

// Groups of 4 bytes times groups of 4, added to int32.
INLINE Ints dot_add(Ints sum, Words weights, Words x) { return dot_bytes(sum, x, weights); }

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

// strip: elements from one to the next.
template <int ROWS, int LINES, class X, class W, class Sum>
INLINE void panel_tile(const X* x, ptrdiff_t x_row, const W* panel, ptrdiff_t strip, const W* fetched, int depth,
                       Sum* sums, bool add) {
  using Sums = typename VectorOf<Sum>::Type;
  constexpr int TOGETHER = inputs_per_word(W{});
  Sums sum[ROWS][TILE_VECTORS];
  auto place = [&](int i, int j) { return reinterpret_cast<Sums*>(sums + i * TILE_COLUMNS + j * LANES); };
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add ? *place(i, j) : Sums{};
  for (int k = 0; k < depth; k += TOGETHER) {
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

// The inputs from `done` on, for rows whose sums of the inputs before are in `sums`. A panel that comes from memory
// (`cold`) is fetched ahead with the first rows; the others find it in the cache, and fetch the next one meanwhile.
template <class X, class W, class Sum>
__attribute__((noinline)) static void add_inputs(const X* x, ptrdiff_t x_row, const W* panel, int num_in, int done,
                                                 int rows, bool cold, Sum* sums) {
  constexpr int TOGETHER = inputs_per_word(W{});
  const int groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
  const int deep = groups == 1 ? num_in : DEPTH_BLOCK_OF<W>;  // read once, the panel need not be kept
  for (int k = done; k < num_in; k += deep)
    in_groups(rows, [&](auto size, int first) {
      constexpr int ROWS = size.value;
      const X* from = x + first * x_row + k;
      const W* part = panel + static_cast<ptrdiff_t>(k) * STRIP<W>;
      const W* next = part + static_cast<ptrdiff_t>(num_in) * TILE_COLUMNS;
      const int depth = std::min(deep, num_in - k), group = first / (rows / groups);
      const ptrdiff_t strip = static_cast<ptrdiff_t>(TOGETHER > 1 ? num_in : depth) * LANES;
      Sum* mine = sums + first * TILE_COLUMNS;
      if (cold && first == 0)
        panel_tile<ROWS, TILE_VECTORS>(from, x_row, part, strip, part + AHEAD * TOGETHER * STRIP<W>, depth, mine,
                                       k > 0);
      else if (cold && groups > 3 && group <= TILE_VECTORS)  // fewer have too little to do meanwhile
        panel_tile<ROWS, 1>(from, x_row, part, strip, next + (group - 1) * strip, depth, mine, k > 0);
      else
        panel_tile<ROWS, 0>(from, x_row, part, strip, part, depth, mine, k > 0);
    });
}

// As many leading inputs as AMX takes, `above` rows being done; returns how many. For few rows it would only wait for
// the same memory.
template <class X, class W, class Sum>
INLINE int leading_inputs(const X* x, ptrdiff_t x_row, const W* panel, int num_in, int rows, int above,
                          Sum* sums) {
  const int depth = num_in / AMX_INPUTS<X> * AMX_INPUTS<X>;
  if (sizeof(X) == 4 || rows <= TILE_ROWS || depth == 0 || !amx_usable()) return 0;
  if constexpr (sizeof(X) < 4)
    amx_multiply(x, x_row, panel, static_cast<ptrdiff_t>(num_in) * LANES, TILE_COLUMNS, rows, depth, above, sums);
  return depth;
}

// Hand the results of some rows on, bias included.
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

// One panel for all rows: `use(row, sums)` is called with the TILE_COLUMNS results of every row, bias included.
template <class T, class Use>
INLINE void multiply_panel(const Linear& linear, int panel, const T* x, ptrdiff_t x_row, int num_rows, Use use) {
  alignas(64) float sums[ROW_BLOCK * TILE_COLUMNS];
  const int num_in = linear.num_in;
  const T* weights = static_cast<const T*>(linear.weights) + static_cast<ptrdiff_t>(panel) * TILE_COLUMNS * num_in;
  for (int block = 0; block < num_rows; block += ROW_BLOCK) {
    const int rows = std::min(ROW_BLOCK, num_rows - block);
    const T* from = x + block * x_row;
    const int done = leading_inputs(from, x_row, weights, num_in, rows, block, sums);
    add_inputs(from, x_row, weights, num_in, done, rows, block == 0, sums);
    use_rows(linear, panel, block, rows, sums, use);
  }
}
