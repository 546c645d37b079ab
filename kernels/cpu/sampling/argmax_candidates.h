// Argmax of a linear layer without computing all outputs: an int8 copy of the weights, a quarter of the bytes of
// float32, gives estimates, and only the outputs that can be the largest are computed from the weights. The result has
// the same bits as that of the full layer.
//
// The error of an estimate is bounded (Cauchy-Schwarz) by the L2 norm of the output's rounding errors times that of the
// row (`ArgmaxFilter::bounds`; see _bounds in packing.py). An output is excluded if its estimate plus bound is below
// another output's estimate minus bound.
//
// A row is quantised, and its rounding errors once more. The first half of an estimate, without the errors, excludes
// nearly all panels already: what it lacks is at most the L2 norm of the errors times that of the output's bytes.

#pragma once

#include <algorithm>
#include <limits>

#include "gemm/int8.h"
#include "scratch.h"

// Mirrored in abi.py.
struct ArgmaxFilter {
  Linear int8;          // no bias; null weights = no filter
  // [panels, 2, TILE_COLUMNS]: maximum error of an estimate for a row of L2 norm 1, and the L2 norm of the bytes
  const float* bounds;
  int32_t max_rows;     // a step of more rows computes all outputs: that is faster on this machine
};

// Rows quantised twice: `int8`, and the int8 copy of its rounding errors, `rest`. The error of the activations is then
// negligible beside that of the weights.
struct EstimationRows {
  Int8Rows int8, rest;
  float *lengths, *rest_lengths;  // [rows]: L2 norms of the rows, and of their rounding errors

  // Return rows in memory of 4 * `count` floats and of 2 * `count` * `num_in` bytes.
  static EstimationRows in(float* memory, uint8_t* numbers, size_t count, size_t num_in) {
    EstimationRows rows{};
    rows.int8.numbers = numbers, rows.int8.scales = memory;
    rows.rest.numbers = numbers + count * num_in, rows.rest.scales = memory + count;
    rows.lengths = memory + 2 * count, rows.rest_lengths = memory + 3 * count;
    return rows;
  }

  // Return the rounding errors of one row.
  Int8Rows rest_of(int row, int num_in) const {
    Int8Rows one{};
    one.numbers = rest.numbers + static_cast<ptrdiff_t>(row) * num_in, one.scales = rest.scales + row;
    return one;
  }

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
  const ptrdiff_t begin = static_cast<ptrdiff_t>(row) * count;
  uint8_t* numbers = to.int8.numbers + begin;
  const float step = quantise(from, count, ZERO_POINT, numbers);
  for (int i = 0; i < count; ++i) {
    const float left = widen(from[i]) - step * static_cast<float>(static_cast<int8_t>(numbers[i] - ZERO_POINT));
    rest[i] = std::fabs(left) < 1e-6f * step ? 0.0f : left;  // else the scale of the rest would become too small
  }
  to.int8.scales[row] = step;
  to.rest.scales[row] = quantise(rest, count, ZERO_POINT, to.rest.numbers + begin);
  to.lengths[row] = 1.001f * length_of(from, count);
  to.rest_lengths[row] = 1.001f * length_of(rest, count);
}

// Outputs seen by one thread that can be a row's argmax, in vectors of LANES.
class ArgmaxCandidates {
 public:
  ArgmaxCandidates() {}  // user-provided, so that value initialisation does not clear the array

  // Return whether an output of a panel can be a candidate, by the first halves of the estimates.
  bool can_grow(const float* estimates, const float* bounds, float length, float rest_length) const {
    Floats most = splat(-std::numeric_limits<float>::infinity());
    for (int j = 0; j < TILE_COLUMNS; j += LANES)
      most = larger(load(estimates + j) + load(bounds + j) * length + load(bounds + TILE_COLUMNS + j) * rest_length,
                    most);
    return largest_lane(most) >= floor_;
  }

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

// Add what the rounding errors of a row contribute to the first halves of its estimates, and update its candidates.
template <class T>
__attribute__((noinline)) static void estimate_rest(const ArgmaxFilter& filter, int panel, const EstimationRows& rows,
                                                    int row, const float* halves, ArgmaxCandidates& list) {
  const int first = panel * TILE_COLUMNS;
  multiply_panel(filter.int8, panel, rows.rest_of(row, filter.int8.num_in), 1, [&](int, const float* rest) {
    alignas(64) float estimates[TILE_COLUMNS];
    for (int j = 0; j < TILE_COLUMNS; j += LANES) store(estimates + j, load(halves + j) + load(rest + j));
    for (int j = std::max(filter.int8.num_out - first, 0); j < TILE_COLUMNS; ++j)
      estimates[j] = -std::numeric_limits<float>::infinity();
    list.update<T>(estimates, filter.bounds + 2 * first, rows.lengths[row], first);
  });
}

// Estimate one panel for all rows.
template <class T>
static void estimate_panel(const ArgmaxFilter& filter, int panel, const EstimationRows& rows, int num_rows,
                           ArgmaxCandidates* lists) {
  const float* bounds = filter.bounds + 2 * panel * TILE_COLUMNS;
  multiply_panel(filter.int8, panel, rows.int8, num_rows, [&](int row, const float* halves) {
    if (lists[row].can_grow(halves, bounds, rows.lengths[row], rows.rest_lengths[row]))
      estimate_rest<T>(filter, panel, rows, row, halves, lists[row]);
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
