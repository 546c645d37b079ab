// Row operations between the linear layers, in float32: norms and rotary position embedding.

#pragma once

#include "simd.h"

INLINE float sum_of_squares(const float* x, int count) {
  Floats sum = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) sum += load(x + i) * load(x + i);
  float total = sum_lanes(sum);
  for (; i < count; ++i) total += x[i] * x[i];
  return total;
}

template <class To>
INLINE void scale_row(const float* from, const float* weight, float factor, int count, To* to) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i) * factor * load(weight + i));
  for (; i < count; ++i) narrow(from[i] * factor * weight[i], to + i);
}

// Layer norm of a row.
template <class To>
INLINE void center_row(const float* from, const float* weight, const float* bias, float eps, int count, To* to) {
  Floats sum = {}, squares = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) sum += load(from + i);
  float total = sum_lanes(sum);
  for (; i < count; ++i) total += from[i];
  const float mean = total / count;
  for (i = 0; i + LANES <= count; i += LANES) {
    const Floats distance = load(from + i) - mean;
    squares += distance * distance;
  }
  float total_squares = sum_lanes(squares);
  for (; i < count; ++i) total_squares += (from[i] - mean) * (from[i] - mean);
  const float factor = 1.0f / std::sqrt(total_squares / count + eps);
  for (i = 0; i + LANES <= count; i += LANES)
    store(to + i, (load(from + i) - mean) * factor * load(weight + i) + load(bias + i));
  for (; i < count; ++i) narrow((from[i] - mean) * factor * weight[i] + bias[i], to + i);
}

// Turn x[2 i] and x[2 i + 1] together.
INLINE void rotate_pairs(float* x, const float* cos, const float* sin, int half) {
  for (int i = 0; i < half; ++i) {
    const float first = x[2 * i], second = x[2 * i + 1];
    x[2 * i] = first * cos[i] - second * sin[i];
    x[2 * i + 1] = second * cos[i] + first * sin[i];
  }
}

// Turn x[i] and x[i + half] together.
INLINE void rotate(float* x, const float* cos, const float* sin, int half) {
  if (half < LANES) {
    for (int i = 0; i < half; ++i) {
      const float first = x[i], second = x[i + half];
      x[i] = first * cos[i] - second * sin[i];
      x[i + half] = second * cos[i] + first * sin[i];
    }
    return;
  }
  auto rotated = [&](int i) {
    const Floats first = load(x + i), second = load(x + half + i), c = load(cos + i), s = load(sin + i);
    return std::make_pair(first * c - second * s, second * c + first * s);
  };
  const int last = half - LANES;  // the last vectors may overlap the ones before: computed first, while x is unchanged
  const auto end = rotated(last);
  for (int i = 0; i < last; i += LANES) {
    const auto next = rotated(i);
    store(x + i, next.first);
    store(x + half + i, next.second);
  }
  store(x + last, end.first);
  store(x + half + last, end.second);
}
