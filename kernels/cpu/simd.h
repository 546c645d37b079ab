// Float32 vectors of the machine's register width, and the storage types that are widened to them.
//
// These sources are compiled once for each kind of CPU (targets.py), so the width is chosen here, at compile time:
// AVX-512, AVX2, or 128 bits (SSE2, NEON). All arithmetic goes through GCC's vector extensions, which clang has
// too; intrinsics are used only for instructions that the extensions cannot express, each beside a portable version.
//
// All arithmetic is in float32. bfloat16 and float16 are storage formats: widened when loaded, rounded to nearest
// even when stored.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define MEMBER inline __attribute__((always_inline))
#define EXPORT extern "C" __attribute__((visibility("default")))

#if defined(__AVX512F__)
constexpr int LANES = 16, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int LANES = 8, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int LANES = 4, REGISTERS = 32;
#else
constexpr int LANES = 4, REGISTERS = 16;
#endif

// aligned(4): rows may begin at any element, so loads and stores must not assume the alignment of a vector.
typedef float Floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES), aligned(2)));

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

INLINE int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// ------------------------------------------------------------------------------- loading and storing

INLINE Floats splat(float x) { return Floats{} + x; }

INLINE Floats load(const float* from) { return *reinterpret_cast<const Floats*>(from); }

INLINE Floats load(const BFloat16* from) {
#if defined(__AVX512F__)  // one instruction, where GCC makes three of the general form
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  return reinterpret_cast<Floats>(_mm512_slli_epi32(wide, 16));
#else
  const Shorts bits = *reinterpret_cast<const Shorts*>(from);
  return reinterpret_cast<Floats>(__builtin_convertvector(bits, Words) << 16);
#endif
}

INLINE float widen(float x) { return x; }

INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

INLINE float widen(Float16 x) {
  // Moving exponent and fraction into place leaves the exponent 112 too small; a multiplication corrects it, also for
  // subnormals.
  const uint32_t bits = (x.bits & 0x7fffu) << 13;
  float wide;
  std::memcpy(&wide, &bits, 4);
  wide *= 0x1p112f;
  if ((x.bits & 0x7c00) == 0x7c00) {
    const uint32_t infinite = bits | 0x7f800000u;
    std::memcpy(&wide, &infinite, 4);
  }
  return x.bits & 0x8000 ? -wide : wide;
}

INLINE Floats load(const Float16* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))));
#elif defined(__F16C__)
  return reinterpret_cast<Floats>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  return reinterpret_cast<Floats>(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(&from->bits))));
#else
  Floats wide;
  for (int lane = 0; lane < LANES; ++lane) wide[lane] = widen(from[lane]);
  return wide;
#endif
}

INLINE void store(float* to, Floats x) { *reinterpret_cast<Floats*>(to) = x; }

// Return the bfloat16 bits in the lower halves of the words; the upper halves are 0.
INLINE Words rounded_to_bfloat16(Floats x) {
  const Words bits = reinterpret_cast<Words>(x);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Words quiet = (bits >> 16) | 0x40u;  // rounding could carry a NaN into infinity
  return x == x ? rounded : quiet;
}

INLINE void store(BFloat16* to, Floats x) {
  *reinterpret_cast<Shorts*>(to) = __builtin_convertvector(rounded_to_bfloat16(x), Shorts);
}

INLINE void narrow(float x, float* to) { *to = x; }

INLINE void narrow(float x, BFloat16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  to->bits = static_cast<uint16_t>((x == x ? bits + 0x7fffu + ((bits >> 16) & 1u) : bits | 0x400000u) >> 16);
}

INLINE void narrow(float x, Float16* to) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const float size = std::fabs(x);
  uint16_t half;
  if (!(size == size)) {
    half = 0x7e00;
  } else if (size >= 65520.0f) {  // halfway from the largest number to the next power of two
    half = 0x7c00;
  } else if (size < 0x1p-14f) {  // subnormal: adding 0.5 leaves the steps of 2**-24 in the lowest bits, rounded
    const float shifted = size + 0.5f;
    uint32_t steps;
    std::memcpy(&steps, &shifted, 4);
    half = static_cast<uint16_t>(steps - 0x3f000000u);
  } else {
    bits &= 0x7fffffffu;
    half = static_cast<uint16_t>((bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13);
  }
  to->bits = sign | half;
}

