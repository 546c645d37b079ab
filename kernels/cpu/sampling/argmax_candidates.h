// Argmax of a linear layer without computing all outputs: an int8 copy of the weights, a quarter of the bytes of
// float32, gives estimates, and only the outputs that can be the largest are computed from the weights. The result has
// the same bits as that of the full layer.
//
// The error of an estimate is bounded (Cauchy-Schwarz) by the L2 norm of the output's rounding errors times that of the
// row (`ArgmaxFilter::bounds`; see _bounds in packing.py). An output is excluded if its estimate plus bound is below
// another output's estimate minus bound.

#pragma once

#include <algorithm>
#include <limits>

#include "gemm/int8.h"
#include "scratch.h"

// Mirrored in abi.py.
struct ArgmaxFilter {
  Linear int8;          // no bias; null weights = no filter
  const float* bounds;  // [panels * TILE_COLUMNS]: maximum error of an estimate for a row of L2 norm 1
  int32_t max_rows;     // a step of more rows computes all outputs: that is faster on this machine
};

// Rows quantised twice: row 2 i is the int8 row, row 2 i + 1 the int8 copy of its rounding errors. The error of the
// activations is then negligible beside that of the weights.
struct EstimationRows {
  Int8Rows int8;  // [2 * rows]
  float* lengths;  // [rows]: L2 norms

  // Return whether the bounds are valid for all rows: not for NaN, nor for very small or large rows.
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
  const float step = quantise(from, count, ZERO_POINT, numbers);
  for (int i = 0; i < count; ++i) {
    const float left = widen(from[i]) - step * static_cast<float>(static_cast<int8_t>(numbers[i] - ZERO_POINT));
    rest[i] = std::fabs(left) < 1e-6f * step ? 0.0f : left;  // else the scale of the rest would become too small
  }
  to.int8.scales[2 * row] = step;
  to.int8.scales[2 * row + 1] = quantise(rest, count, ZERO_POINT, numbers + count);
  to.lengths[row] = 1.001f * length_of(from, count);
}

// Outputs seen by one thread that can be a row's argmax, in vectors of LANES.
class ArgmaxCandidates {
 public:
  ArgmaxCandidates() {}  // user-provided, so that value initialisation does not clear the array

  // Update with the estimates of a panel's outputs from `first` on; padding must be minus infinity.
  template <class T>
  void update(const float* estimates, const float* bounds, float length, int first) {
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

  // Return a lower bound of the row's maximum, from the outputs seen by this thread.
  float floor() const { return floor_; }
  // Return whether candidates were lost because there were more than CAPACITY.
  bool has_overflowed() const { return has_overflowed_; }

  // Call use(first) for each vector with an upper bound of at least `floor`.
  template <class Use>
  void for_each(float floor, Use use) const {
    for (int i = 0; i < count_; ++i)
      if (candidates_[i].upper >= floor) use(candidates_[i].first);
  }

 private:
  static constexpr int CAPACITY = 256;
  struct Candidate {
    float upper;
    int32_t first;
  };

  // Return a lower bound of `lower` after it is rounded to T.
  template <class T>
  static float floor_of(float lower) {
    return sizeof(T) == sizeof(float) ? lower : lower - std::fabs(lower) / 128.0f;
  }

  void add(float upper, int first) {
    if (upper < floor_) return;
    if (count_ == CAPACITY) {
      auto is_excluded = [&](const Candidate& candidate) { return candidate.upper < floor_; };
      count_ = static_cast<int>(std::remove_if(candidates_, candidates_ + count_, is_excluded) - candidates_);
      has_overflowed_ |= count_ > CAPACITY / 2;
      if (has_overflowed_) count_ = 0;
    }
    candidates_[count_++] = {upper, first};
  }

  float floor_ = -std::numeric_limits<float>::infinity();
  int count_ = 0;
  bool has_overflowed_ = false;
  Candidate candidates_[CAPACITY];
};

// Estimate one panel for all rows.
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
    lists[row / 2].update<T>(estimates, filter.bounds + first, rows.lengths[row / 2], first);
  });
}

// Return the address of the weights of an output and the adjacent ones.
template <class T>
INLINE const T* packed_weights(const Linear& linear, int output) {
  return static_cast<const T*>(linear.weights) +
         static_cast<ptrdiff_t>(output / TILE_COLUMNS) * TILE_COLUMNS * linear.num_in +
         packed_place<T>(linear.num_in, 0, output % TILE_COLUMNS);
}

// Compute LANES outputs from `first` on, summed in the same order as multiply_panel for few rows.
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
