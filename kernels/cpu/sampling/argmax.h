// Argmax of numbers that arrive in parts and in any order. The first of equal numbers wins, and NaN is larger than
// everything, as in torch.max.

#pragma once

#include <cmath>
#include <limits>

#include "simd.h"

struct Argmax {
  float value = -std::numeric_limits<float>::infinity();
  int64_t index = std::numeric_limits<int64_t>::max();

  bool is_nan() const { return !(value == value); }

  // Merge with the argmax of other indices.
  void merge(const Argmax& other) {
    const bool is_as_large = is_nan() ? other.is_nan() : other.value == value;
    const bool is_larger = !is_nan() && (other.is_nan() || other.value > value);
    if (is_larger || (is_as_large && other.index < index)) *this = other;
  }

  // Update with numbers at indices [first, first + count).
  template <class T>
  void update(const T* numbers, int64_t count, int64_t first) {
    Argmax found;
    Floats most = splat(found.value);
    bool ordered = true;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
      const Floats x = load(numbers + i);
      most = larger(most, x);
      ordered &= all_ordered(x);
    }
    found.value = largest_lane(most);
    for (; i < count; ++i) {
      const float x = widen(numbers[i]);
      ordered &= x == x;
      if (x > found.value) found.value = x;
    }
    if (!ordered) found.value = std::numeric_limits<float>::quiet_NaN();
    if (count == 0 || found.value < value) return;
    for (i = 0; i < count; ++i) {
      const float x = widen(numbers[i]);
      if (ordered ? x == found.value : !(x == x)) break;
    }
    found.index = first + i;
    merge(found);
  }

 private:
  static bool all_ordered(Floats x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(x), _CMP_UNORD_Q) == 0;
#elif defined(__aarch64__)
    return vminvq_u32(reinterpret_cast<uint32x4_t>(x == x)) != 0;
#else
    const Ints same = x == x;
    int32_t all = -1;
    for (int lane = 0; lane < LANES; ++lane) all &= same[lane];
    return all != 0;
#endif
  }
};
