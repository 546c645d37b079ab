// Prefill attention: many rows of one sequence and one KV head. Vectors run along the rows, so that the softmax needs no
// sum across lanes. Rows are computed in strips of TILE_COLUMNS; the strips of a work item share the tiles of keys and
// values, which are read from the cache and widened to float32 once for all of them.

#pragma once

#include <type_traits>
#include <vector>

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
      if (!work.sinks) continue;
      largest[r] = work.sink(std::min(r, work.num_rows - 1));  // as if a key without a value had been seen
      total[r] = 1.0f;
    }
  }

  // Return whether every row sees every key of a tile.
  bool all_see(int tile) const { return begin[WIDTH - 1] <= tile && end[0] >= tile + KEYS; }
};

// Replace scores [KEYS, VECTORS * LANES] by softmax weights, and rescale the partial sums in `out`. Scores of masked
// keys may have any value.
template <int VECTORS, int LANES_OF_STATE>
INLINE void softmax_rows(float* scores, int tile, float scale, float soft_cap, RowState<LANES_OF_STATE>& rows, float* out,
                         int dim) {
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

// At most TILE_COLUMNS rows of a work item, and what they have come to so far.
template <class T>
struct Strip {
  AttentionRows<T> work;
  RowState<TILE_COLUMNS> rows;
  float *query, *out;  // [padded_dim, TILE_COLUMNS], one column per row

  Strip(const AttentionRows<T>& work, float* query, float* out) : work(work), rows(work), query(query), out(out) {}
  int begin() const { return work.begin(0); }
  int end() const { return work.end(work.num_rows - 1); }
  // Return whether a row sees a key of a tile.
  bool sees(int tile) const { return tile < end() && begin() < tile + KEYS; }
};

// Add a tile to a strip with at most VECTORS * LANES rows. keys, values: [KEYS, padded_dim]; scores: scratch.
template <int VECTORS, class T>
static void attend_tile(Strip<T>& strip, int tile, const float* keys, const float* values, int padded_dim, float* scores) {
  const int dim = strip.work.head_dim;
  multiply<VECTORS>(KEYS, keys, padded_dim, 1, strip.query, VECTORS * LANES, dim, scores, VECTORS * LANES, false);
  softmax_rows<VECTORS>(scores, tile, 1.0f, strip.work.soft_cap, strip.rows, strip.out, dim);
  multiply<VECTORS>(dim, values, 1, padded_dim, scores, VECTORS * LANES, KEYS, strip.out, VECTORS * LANES, true);
}

// Call `use` with the least number of vectors, as a compile-time constant, that holds some rows of a strip.
template <class Use>
INLINE void with_vectors(int num_rows, Use use) {
  if (num_rows <= LANES) return use(std::integral_constant<int, 1>{});
  if (num_rows <= 2 * LANES) return use(std::integral_constant<int, 2>{});
  use(std::integral_constant<int, TILE_VECTORS>{});
}

// Rows of a strip of its own width, read and written: column r of [dim, width] is row r.
template <class T>
static void read_queries(const Strip<T>& strip, int width, float* row) {
  for (int r = 0; r < strip.work.num_rows; ++r) {
    widen_row(strip.work.query_row(r), strip.work.head_dim, row);
    for (int d = 0; d < strip.work.head_dim; ++d) strip.query[d * width + r] = row[d] * strip.work.scale;
  }
}

template <class T>
static void write_outputs(const Strip<T>& strip, int width, float* row) {
  for (int r = 0; r < strip.work.num_rows; ++r) {
    for (int d = 0; d < strip.work.head_dim; ++d) row[d] = strip.out[d * width + r];
    narrow_row(row, strip.work.head_dim, 1.0f / strip.rows.total[r], strip.work.out_row(r));
  }
}

template <class T>
static void attend_strips(const AttentionRows<T>& work, Scratch& scratch) {
  const int dim = work.head_dim, padded_dim = round_up(dim, LANES);
  const int num_strips = (work.num_rows + TILE_COLUMNS - 1) / TILE_COLUMNS, strip_size = padded_dim * TILE_COLUMNS;
  float* keys = scratch.floats(static_cast<size_t>(2) * num_strips * strip_size + (2 * KEYS + 1) * padded_dim +
                               KEYS * TILE_COLUMNS);
  float* values = keys + KEYS * padded_dim;
  float* scores = values + KEYS * padded_dim;
  float* row = scores + KEYS * TILE_COLUMNS;
  float* columns = row + padded_dim;  // [num_strips, query and out, padded_dim, TILE_COLUMNS]
  std::fill(columns, columns + 2 * num_strips * strip_size, 0.0f);
  static thread_local std::vector<Strip<T>> strips;
  strips.clear();
  strips.reserve(num_strips);
  for (int first = 0; first < work.num_rows; first += TILE_COLUMNS, columns += 2 * strip_size) {
    strips.emplace_back(work.part(first, std::min(TILE_COLUMNS, work.num_rows - first)), columns, columns + strip_size);
    with_vectors(strips.back().work.num_rows, [&](auto vectors) { read_queries(strips.back(), vectors * LANES, row); });
  }
  const int begin = work.begin(0), end = work.end(work.num_rows - 1);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    widen_tile(work.keys, tile, lo, hi, dim, padded_dim, keys);
    widen_tile(work.values, tile, lo, hi, dim, padded_dim, values);
    for (Strip<T>& strip : strips)
      if (strip.sees(tile))
        with_vectors(strip.work.num_rows,
                     [&](auto vectors) { attend_tile<vectors>(strip, tile, keys, values, padded_dim, scores); });
  }
  for (const Strip<T>& strip : strips)
    with_vectors(strip.work.num_rows, [&](auto vectors) { write_outputs(strip, vectors * LANES, row); });
}
