// Argmax of a linear layer without computing all its outputs: candidates are found from an int8 copy of the weights, a
// quarter of float32, and only those are computed from the weights themselves. The result is the layer's own, to the
// last bit.
//
// An estimate is wrong by no more than a bound that was computed with the bytes: by Cauchy and Schwarz the length of
// what rounding took from the weights of an output times that of the row (`ArgmaxFilter::bounds`; _bounds in packing.py
// has the parts). An output whose estimate plus bound is below another's estimate minus bound is not the largest.

#pragma once

#include <algorithm>
#include <limits>

#include "gemm/int8.h"
#include "scratch.h"

// Mirrored in abi.py.
struct ArgmaxFilter {
  Linear int8;          // without bias; weights null = there is no filter
  const float* bounds;  // [panels * TILE_COLUMNS]: how far off an estimate can be, for a row of length 1
};

// Rows as bytes, twice: every other one is what the one before has left of the row. So rounding adds next to nothing to
// what is lost in the weights.
struct EstimationRows {
  Int8Rows int8;  // [2 * rows]
  float* lengths;  // [rows]

  // Whether bounds hold for all of them: numbers that are too large, too small or none at all have none.
  bool all_have_bounds(int rows) const {
    return std::all_of(lengths, lengths + rows, [](float length) { return length > 1e-15f && length < 1e15f; });
  }
};

template <class T>
static float length_of(const T* row, int count) {
  Floats squares = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) squares += load(row + i) * load(row + i);
  float sum = sum_lanes(squares);
  for (; i < count; ++i) sum += widen(row[i]) * widen(row[i]);
  return std::sqrt(sum);
}

template <class T>
static void quantise_twice(const T* from, int count, int row, const EstimationRows& to) {
  static thread_local Scratch scratch;
  float* rest = scratch.floats(count);
  uint8_t* numbers = to.int8.numbers + 2 * static_cast<ptrdiff_t>(row) * count;
  const float step = quantise(from, count, 128, numbers);
  for (int i = 0; i < count; ++i) {
    const float left = widen(from[i]) - step * static_cast<float>(numbers[i] - 128);
    rest[i] = std::fabs(left) < 1e-6f * step ? 0.0f : left;  // lest the steps of the rest become too small
  }
  to.int8.scales[2 * row] = step;
  to.int8.scales[2 * row + 1] = quantise(rest, count, 128, numbers + count);
  to.lengths[row] = 1.001f * length_of(from, count);
}

// The outputs that one thread has seen and that can be a row's largest, in vectors of LANES.
class ArgmaxCandidates {
 public:
  ArgmaxCandidates() {}  // without it the places would be cleared

  // A panel's outputs from `first` on; those past the last are estimated as minus infinity.
  template <class T>
  void consider(const float* estimates, const float* bounds, float length, int first) {
    Floats upper[TILE_VECTORS], most = splat(-std::numeric_limits<float>::infinity());
    for (int j = 0; j < TILE_VECTORS; ++j) {
      upper[j] = load(estimates + j * LANES) + load(bounds + j * LANES) * length;
      most = larger(upper[j], most);
    }
    if (largest_lane(most) < floor_) return;
    for (int j = 0; j < TILE_VECTORS; ++j) {
      const Floats lower = load(estimates + j * LANES) - load(bounds + j * LANES) * length;
      floor_ = std::max(floor_, floor_of<T>(largest_lane(lower)));
    }
    for (int j = 0; j < TILE_VECTORS; ++j) add(largest_lane(upper[j]), first + j * LANES);
  }

  // What the largest is not below, as far as this thread has seen.
  float floor() const { return floor_; }
  // Whether there were more than it has room for; then it has lost some.
  bool is_overfull() const { return is_overfull_; }

  // Calls use(first) for the vectors in which there can be something from `floor` on.
  template <class Use>
  void each(float floor, Use use) const {
    for (int i = 0; i < count_; ++i)
      if (places_[i].upper >= floor) use(places_[i].first);
  }

 private:
  static constexpr int CAPACITY = 256;
  struct Place {
    float upper;
    int32_t first;
  };

  // The least that is stored as T as something no smaller than `lower`.
  template <class T>
  static float floor_of(float lower) {
    return sizeof(T) == sizeof(float) ? lower : lower - std::fabs(lower) / 128.0f;
  }

  void add(float upper, int first) {
    if (upper < floor_) return;
    if (count_ == CAPACITY) {
      auto is_behind = [&](const Place& place) { return place.upper < floor_; };
      count_ = static_cast<int>(std::remove_if(places_, places_ + count_, is_behind) - places_);
      is_overfull_ |= count_ > CAPACITY / 2;
      if (is_overfull_) count_ = 0;
    }
    places_[count_++] = {upper, first};
  }

  float floor_ = -std::numeric_limits<float>::infinity();
  int count_ = 0;
  bool is_overfull_ = false;
  Place places_[CAPACITY];
};

// Estimates of one panel for all rows.
template <class T>
static void estimate_panel(const ArgmaxFilter& filter, int panel, const EstimationRows& rows, int num_rows,
                           ArgmaxCandidates* lists) {
  const int first = panel * TILE_COLUMNS;
  alignas(64) float estimates[TILE_COLUMNS];
  multiply_panel(filter.int8, panel, rows.int8, 2 * num_rows, [&](int row, const float* part) {
    if (row % 2 == 0) {
      std::copy(part, part + TILE_COLUMNS, estimates);
      return;
    }
    for (int j = 0; j < TILE_COLUMNS; j += LANES) store(estimates + j, load(estimates + j) + load(part + j));
    for (int j = filter.int8.num_out - first; j < TILE_COLUMNS; ++j)
      estimates[j] = -std::numeric_limits<float>::infinity();
    lists[row / 2].consider<T>(estimates, filter.bounds + first, rows.lengths[row / 2], first);
  });
}

// The weights of an output, and of those beside it.
template <class T>
INLINE const T* packed_weights(const Linear& linear, int output) {
  return static_cast<const T*>(linear.weights) +
         static_cast<ptrdiff_t>(output / TILE_COLUMNS) * TILE_COLUMNS * linear.num_in +
         packed_place<T>(linear.num_in, 0, output % TILE_COLUMNS);
}

// LANES results of a layer from output `first` on, added up as panel_product does it for few rows.
INLINE Floats multiply_lanes(const Linear& linear, const float* x, int first) {
  Floats sums;
  const float* weights = packed_weights<float>(linear, first);
  multiply_tile<1, 1>(x, 0, 1, weights, TILE_COLUMNS, linear.num_in, reinterpret_cast<float*>(&sums), 0, false);
  return sums;
}

INLINE Floats multiply_lanes(const Linear& linear, const BFloat16* x, int first) {
  const BFloat16* weights = packed_weights<BFloat16>(linear, first);
  Floats sums = {};
  for (int k = 0; k < linear.num_in; k += 2)
    sums = dot_add(sums, *reinterpret_cast<const Words*>(weights + k * LANES), Words{} + load_word(x + k));
  return sums;
}
