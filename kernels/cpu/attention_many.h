// Many rows of one sequence over one KV head, as a prefill chunk has them: the vectors run along the rows, the tile is
// widened to float32 once, and the softmax needs no sum across lanes.

#pragma once

#include "attention_rows.h"
#include "product.h"

// Widen a tile's rows lo ... hi - 1 to [KEYS, padded_dim]; zeros for the others.
template <class T>
INLINE void widen_tile(const PagedHead<T>& head, int tile, int lo, int hi, int dim, int padded_dim, float* wide) {
  const T* row[KEYS];
  head.rows(tile + lo, tile + hi, row + lo);
  std::fill(wide, wide + lo * padded_dim, 0.0f);
  for (int i = lo; i < hi; ++i) widen_row(row[i], dim, wide + i * padded_dim);
  std::fill(wide + hi * padded_dim, wide + KEYS * padded_dim, 0.0f);
}

// Turn VECTORS * LANES rows' scores [KEYS, VECTORS * LANES] into weights, and fade what they have in `out`.
template <int VECTORS>
INLINE void weigh_many(float* scores, const int* row_lo, const int* row_hi, bool all_seen, float soft_cap,
                       float* largest, float* total, float* out, int dim) {
  constexpr int WIDTH = VECTORS * LANES;
  for (int j = 0; j < WIDTH; j += LANES) {
    const Ints lo = *reinterpret_cast<const Ints*>(row_lo + j), hi = *reinterpret_cast<const Ints*>(row_hi + j);
    const Floats old_largest = load(largest + j);
    Floats most = old_largest;
    for (int i = 0; i < KEYS; ++i) {
      Floats score = capped(load(scores + i * WIDTH + j), soft_cap);
      if (!all_seen) score = (lo <= i) & (hi > i) ? score : splat(UNSEEN);
      store(scores + i * WIDTH + j, score);
      most = larger(most, score);
    }
    Floats sum = {};
    for (int i = 0; i < KEYS; ++i) {
      Floats weight = exp_nonpositive(load(scores + i * WIDTH + j) - most);
      if (!all_seen) weight = (lo <= i) & (hi > i) ? weight : Floats{};
      store(scores + i * WIDTH + j, weight);
      sum += weight;
    }
    const Floats fade = exp_nonpositive(old_largest - most);
    store(total + j, load(total + j) * fade + sum);
    store(largest + j, most);
    for (int d = 0; d < dim; ++d) store(out + d * WIDTH + j, load(out + d * WIDTH + j) * fade);
  }
}

template <int VECTORS, class T>
static void attend_many(const AttentionRows<T>& work, Scratch& scratch) {
  constexpr int WIDTH = VECTORS * LANES;
  const int dim = work.head_dim, padded_dim = round_up(dim, LANES);
  float* query = scratch.floats(static_cast<size_t>(padded_dim) * (2 * WIDTH + 2 * KEYS + 1) + KEYS * WIDTH);
  float* out = query + padded_dim * WIDTH;      // both [dim, WIDTH]: a row's numbers stand under each other
  float* keys = out + padded_dim * WIDTH;       // [KEYS, padded_dim]
  float* values = keys + KEYS * padded_dim;     // [KEYS, padded_dim]
  float* scores = values + KEYS * padded_dim;   // [KEYS, WIDTH]
  float* row = scores + KEYS * WIDTH;           // [padded_dim]
  std::fill(query, query + 2 * padded_dim * WIDTH, 0.0f);
  for (int r = 0; r < work.num_rows; ++r) {
    widen_row(work.query_row(r), dim, row);
    for (int d = 0; d < dim; ++d) query[d * WIDTH + r] = row[d] * work.scale;
  }
  alignas(64) float largest[WIDTH], total[WIDTH] = {};
  std::fill(largest, largest + WIDTH, UNSEEN);
  const int begin = work.begin(0), end = work.end(work.num_rows - 1);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    int row_lo[WIDTH], row_hi[WIDTH];
    for (int r = 0; r < WIDTH; ++r) {  // the lanes past the last row repeat it
      row_lo[r] = work.begin(std::min(r, work.num_rows - 1)) - tile;
      row_hi[r] = work.end(std::min(r, work.num_rows - 1)) - tile;
    }
    const bool all_seen = row_lo[WIDTH - 1] <= 0 && row_hi[0] >= KEYS;
    widen_tile(work.keys, tile, lo, hi, dim, padded_dim, keys);
    multiply<VECTORS>(KEYS, keys, padded_dim, 1, query, WIDTH, dim, scores, WIDTH, false);
    weigh_many<VECTORS>(scores, row_lo, row_hi, all_seen, work.soft_cap, largest, total, out, dim);
    widen_tile(work.values, tile, lo, hi, dim, padded_dim, values);
    multiply<VECTORS>(dim, values, 1, padded_dim, scores, WIDTH, KEYS, out, WIDTH, true);
  }
  for (int r = 0; r < work.num_rows; ++r) {
    for (int d = 0; d < dim; ++d) row[d] = out[d * WIDTH + r];
    narrow_row(row, dim, 1.0f / total[r], work.out_row(r));
  }
}

// As wide as the rows need.
template <class T>
static void attend_many(const AttentionRows<T>& work, Scratch& scratch) {
  const int vectors = (work.num_rows + LANES - 1) / LANES;
  if (vectors == 1) return attend_many<1>(work, scratch);
  if (vectors == 2) return attend_many<2>(work, scratch);
  return attend_many<TILE_VECTORS>(work, scratch);
}
