// The dot products of gemm/byte_dot.h, lane by lane, for test_cpu_byte_dot.py.

#include "gemm/byte_dot.h"

EXPORT int32_t lanes() { return LANES; }

// sums [LANES] of x [4] times each of weights [LANES, 4]
EXPORT void dot_signed(const int8_t* x, const int8_t* weights, int32_t* sums) {
  uint8_t stored[4];
  for (int i = 0; i < 4; ++i) stored[i] = static_cast<uint8_t>(x[i] + ZERO_POINT);
  const Ints sum =
      dot_bytes_and_weights(Ints{}, Words{} + load_word(stored), *reinterpret_cast<const Words*>(weights));
  for (int lane = 0; lane < LANES; ++lane) {
    sums[lane] = sum[lane];
    for (int i = 0; i < 4; ++i) sums[lane] -= ZERO_POINT * weights[4 * lane + i];
  }
}

// The same with the signs of the weights apart, where AVX2 takes them so.
EXPORT void dot_signs_apart(const int8_t* x, const int8_t* weights, int32_t* sums) {
#if defined(__AVX2__)
  const SizesAndSigns parts = sizes_and_signs(*reinterpret_cast<const Words*>(weights));
  Ints negatives = {}, sum = {};
  add_dots(negatives, {parts.sizes, Words{}}, parts.signs);
  add_dots(sum, parts, Words{} + load_word(x));
  for (int lane = 0; lane < LANES; ++lane) sums[lane] = sum[lane] - negatives[lane];
#else
  dot_signed(x, weights, sums);
#endif
}

// sums [LANES] of `words` times x [4] times each of nibbles [LANES, 4]
EXPORT void dot_nibbles(const int8_t* x, const uint8_t* nibbles, int32_t words, int32_t* sums) {
  NibbleSums sum;
  for (int word = 0; word < words; ++word)
    sum.add(*reinterpret_cast<const Words*>(nibbles), Words{} + load_word(x));
  const Ints total = sum.total();
  for (int lane = 0; lane < LANES; ++lane) sums[lane] = total[lane];
}
