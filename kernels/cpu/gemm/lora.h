// LoRA adapters of linear layers: y += B (A x), for the rows of a step that have an adapter.
//
// The pair of thin products is computed beside the plain one. Shrink, x A^T: a stage of its own before the layer's, in
// which the rows of one adapter share what they read of A. Expand: added to the sums of a panel while they are in the
// first cache, a row at a time, since the part of B that a panel needs is small. Both sum in float32 and in an order
// that depends on nothing but the adapter, so a row has the same bits whatever is computed beside it.
//
// Source: the pair of kernels, shrink and expand, is that of Punica, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285.

#pragma once

#include <memory_resource>
#include <vector>

#include "gemm/linear.h"

// B of one module of a layer, with the scaling, for half panels first_half, first_half + step, ... of the packed layer.
// Mirrored in abi.py.
struct AdapterPiece {
  const void* b;  // [num_halves, rank, TILE_COLUMNS / 2]
  int32_t first_half, step, num_halves;
  int32_t first_rank, rank;  // its rows of A
};

// What an adapter adds to one layer, or to the embedding. Mirrored in abi.py.
struct AdapterLinear {
  const void* a;  // [rank, num_in], the modules of the layer one after the other; of the embedding: [vocab_size, rank] float32
  const AdapterPiece* pieces;
  const float *bias, *magnitude;  // in the order of the packed outputs; null = none. magnitude: of DoRA
  int32_t num_pieces, rank;       // rank: of all modules together; 0 = the adapter leaves the layer as it is
};

// Mirrored in abi.py.
struct Adapter {
  const AdapterLinear* layers;  // [num_layers, 4]: qkv, attention_out, gate_up, down
  AdapterLinear embedding, head;
  int32_t dtype;     // of A and B: 0 float32, 1 bfloat16
  int32_t max_rank;  // the largest of all layers
};

constexpr int HEAD_LAYER = -1;  // beside the indices of Adapter::layers

INLINE const AdapterLinear& adapter_layer(const Adapter& adapter, int layer) {
  return layer == HEAD_LAYER ? adapter.head : adapter.layers[layer];
}

// Rows of a step that have adapters, in blocks of one adapter.
class AdaptedRows {
 public:
  struct Block {
    const Adapter* adapter;
    int first, count;  // rows at(first), ...
  };

  explicit AdaptedRows(std::pmr::memory_resource* memory) : of_row_(memory), order_(memory), blocks_(memory) {}

  // adapter_of(row): null for none
  template <class AdapterOf>
  AdaptedRows(int num_rows, AdapterOf adapter_of, std::pmr::memory_resource* memory)
      : of_row_(num_rows, memory), order_(memory), blocks_(memory) {
    for (int row = 0; row < num_rows; ++row)
      if ((of_row_[row] = adapter_of(row))) order_.push_back(row);
    // stable: rows that follow each other in memory stay together
    std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return of_row_[a] < of_row_[b]; });
    for (int i = 0; i < static_cast<int>(order_.size()); ++i) {
      const Adapter* adapter = of_row_[order_[i]];
      if (blocks_.empty() || blocks_.back().adapter != adapter || blocks_.back().count == BLOCK_ROWS)
        blocks_.push_back({adapter, i, 0});
      ++blocks_.back().count;
    }
  }

  const std::pmr::vector<Block>& blocks() const { return blocks_; }
  int at(int place) const { return order_[place]; }
  const Adapter* of(int row) const { return blocks_.empty() ? nullptr : of_row_[row]; }

  // Return the largest rank in a layer.
  int max_rank(int layer) const {
    int rank = 0;
    for (const Block& block : blocks_) rank = std::max(rank, adapter_layer(*block.adapter, layer).rank);
    return rank;
  }

  // Return the largest rank in any layer.
  int max_rank() const {
    int rank = 0;
    for (const Block& block : blocks_) rank = std::max(rank, block.adapter->max_rank);
    return rank;
  }

 private:
  static constexpr int BLOCK_ROWS = 16;  // few enough for all threads to have some, enough to read A seldom

  std::pmr::vector<const Adapter*> of_row_;
  std::pmr::vector<int> order_;
  std::pmr::vector<Block> blocks_;
};

// ------------------------------------------------------------------------------------------- shrink

constexpr int SHRINK_RANKS = 8;  // rows of A with sums in registers, beside x