INLINE void store(Float16* to, Floats x) {
#if defined(__AVX512F__)
  const __m256i half = _mm512_cvtps_ph(reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), half);
#elif defined(__F16C__)
  const __m128i half = _mm256_cvtps_ph(reinterpret_cast<__m256>(x), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half);
#elif defined(__aarch64__)
  vst1_u16(&to->bits, vreinterpret_u16_f16(vcvt_f16_f32(reinterpret_cast<float32x4_t>(x))));
#else
  for (int lane = 0; lane < LANES; ++lane) narrow(x[lane], to + lane);
#endif
}

// Load 2 * LANES numbers in the order that is fastest to widen: of bfloat16 first the even elements, then the odd ones.
template <class T>
INLINE void load_pair(const T* from, Floats* pair) {
  pair[0] = load(from);
  pair[1] = load(from + LANES);
}

INLINE void load_pair(const BFloat16* from, Floats* pair) {
  const Words both = *reinterpret_cast<const Words*>(from);
  pair[0] = reinterpret_cast<Floats>(both << 16);
  pair[1] = reinterpret_cast<Floats>(both & 0xffff0000u);
}

// Store 2 * LANES numbers that are in the order of load_pair.
template <class T>
INLINE void store_pair(T* to, const Floats* pair) {
  store(to, pair[0]);
  store(to + LANES, pair[1]);
}

INLINE void store_pair(BFloat16* to, const Floats* pair) {
  *reinterpret_cast<Words*>(to) = rounded_to_bfloat16(pair[0]) | rounded_to_bfloat16(pair[1]) << 16;
}

// Widen a row of a multiple of LANES elements to float32; whole pairs of vectors are in the order of load_pair.
template <class T>
INLINE void widen_pairs(const T* from, int count, float* to) {
  int i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    Floats pair[2];
    load_pair(from + i, pair);
    store(to + i, pair[0]);
    store(to + i + LANES, pair[1]);
  }
  if (i < count) store(to + i, load(from + i));
}

// Multiply a row in that order by `factor` and round it to T.
template <class T>
INLINE void narrow_pairs(const float* from, int count, float factor, T* to) {
  int i = 0;
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const Floats pair[2] = {load(from + i) * factor, load(from + i + LANES) * factor};
    store_pair(to + i, pair);
  }
  if (i < count) store(to + i, load(from + i) * factor);
}

// Widen a row of `count` elements to float32, padded with zeros to whole vectors.
template <class T>
INLINE void widen_row(const T* from, int count, float* to) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
  for (; i < count; ++i) to[i] = widen(from[i]);
  for (; i % LANES; ++i) to[i] = 0.0f;
}

// Multiply `count` float32 elements by `factor` and round them to T.
template <class T>
INLINE void narrow_row(const float* from, int count, float factor, T* to) {
  int i = 0;
  for (; i + LANES <= count; i += LANES) store(to + i, load(from + i) * factor);
  for (; i < count; ++i) narrow(from[i] * factor, to + i);
}

// ---------------------------------------------------------------------------------------- arithmetic

INLINE Floats larger(Floats a, Floats b) { return a > b ? a : b; }

INLINE Floats magnitude(Floats x) { return reinterpret_cast<Floats>(reinterpret_cast<Words>(x) & 0x7fffffffu); }

// exp of numbers up to 0, relative error 2e-7; below -87 it is exp(-87), about 1e-38. NaN stays NaN.
// The polynomial is that of Cephes' expf (Moshier), on [-log(2) / 2, log(2) / 2].
INLINE Floats exp_nonpositive(Floats x) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: added to a small number, it rounds it to an integer
  x = x < -87.0f ? splat(-87.0f) : x;
  const Floats shifted = x * 1.44269504f + magic;
  const Floats n = shifted - magic;
  const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  const Ints exponent = reinterpret_cast<Ints>(shifted) - reinterpret_cast<Ints>(magic);
  return p * reinterpret_cast<Floats>((exponent + 127) << 23);
}

