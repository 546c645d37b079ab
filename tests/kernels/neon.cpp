// Checks of what the kernels do with 64-bit Arm's own instructions, against plain C++, for test_cpu_neon.py: a line for
// each failure, and their number as the exit status.

#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "gemm/block_format.h"
#include "gemm/int8.h"

namespace {

int failures = 0;

void check(bool holds, const char* what, long long where) {
  if (holds) return;
  if (++failures <= 20) std::printf("%s: wrong at %lld\n", what, where);
}

// IEEE 754 half precision, by its definition.
double value_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double sign = bits & 0x8000 ? -1.0 : 1.0;
  if (exponent == 31) return fraction ? std::nan("") : sign * INFINITY;
  return sign * (exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24));
}

void check_halves() {
  for (int first = 0; first < 65536; first += LANES) {
    Float16 stored[LANES], again[LANES];
    for (int lane = 0; lane < LANES; ++lane) stored[lane].bits = static_cast<uint16_t>(first + lane);
    const Floats wide = load(stored);
    store(again, wide);
    for (int lane = 0; lane < LANES; ++lane) {
      const double right = value_of_half(stored[lane].bits);
      check(std::isnan(right) ? std::isnan(wide[lane]) : wide[lane] == right, "a half is widened", first + lane);
      check(std::isnan(right) || again[lane].bits == stored[lane].bits, "a half comes back", first + lane);
    }
  }
  // Between two neighbours the nearer one is taken, and of two that are as near the even one; beyond the largest, infinity.
  for (int low = 0; low < 0x7bff; ++low) {
    const double a = value_of_half(static_cast<uint16_t>(low)), b = value_of_half(static_cast<uint16_t>(low + 1));
    const float middle = static_cast<float>((a + b) / 2);
    const Floats between = {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, INFINITY), -middle};
    Float16 rounded[LANES];
    store(rounded, between);
    const int even = low + (low & 1);
    check(rounded[0].bits == low && rounded[1].bits == even && rounded[2].bits == low + 1 &&
              rounded[3].bits == (even | 0x8000),
          "a float is rounded to half", low);
  }
  Float16 large[LANES];
  store(large, Floats{65519.0f, 65520.0f, -INFINITY, NAN});
  check(large[0].bits == 0x7bff && large[1].bits == 0x7c00 && large[2].bits == 0xfc00 &&
            std::isnan(value_of_half(large[3].bits)),
        "large floats are rounded to half", 0);
}

// Every byte of an input times every byte of a weight, in each of the four places of a word, beside random ones.
void check_dot_products(std::mt19937& random) {
  for (int x = -127; x < 128; ++x)
    for (int weight = -128; weight < 128; weight += LANES) {
      int8_t inputs[4 * LANES], weights[4 * LANES];
      int32_t before[LANES];
      for (int i = 0; i < 4 * LANES; ++i) {
        inputs[i] = static_cast<int8_t>(static_cast<int>(random() % 255) - 127);
        weights[i] = static_cast<int8_t>(random());
      }
      for (int lane = 0; lane < LANES; ++lane) {
        const int place = 4 * lane + (x + lane & 3);
        inputs[place] = static_cast<int8_t>(x), weights[place] = static_cast<int8_t>(weight + lane);
        before[lane] = static_cast<int32_t>(random() % 1000000) - 500000;
      }
      Ints sum;
      Words some, others;
      std::memcpy(&sum, before, sizeof(sum));
      std::memcpy(&some, inputs, sizeof(some));
      std::memcpy(&others, weights, sizeof(others));
      sum = dot_bytes_and_weights(sum, some + 0x01010101u * ZERO_POINT, others);
      for (int lane = 0; lane < LANES; ++lane) {
        int32_t right = before[lane];
        for (int i = 4 * lane; i < 4 * lane + 4; ++i) right += (inputs[i] + ZERO_POINT) * weights[i];
        check(sum[lane] == right, "a dot product of bytes", x * 1000 + weight + lane);
      }
    }
}

void check_quantised_rows(std::mt19937& random) {
  std::normal_distribution<float> normal;
  for (int round = 0; round < 2000; ++round) {
    float row[GROUP];
    uint8_t bytes[GROUP];
    for (float& x : row) x = normal(random) * std::ldexp(1.0f, round % 60 - 30);
    const float scale = quantise(row, GROUP, ZERO_POINT, bytes);
    float size = 0.0f;
    for (float x : row) size = std::max(size, std::fabs(x));
    const float factor = 127.0f / size;
    check(scale == size / 127.0f, "a row's scale", round);
    for (int i = 0; i < GROUP; ++i)
      check(bytes[i] == static_cast<uint8_t>(static_cast<int>(std::nearbyint(row[i] * factor)) + ZERO_POINT),
            "a number of a row is rounded", round);
  }
  float row[GROUP] = {};
  uint8_t bytes[GROUP];
  check(quantise(row, GROUP, ZERO_POINT, bytes) == 0.0f, "a row of zeros", 0);
  row[GROUP - 1] = INFINITY;
  check(std::isnan(quantise(row, GROUP, ZERO_POINT, bytes)), "a row with an infinity", 0);
}

void check_bytes(std::mt19937& random) {
  for (int round = 0; round < 2000; ++round) {
    uint8_t bytes[GROUP / 2];
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(round < 2 ? 0x80 - round : random());
    int32_t sums[2] = {};
    for (int i = 0; i < GROUP / 2; ++i) sums[i / 2 % 2] += static_cast<int8_t>(bytes[i]);
    const int32_t pairs = sum_pairs(bytes);
    check(static_cast<int16_t>(pairs) == sums[0] && pairs >> 16 == sums[1], "sums of pairs", round);
    const int at = round % 8;  // bytes lie anywhere
    const Ints signed_bytes = load_signed(bytes + at), unsigned_bytes = load_unsigned(bytes + at);
    const Ints twice = load_signed_twice(bytes + at), unsigned_twice = load_unsigned_twice(bytes + at);
    for (int lane = 0; lane < LANES; ++lane) {
      const int32_t small = static_cast<int8_t>(bytes[at + lane]), large = bytes[at + lane];
      check(signed_bytes[lane] == small && unsigned_bytes[lane] == large, "bytes are widened", round);
      check(static_cast<int16_t>(twice[lane]) == small && twice[lane] >> 16 == small, "signed bytes twice", round);
      check(unsigned_twice[lane] == (large | large << 16), "unsigned bytes twice", round);
    }
  }
}

}  // namespace

int main() {
  std::mt19937 random(0);
  check_halves();
  check_dot_products(random);
  check_quantised_rows(random);
  check_bytes(random);
  return std::min(failures, 100);
}
