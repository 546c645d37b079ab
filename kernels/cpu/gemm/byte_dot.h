// Products of bytes, added to int32: exact, whatever the order and whatever computes them.

#pragma once

#include "gemm/microkernel.h"

#if defined(__x86_64__)
typedef int16_t Int16s __attribute__((vector_size(4 * LANES), aligned(4)));

// Pairs of int16 times pairs, added to int32.
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

// Groups of 4 unsigned bytes times groups of 4 signed ones.
INLINE Ints dot_bytes(Ints sum, Words positive, Words either) {
#if defined(__AVX512VNNI__)
  return reinterpret_cast<Ints>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(positive),
                                                    reinterpret_cast<__m512i>(either)));
#elif defined(__x86_64__)  // every other byte as int16: sums of pairs of bytes would not fit into them
  const Int16s even = reinterpret_cast<Int16s>(either) << 8 >> 8, odd = reinterpret_cast<Int16s>(either) >> 8;
  return sum + dot_int16(reinterpret_cast<Int16s>(positive & 0x00ff00ffu), even) +
         dot_int16(reinterpret_cast<Int16s>(positive >> 8 & 0x00ff00ffu), odd);
#else
  for (int byte = 0; byte < 4; ++byte)
    sum += (reinterpret_cast<Ints>(either) << (24 - 8 * byte) >> 24) *
           reinterpret_cast<Ints>(positive >> (8 * byte) & 0xffu);
  return sum;
#endif
}

// The same for unsigned bytes below 16.
INLINE Ints dot_nibbles(Ints sum, Words small, Words either) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)  // of these, the sums of pairs fit
#if defined(__AVX512BW__)
  const __m512i pairs = _mm512_maddubs_epi16(reinterpret_cast<__m512i>(small), reinterpret_cast<__m512i>(either));
#else
  const __m256i pairs = _mm256_maddubs_epi16(reinterpret_cast<__m256i>(small), reinterpret_cast<__m256i>(either));
#endif
  return sum + dot_int16(reinterpret_cast<Int16s>(pairs), Int16s{} + 1);
#else
  return dot_bytes(sum, small, either);
#endif
}

INLINE uint32_t load_word(const void* bytes) {
  uint32_t four;
  std::memcpy(&four, bytes, 4);
  return four;
}