// exp(x) - 1 - x of numbers up to 0, without the cancellation near 0.
INLINE Floats exp_beyond_line(Floats x) {
  Floats p = x * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * x + 8.3334519073e-3f;
  p = p * x + 4.1665795894e-2f;
  p = p * x + 1.6666665459e-1f;
  p = p * x + 5.0000001201e-1f;
  const Floats near = p * (x * x), far = exp_nonpositive(x) - 1.0f - x;
  return x > -0.34657359f ? near : far;
}

// Half of erfc(x) of numbers from 0 on, relative error 3e-7: of a normal distribution, what is above x * sqrt(2).
// log(erfc(x) / t) + x * x, with t = 1 / (1 + x / 2), is a polynomial of t: the one of degree 9 whose largest error over
// 0 <= x <= 14 is least, 6e-8. From 9.3 on the result stays near 1e-38, the least that `exp_nonpositive` gives.
INLINE Floats half_erfc(Floats x) {
  const Floats t = 1.0f / (1.0f + 0.5f * x);
  Floats p = t * 0.160992161f - 0.768008841f;
  p = p * t + 1.36102485f;
  p = p * t - 0.966675194f;
  p = p * t + 0.141804824f;
  p = p * t - 0.115634257f;
  p = p * t + 0.0738813645f;
  p = p * t + 0.378552369f;
  p = p * t + 0.999554977f;
  p = p * t - 1.26549219f;
  return 0.5f * t * exp_nonpositive(p - x * x);
}

INLINE Floats sigmoid(Floats x) {
  const Floats small = exp_nonpositive(-magnitude(x));
  return (x < 0.0f ? small : splat(1.0f)) / (1.0f + small);
}

INLINE Floats tanh(Floats x) {
  const Floats small = exp_nonpositive(-2.0f * magnitude(x));
  const Floats size = (1.0f - small) / (1.0f + small);
  return x < 0.0f ? -size : size;
}

// -------------------------------------------------------------------------------------- across lanes

template <int... Lane>
INLINE Floats pick(Floats a, Floats b, std::integer_sequence<int, Lane...>, int) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Lane...);
#else
  return __builtin_shuffle(a, b, Ints{Lane...});
#endif
}

constexpr int from_halves(int lane, int segment) {
  return lane % segment < segment / 2 ? lane : LANES + lane - segment / 2;
}

template <int SEGMENT, int SHIFT, int... Lane>
INLINE Floats pick_halves(Floats a, Floats b, std::integer_sequence<int, Lane...>) {
  return pick(a, b, std::integer_sequence<int, (from_halves(Lane, SEGMENT) + SHIFT)...>{}, 0);
}

// Within each segment of lanes: the two halves of `a` added, then the two halves of `b` added.
template <int SEGMENT>
INLINE Floats fold(Floats a, Floats b) {
  const auto lanes = std::make_integer_sequence<int, LANES>{};
  return pick_halves<SEGMENT, 0>(a, b, lanes) + pick_halves<SEGMENT, SEGMENT / 2>(a, b, lanes);
}

// Return the sums of LANES vectors, one in each lane; `rows` is overwritten.
template <int SEGMENT = LANES>
INLINE Floats sum_each(Floats* rows) {
  for (int i = 0; i < SEGMENT / 2; ++i) rows[i] = fold<SEGMENT>(rows[i], rows[i + SEGMENT / 2]);
  if constexpr (SEGMENT > 2) return sum_each<SEGMENT / 2>(rows);
  return rows[0];
}

// Rotate the lanes by WIDTH.
template <int WIDTH, int... Lane>
INLINE Floats shifted(Floats x, std::integer_sequence<int, Lane...>) {
  return pick(x, x, std::integer_sequence<int, ((Lane + WIDTH) % LANES)...>{}, 0);
}

template <int WIDTH = LANES / 2>
INLINE float sum_lanes(Floats x) {
  x += shifted<WIDTH>(x, std::make_integer_sequence<int, LANES>{});
  if constexpr (WIDTH > 1) return sum_lanes<WIDTH / 2>(x);
  return x[0];
}

template <int WIDTH = LANES / 2>
INLINE float largest_lane(Floats x) {
  const Floats other = shifted<WIDTH>(x, std::make_integer_sequence<int, LANES>{});
  x = larger(x, other);
  if constexpr (WIDTH > 1) return largest_lane<WIDTH / 2>(x);
  return x[0];
}
