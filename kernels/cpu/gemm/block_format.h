// What the formats of gemm/blocks.cpp and gemm/block_dots.cpp have in common: loading their numbers, and packing.

#pragma once

#include "gemm/blocks.h"

#if defined(__AVX2__)
// Eight bytes, four times.
INLINE __m256i load_eight(const uint8_t* from) {
  int64_t eight;
  std::memcpy(&eight, from, 8);
  return _mm256_set1_epi64x(eight);
}
#endif

// GCC makes many instructions of a general conversion from bytes.
INLINE Ints load_signed(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  const int8x8_t bytes = vreinterpret_s8_u32(vld1_dup_u32(reinterpret_cast<const uint32_t*>(from)));
  return reinterpret_cast<Ints>(vmovl_s16(vget_low_s16(vmovl_s8(bytes))));
#else
  typedef int8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

INLINE Ints load_unsigned(const uint8_t* from) {
#if defined(__AVX512F__)
  return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#elif defined(__aarch64__)
  const uint8x8_t bytes = vreinterpret_u8_u32(vld1_dup_u32(reinterpret_cast<const uint32_t*>(from)));
  return reinterpret_cast<Ints>(vmovl_u16(vget_low_u16(vmovl_u8(bytes))));
#else
  typedef uint8_t Bytes __attribute__((vector_size(LANES), aligned(1)));
  return __builtin_convertvector(*reinterpret_cast<const Bytes*>(from), Ints);
#endif
}

// The same, in both halves of the lanes as int16.
INLINE Ints load_signed_twice(const uint8_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i in_upper_bytes = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,  //
                                                  -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
  return reinterpret_cast<Ints>(_mm256_srai_epi16(_mm256_shuffle_epi8(load_eight(from), in_upper_bytes), 8));
#else
  const Ints x = load_signed(from);
  return (x & 0xffff) | x << 16;
#endif
}

INLINE Ints load_unsigned_twice(const uint8_t* from) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i in_lower_bytes = _mm256_setr_epi8(0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1,  //
                                                  4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
  return reinterpret_cast<Ints>(_mm256_shuffle_epi8(load_eight(from), in_lower_bytes));
#else
  const Ints x = load_unsigned(from);
  return x | x << 16;
#endif
}

INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Floats load_halves(const uint8_t* from) { return load(reinterpret_cast<const Float16*>(from)); }

// Return entry `index` of the six-bit scales or minima of Q4_K, from its 12 bytes.
INLINE uint8_t six_bits(const uint8_t* packed, int index, bool is_minimum) {
  if (index < 4) return packed[index + 4 * is_minimum] & 63;
  const int low = is_minimum ? packed[index + 4] >> 4 : packed[index + 4] & 15;
  return static_cast<uint8_t>(low | packed[index - 4 + 4 * is_minimum] >> 6 << 4);
}

// Pack rows of file blocks, [num_out, num_in / inputs] blocks, into panels. Outputs past the last are zeros.
template <class Format>
static void pack_blocks(const Format& format, const uint8_t* rows, int num_out, int num_in, bool gated,
                 int num_threads, uint8_t* packed) {
  const int panels = (num_out + TILE_COLUMNS - 1) / TILE_COLUMNS, blocks = num_in / format.inputs();
  parallel_for(num_threads, panels, [=](int64_t panel) {
    uint8_t* to = packed + panel * blocks * format.panel_bytes();
    // U4's padding has zero points and nibbles of 0, and every format's has scales of 0.
    std::memset(to, 0, static_cast<size_t>(blocks) * format.panel_bytes());
    for (int column = 0; column < TILE_COLUMNS; ++column) {
      const ptrdiff_t row = packed_row(static_cast<int>(panel), column, num_out, gated);
      for (int block = 0; row < num_out && block < blocks; ++block)
        format.put(rows + (row * blocks + block) * format.file_bytes(), column,
                   to + static_cast<ptrdiff_t>(block) * format.panel_bytes());
    }
  });
}
