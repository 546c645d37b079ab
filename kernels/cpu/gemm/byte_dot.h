// Dot products of bytes in int32: exact, so every instruction set and every order gives the same result.

#pragma once

#include "gemm/microkernel.h"

#if defined(__x86_64__)
typedef int16_t Int16s __attribute__((vector_size(4 * LANES), aligned(4)));

// Multiply pairs of int16 and add each pair in int32.
INLINE Ints dot_int16(Int16s a, Int16s b) {
#if defined(__AVX512BW__)
  return reinterpret_cast<Ints>(_mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  static_assert(LANES == 4);
  return reinterpret_cast<Ints>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#endif
}
#endif

// What is added to signed bytes that are multiplied with signed weights, as the instructions want one side unsigned.
// AVX2 moves the sign of the weights to the inputs instead: of products of bytes in [-128, 128] x [-127, 127] a pair
// fits into int16. Arm multiplies signed by signed bytes.
#if defined(__AVX2__) && !defined(__AVX512F__) || defined(__aarch64__)
constexpr int ZERO_POINT = 0;
#else
constexpr int ZERO_POINT = 128;
#endif

// sum += dot products of groups of 4 unsigned and 4 signed bytes. On Arm the first are signed, too: where ZERO_POINT is
// 0, no unsigned one is above 127.
INLINE Ints dot_bytes(Ints sum, Words u8, Words i8) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(u8),
                                                    reinterpret_cast<__m512i>(i8)));
#elif defined(__x86_64__)  // even and odd bytes apart: sums of pairs of products of bytes could overflow int16
  const Int16s even = reinterpret_cast<Int16s>(i8) << 8 >> 8, odd = reinterpret_cast<Int16s>(i8) >> 8;
  return sum + dot_int16(reinterpret_cast<Int16s>(u8 & 0x00ff00ffu), even) +
         dot_int16(reinterpret_cast<Int16s>(u8 >> 8 & 0x00ff00ffu), odd);
#elif defined(__ARM_FEATURE_DOTPROD)
  return reinterpret_cast<Ints>(vdotq_s32(reinterpret_cast<int32x4_t>(sum), reinterpret_cast<int8x16_t>(u8),
                                          reinterpret_cast<int8x16_t>(i8)));
#elif defined(__aarch64__)
  const int8x16_t a = reinterpret_cast<int8x16_t>(u8), b = reinterpret_cast<int8x16_t>(i8);
  const int32x4_t first = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
  return sum + reinterpret_cast<Ints>(vpaddq_s32(first, vpaddlq_s16(vmull_high_s8(a, b))));
#else
  for (int byte = 0; byte < 4; ++byte)
    sum += (reinterpret_cast<Ints>(i8) << (24 - 8 * byte) >> 24) *
           reinterpret_cast<Ints>(u8 >> (8 * byte) & 0xffu);
  return sum;
#endif
}

// Have a sum added up here. GCC would compute the products of all words before it adds the first two, and runs out of
// registers.
template <class Sum>
INLINE void add_now(Sum& sum) {
#if defined(__AVX512F__)
  asm("" : "+v"(sum));
#elif defined(__AVX2__)
  asm("" : "+x"(sum));
#endif
}

// Sums of dot products of groups of 4 unsigned bytes below 16 and 4 signed bytes.
class NibbleSums {
 public:
  static constexpr int MAX_WORDS = 8;  // 16 products of at most 15 * 128 fit into int16

  void add(Words nibbles, Words i8) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__)
    sums_ += reinterpret_cast<Numbers>(
        _mm512_maddubs_epi16(reinterpret_cast<__m512i>(nibbles), reinterpret_cast<__m512i>(i8)));
#elif defined(__AVX2__) && !defined(__AVX512VNNI__)
    sums_ += reinterpret_cast<Numbers>(
        _mm256_maddubs_epi16(reinterpret_cast<__m256i>(nibbles), reinterpret_cast<__m256i>(i8)));
#else
    sums_ = dot_bytes(sums_, nibbles, i8);
#endif
  }

  Ints total() const {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    return dot_int16(sums_, Int16s{} + 1);
#else
    return sums_;
#endif
  }

 private:
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  typedef Int16s Numbers;
#else
  typedef Ints Numbers;
#endif
  Numbers sums_ = {};
};

// sum += dot products of groups of 4 signed bytes, to which ZERO_POINT has been added, and 4 weights.
INLINE Ints dot_bytes_and_weights(Ints sum, Words x, Words weights) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i sizes = _mm256_abs_epi8(reinterpret_cast<__m256i>(weights));
  const __m256i signed_x = _mm256_sign_epi8(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(weights));
  return sum + dot_int16(reinterpret_cast<Int16s>(_mm256_maddubs_epi16(sizes, signed_x)), Int16s{} + 1);
#else
  return dot_bytes(sum, x, weights);
#endif
}

// Signed bytes w for products with many rows x: |w|, and 0 or -1. As ~x = -x - 1, w * x = |w| * (x ^ sign) plus |w| where
// w is negative, which does not depend on x. An exclusive or is done in all units, other than `psignb`.
struct SizesAndSigns {
  Words sizes, signs;
};

INLINE SizesAndSigns sizes_and_signs(Words bytes) {
  typedef int8_t Bytes __attribute__((vector_size(4 * LANES), aligned(4)));
  const Bytes signs = reinterpret_cast<Bytes>(bytes) < 0;
  return {reinterpret_cast<Words>((reinterpret_cast<Bytes>(bytes) ^ signs) - signs), reinterpret_cast<Words>(signs)};
}

#if defined(__AVX2__)
// Add dot products of four bytes each, but for what depends on the weights alone. |w| <= 128 and -128 <= x ^ sign <= 127: a
// pair of products fits into int16.
INLINE void add_dots(Ints& sum, const SizesAndSigns& weights, Words x) {
#if defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights.sizes),
                                             reinterpret_cast<__m512i>(x ^ weights.signs));
#else
  const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(weights.sizes),
                                             reinterpret_cast<__m256i>(x ^ weights.signs));
#endif
  sum += dot_int16(reinterpret_cast<Int16s>(pairs), Int16s{} + 1);
  add_now(sum);
}
#endif

INLINE uint32_t load_word(const void* bytes) {
  uint32_t four;
  std::memcpy(&four, bytes, 4);
  return four;
}
