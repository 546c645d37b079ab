// Prefill attention: many rows of one sequence and one KV head. Vectors run along the rows, a tile of keys is widened
// to float32 once, and the softmax needs no sum across lanes.

#pragma once

#include "attention/rows.h"
#include "gemm/microkernel.h"

// Widen the keys or values [lo, hi) of a tile to [KEYS, padded_dim]; the others are zeros.
template <class T>
INLINE void widen_tile(const PagedHead<T>& head, int tile, int lo, int hi, int dim, int padded_dim, float* wide) {
  const T* row[KEYS];
  head.rows(tile + lo, tile + hi, row + lo);
  std::fill(wide, wide + lo * padded_dim, 0.0f);
  for (int i = lo; i < hi; ++i) widen_row(row[i], dim, wide + i * padded_dim);
  std::fill(wide + hi * padded_dim, wide + KEYS * padded_dim, 0.0f);
}

// Visible keys and online-softmax state of an item's rows. Unused lanes repeat the last row.
template <int WIDTH>
struct RowState {
  alignas(64) int begin[WIDTH], end[WIDTH];  // visible keys
  alignas(64) float largest[WIDTH], total[WIDTH] = {};

  template <class T>
  explicit RowState(const AttentionRows<T>& work) {
    std::fill(largest, largest + WIDTH, MASKED);
    for (int r = 0; r < WIDTH; ++r) {
      begin[r] = work.begin(std::min(r, work.num_rows - 1));
      end[r] = work.end(std::min(r, work.num_rows - 1));
    }
  }

  // Return whether every row sees every key of a tile.
  bool all_see(int tile) const { return begin[WIDTH - 1] <= tile && end[0] >= tile + KEYS; }
};

// Replace scores [KEYS, VECTORS * LANES] by softmax weights, and rescale the partial sums in `out`. Scores of masked
// keys may have any value.
template <int VECTORS>
INLINE void softmax_rows(float* scores, int tile, float scale, float soft_cap, RowState<VECTORS * LANES>& rows,
                       float* out, int dim) {
  constexpr int WIDTH = VECTORS * LANES;
  const bool all_seen = rows.all_see(tile);
  for (int j = 0; j < WIDTH; j += LANES) {
    const Ints lo = *reinterpret_cast<const Ints*>(rows.begin + j) - tile;
    const Ints hi = *reinterpret_cast<const Ints*>(rows.end + j) - tile;
    const Floats old_largest = load(rows.largest + j);
    Floats new_largest = old_largest;
    for (int i = 0; i < KEYS; ++i) {
      Floats score = capped(load(scores + i * WIDTH + j) * scale, soft_cap);
      if (!all_seen) score = (lo <= i) & (hi > i) ? score : splat(MASKED);
      store(scores + i * WIDTH + j, score);
      new_largest = larger(new_largest, score);
    }
    Floats sum = {};
    for (int i = 0; i < KEYS; ++i) {
      Floats weight = exp_nonpositive(load(scores + i * WIDTH + j) - new_largest);
      if (!all_seen) weight = (lo <= i) & (hi > i) ? weight : Floats{};
      store(scores + i * WIDTH + j, weight);
      sum += weight;
    }
    const Floats rescale = exp_nonpositive(old_largest - new_largest);
    store(rows.total + j, load(rows.total + j) * rescale + sum);
    store(rows.largest + j, new_largest);
    for (int d = 0; d < dim; ++d) store(out + d * WIDTH + j, load(out + d * WIDTH + j) * rescale);
  }
}

template <int VECTORS, class T>
static void attend_prefill(const AttentionRows<T>& work, Scratch& scratch) {
  constexpr int WIDTH = VECTORS * LANES;
  const int dim = work.head_dim, padded_dim = round_up(dim, LANES);
  float* query = scratch.floats(static_cast<size_t>(padded_dim) * (2 * WIDTH + 2 * KEYS + 1) + KEYS * WIDTH);
  float* out = query + padded_dim * WIDTH;      // query and out: [dim, WIDTH], one column per row
  float* keys = out + padded_dim * WIDTH;       // [KEYS, padded_dim]
  float* values = keys + KEYS * padded_dim;     // [KEYS, padded_dim]
  float* scores = values + KEYS * padded_dim;   // [KEYS, WIDTH]
  float* row = scores + KEYS * WIDTH;           // [padded_dim]
  std::fill(query, query + 2 * padded_dim * WIDTH, 0.0f);
  for (int r = 0; r < work.num_rows; ++r) {
    widen_row(work.query_row(r), dim, row);
    for (int d = 0; d < dim; ++d) query[d * WIDTH + r] = row[d] * work.scale;
  }
  RowState<WIDTH> rows(work);
  const int begin = work.begin(0), end = work.end(work.num_rows - 1);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    widen_tile(work.keys, tile, lo, hi, dim, padded_dim, keys);
    multiply<VECTORS>(KEYS, keys, padded_dim, 1, query, WIDTH, dim, scores, WIDTH, false);
    softmax_rows<VECTORS>(scores, tile, 1.0f, work.soft_cap, rows, out, dim);
    widen_tile(work.values, tile, lo, hi, dim, padded_dim, values);
    multiply<VECTORS>(dim, values, 1, padded_dim, scores, WIDTH, KEYS, out, WIDTH, true);
  }
  for (int r = 0; r < work.num_rows; ++r) {
    for (int d = 0; d < dim; ++d) row[d] = out[d * WIDTH + r];
    narrow_row(row, dim, 1.0f / rows.total[r], work.out_row(r));
  }
}