// to[r] = x . a[r], for RANKS rows of A.
template <int RANKS, class T, class W>
INLINE void shrink_tile(const T* x, const W* a, int num_in, float* to) {
  Floats sum[RANKS] = {};
  int i = 0;
  for (; i + LANES <= num_in; i += LANES) {
    const Floats some = load(x + i);
#pragma GCC unroll 8
    for (int r = 0; r < RANKS; ++r) sum[r] += some * load(a + r * static_cast<ptrdiff_t>(num_in) + i);
  }
  for (int r = 0; r < RANKS; ++r) {
    float total = sum_lanes(sum[r]);
    for (int k = i; k < num_in; ++k) total += widen(x[k]) * widen(a[r * static_cast<ptrdiff_t>(num_in) + k]);
    to[r] = total;
  }
}

// The same for `ranks` rows from `first` on, at most SHRINK_RANKS.
template <class W, class T>
static void shrink_row(const AdapterLinear& layer, const T* x, int num_in, int first, int ranks, float* to) {
  const W* a = static_cast<const W*>(layer.a) + static_cast<ptrdiff_t>(first) * num_in;
  if (ranks == SHRINK_RANKS) return shrink_tile<SHRINK_RANKS>(x, a, num_in, to);
  int r = 0;
  for (; r + 2 <= ranks; r += 2) shrink_tile<2>(x, a + r * static_cast<ptrdiff_t>(num_in), num_in, to + r);
  if (r < ranks) shrink_tile<1>(x, a + r * static_cast<ptrdiff_t>(num_in), num_in, to + r);
}

template <class T>
INLINE void shrink_row(const Adapter& adapter, const AdapterLinear& layer, const T* x, int num_in, int first, int ranks,
                       float* to) {
  if (adapter.dtype == 0)
    shrink_row<float>(layer, x, num_in, first, ranks, to);
  else
    shrink_row<BFloat16>(layer, x, num_in, first, ranks, to);
}

// ------------------------------------------------------------------------------------------- expand

template <class W>
static void expand_panel(const AdapterLinear& layer, const float* layer_bias, int panel, const float* shrunk,
                         const float* sums, float* to) {
  constexpr int HALF = TILE_COLUMNS / 2, VECTORS = HALF / LANES;
  for (int half = 0; half < 2; ++half) {
    Floats even[VECTORS] = {}, odd[VECTORS] = {};  // two chains of additions: one alone would wait for itself
    for (int i = 0; i < layer.num_pieces; ++i) {
      const AdapterPiece& piece = layer.pieces[i];
      const int offset = 2 * panel + half - piece.first_half;
      if (offset < 0 || offset % piece.step || offset / piece.step >= piece.num_halves) continue;
      const W* b = static_cast<const W*>(piece.b) + static_cast<ptrdiff_t>(offset / piece.step) * piece.rank * HALF;
      const float* mine = shrunk + piece.first_rank;
      int r = 0;
      for (; r + 2 <= piece.rank; r += 2)
        for (int j = 0; j < VECTORS; ++j) {
          even[j] += load(b + r * HALF + j * LANES) * mine[r];
          odd[j] += load(b + (r + 1) * HALF + j * LANES) * mine[r + 1];
        }
      if (r < piece.rank)
        for (int j = 0; j < VECTORS; ++j) even[j] += load(b + r * HALF + j * LANES) * mine[r];
    }
    for (int j = 0; j < VECTORS; ++j) {
      const int column = half * HALF + j * LANES, output = panel * TILE_COLUMNS + column;
      const Floats plain = load(sums + column);
      Floats added = even[j] + odd[j];
      if (layer.bias) added += load(layer.bias + output);
      if (layer.magnitude) {
        // DoRA: plain and added are multiplied, but not the layer's own bias, which is in `plain`
        const Floats factor = load(layer.magnitude + output);
        const Floats product = layer_bias ? plain - load(layer_bias + output) : plain;
        added = added * factor + product * (factor - 1.0f);
      }
      store(to + column, plain + added);
    }
  }
}

// to = the sums of a row's panel and what the adapter makes of the row's shrunk input. layer_bias: in `sums`; null = none
INLINE void expand_panel(const Adapter& adapter, const AdapterLinear& layer, const float* layer_bias, int panel,
                         const float* shrunk, const float* sums, float* to) {
  if (adapter.dtype == 0)
    expand_panel<float>(layer, layer_bias, panel, shrunk, sums, to);
  else
    expand_panel<BFloat16>(layer, layer_bias, panel, shrunk, sums, to);
}
