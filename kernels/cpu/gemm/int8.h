// Linear layers with int8 weights, a quarter of the bytes of float32: a scale for each output, and a dynamic scale for
// each row of activations.
//
// Sums of products of bytes are exact in int32, so vectors, AMX and plain code give the same result. Most instructions
// (gemm/byte_dot.h) multiply unsigned by signed bytes, so activations are stored with ZERO_POINT = 128 added; what that
// adds to a sum depends only on the weights and is subtracted: `Linear::zero_point_offsets`.

#pragma once

#include "gemm/linear.h"

constexpr int GROUPS_OF_BLOCK = 256 / GROUP;  // of GGUF's K formats

// Quantised activations. For int8 weights: with ZERO_POINT added, a scale per row. For int4 weights and blocks: signed, a
// scale per group of a row.
//
// For blocks, if there are whole 256 inputs, the scales of 8 groups are eighths of their largest one, as GGUF's K formats
// have integer scales for groups and one that is not for all 256. So products with them are integers up to the end.
struct Int8Rows {
  uint8_t* numbers;  // [rows, num_in]
  float* scales;     // [rows], or [rows, num_in / GROUP]
  // [rows, num_in / GROUP]. For int4 weights: -8 * sum of a group, for their zero point 8. For blocks
  // [rows, num_in / GROUP, 2]: the sums of the first two and of the last two of every four numbers, as two int16, of
  // each half of a group.
  int32_t* zero_point_offsets;
  // For blocks only:
  float* group_sums;     // [rows, num_in / GROUP]: of what the numbers of a group stand for
  int32_t* eighths;      // [rows, num_in / GROUP]: a group's scale, from 1 to 8, as int16 in both halves
  float* eighth_scales;  // [rows, num_in / GROUP / GROUPS_OF_BLOCK]: an eighth of the largest scale of a block
  int16_t* eighth_sums;  // [rows, num_in / GROUP]: the sum of a group's numbers times its eighths

  static constexpr int PARTS = 7;  // see `in`
  static bool has_one_scale(const Linear& linear) { return linear.bits == 8 && !linear.panels; }
  static size_t num_scales(int num_in) { return num_in / GROUP + 1; }  // per row, maximum

  // Return rows with all but their numbers in PARTS * `num_scales` floats of memory.
  static Int8Rows in(float* memory, size_t num_scales, uint8_t* numbers) {
    auto part = [&](auto* of_type, int index) {
      return reinterpret_cast<decltype(of_type)>(memory + index * num_scales);
    };
    Int8Rows rows{};
    rows.numbers = numbers, rows.scales = memory;
    rows.zero_point_offsets = part(rows.zero_point_offsets, 1);  // two parts
    rows.group_sums = part(rows.group_sums, 3);
    rows.eighths = part(rows.eighths, 4);
    rows.eighth_scales = part(rows.eighth_scales, 5);
    rows.eighth_sums = part(rows.eighth_sums, 6);
    return rows;
  }

  // Return `count` rows in memory of their own, of `num_floats` numbers of float32.
  static Int8Rows in(float* memory, size_t count, int num_in) {
    const size_t scales = count * num_scales(num_in);
    return in(memory, scales, reinterpret_cast<uint8_t*>(memory + PARTS * scales));
  }
  static size_t num_floats(size_t count, int num_in) {
    return count * (PARTS * num_scales(num_in) + (num_in + 3) / 4);
  }

  // Return the rows from `row` on, in the format for this layer's weights.
  Int8Rows from(ptrdiff_t row, const Linear& linear) const {
    const ptrdiff_t groups = linear.num_in / GROUP, first = row * groups;
    return {numbers + row * linear.num_in, scales + row * (has_one_scale(linear) ? 1 : groups),
            zero_point_offsets + first * (linear.panels ? 2 : 1), group_sums + first, eighths + first,
            eighth_scales + first / GROUPS_OF_BLOCK, eighth_sums + first};
  }
};

struct Magnitude {
  float largest;
  float rest;  // NaN if a number is not finite, else 0: the row's results must be NaN then, too
};

// Return the largest magnitude of `count` numbers.
template <class T>
INLINE Magnitude magnitude_of(const T* from, int count) {
  Floats most = {}, odd = {};
  int i = 0;
  for (; i + LANES <= count; i += LANES) {
    const Floats x = load(from + i);
    most = larger(most, magnitude(x));
    odd += x - x;
  }
  float size = largest_lane(most), rest = sum_lanes(odd);
  for (; i < count; ++i) {
    size = std::max(size, std::fabs(widen(from[i])));
    rest += widen(from[i]) - widen(from[i]);
  }
  return {size, rest};
}

// Round `count` numbers times `factor` to bytes with `zero_point` added. With AVX2, 16 are stored at once: bytes that were
// stored in two parts cannot be loaded together before they are in the cache.
template <class T>
INLINE void round_to_bytes(const T* from, int count, float factor, int zero_point, uint8_t* to) {
  const Floats magic = splat(12582912.0f);  // 1.5 * 2**23: added to a small number, it rounds it to an integer
  auto whole = [&](int i) __attribute__((always_inline)) {
    return reinterpret_cast<Ints>(load(from + i) * factor + magic) - reinterpret_cast<Ints>(magic) + zero_point;
  };
  int i = 0;
#if defined(__AVX2__) && !defined(__AVX512F__)
  static_assert(ZERO_POINT == 0);  // what is packed is signed
  for (; i + 2 * LANES <= count; i += 2 * LANES) {
    const __m256i words = _mm256_permute4x64_epi64(
        _mm256_packs_epi32(reinterpret_cast<__m256i>(whole(i)), reinterpret_cast<__m256i>(whole(i + LANES))), 0xd8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                     _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
  }
#else
  for (; i + LANES <= count; i += LANES) {
    const Ints numbers = whole(i);
#if defined(__AVX512F__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(reinterpret_cast<__m512i>(numbers)));
#elif defined(__aarch64__)
    const int16x4_t lower = vmovn_s32(reinterpret_cast<int32x4_t>(numbers));
    const uint32x2_t bytes = vreinterpret_u32_s8(vmovn_s16(vcombine_s16(lower, lower)));
    vst1_lane_u32(reinterpret_cast<uint32_t*>(to + i), bytes, 0);
#else
    for (int lane = 0; lane < LANES; ++lane) to[i + lane] = static_cast<uint8_t>(numbers[lane]);
#endif
  }
#endif
  for (; i < count; ++i)
    to[i] = static_cast<uint8_t>(static_cast<int>(std::nearbyint(widen(from[i]) * factor)) + zero_point);
}

// Return the factor that makes `largest` 127.
INLINE float inverse_scale(float largest) { return largest > 0.0f ? 127.0f / largest : 0.0f; }

// Quantise `count` numbers to bytes with `zero_point` added; return their scale, or NaN if a number is not finite.
template <class T>
INLINE float quantise(const T* from, int count, int zero_point, uint8_t* to) {
  const Magnitude size = magnitude_of(from, count);
  round_to_bytes(from, count, inverse_scale(size.largest), zero_point, to);
  return size.largest / 127.0f + size.rest;
}

// Add the first two of every four signed bytes of half a group, and the last two; return both, as two int16.
INLINE int32_t sum_pairs(const uint8_t* from) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), bytes);
  pairs = _mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi16(pairs, _mm_shuffle_epi32(pairs, 0xb1)));
#elif defined(__aarch64__)
  const int16x8_t pairs = vpaddlq_s8(vreinterpretq_s8_u8(vld1q_u8(from)));
  const int16x4_t two = vadd_s16(vget_low_s16(pairs), vget_high_s16(pairs));
  return vget_lane_s32(vreinterpret_s32_s16(vadd_s16(two, vext_s16(two, two, 2))), 0);
#else
  int32_t sums[2] = {};
  for (int i = 0; i < GROUP / 2; ++i) sums[i / 2 % 2] += static_cast<int8_t>(from[i]);
  return (sums[0] & 0xffff) | static_cast<int32_t>(static_cast<uint32_t>(sums[1]) << 16);
#endif
}

// Return the sum of what `sum_pairs` returns.
INLINE int32_t sum_of(int32_t pairs) { return static_cast<int16_t>(pairs) + (pairs >> 16); }

// Quantise group `place` of all rows to signed bytes, for int4 weights.
template <class T>
INLINE void quantise_group(const T* from, ptrdiff_t place, const Int8Rows& to) {
  uint8_t* numbers = to.numbers + place * GROUP;
  to.scales[place] = quantise(from, GROUP, 0, numbers);
  to.zero_point_offsets[place] = -8 * (sum_of(sum_pairs(numbers)) + sum_of(sum_pairs(numbers + GROUP / 2)));
}

// The same for blocks, times `factor`; `scale` is then that of the group, and `eighths` its share of a larger one.
template <class T>
INLINE void quantise_group(const T* from, ptrdiff_t place, float factor, float scale, int eighths, const Int8Rows& to) {
  uint8_t* numbers = to.numbers + place * GROUP;
  round_to_bytes(from, GROUP, factor, 0, numbers);
  int32_t sum = 0;
  for (int half = 0; half < 2; ++half) {
    const int32_t pairs = sum_pairs(numbers + half * GROUP / 2);
    sum += sum_of(pairs);
    to.zero_point_offsets[2 * place + half] = pairs;
  }
  to.scales[place] = scale;
  to.group_sums[place] = scale * static_cast<float>(sum);
  to.eighths[place] = eighths * 0x10001;
  to.eighth_sums[place] = static_cast<int16_t>(eighths * sum);  // at most 8 * 32 * 127
}

// Quantise 256 numbers from group `place` on with scales in two levels.
template <class T>
INLINE void quantise_block(const T* from, ptrdiff_t place, const Int8Rows& to) {
  Magnitude sizes[GROUPS_OF_BLOCK], whole{};
  for (int group = 0; group < GROUPS_OF_BLOCK; ++group) {
    sizes[group] = magnitude_of(from + group * GROUP, GROUP);
    whole = {std::max(whole.largest, sizes[group].largest), whole.rest + sizes[group].rest};
  }
  const float eighth = whole.largest / (8 * 127.0f) + whole.rest, to_127 = inverse_scale(whole.largest);
  to.eighth_scales[place / GROUPS_OF_BLOCK] = eighth;
  for (int group = 0; group < GROUPS_OF_BLOCK; ++group) {
    static constexpr float EIGHT_BY[] = {0.0f, 8.0f, 4.0f, 8 / 3.0f, 2.0f, 8 / 5.0f, 8 / 6.0f, 8 / 7.0f, 1.0f};
    // Rounded up, so that no number is beyond 127; 1 also for numbers that are not finite.
    const float share = std::ceil(sizes[group].largest * to_127 * (8 / 127.0f));
    const int eighths = share > 1.0f ? static_cast<int>(std::min(share, 8.0f)) : 1;
    const float scale = eighth * static_cast<float>(eighths);
    quantise_group(from + group * GROUP, place + group, to_127 * EIGHT_BY[eighths], scale, eighths, to);
  }
}

// Quantise row `row` in the format for the layer's weights.
template <class T>
INLINE void quantise_row(const Linear& linear, const T* from, int row, const Int8Rows& to) {
  const int num_in = linear.num_in, groups = num_in / GROUP;
  if (Int8Rows::has_one_scale(linear)) {
    to.scales[row] = quantise(from, num_in, ZERO_POINT, to.numbers + static_cast<ptrdiff_t>(row) * num_in);
    return;
  }
  const bool in_blocks = linear.panels && groups % GROUPS_OF_BLOCK == 0;
  for (int group = 0; group < groups; group += in_blocks ? GROUPS_OF_BLOCK : 1) {
    const ptrdiff_t place = static_cast<ptrdiff_t>(row) * groups + group;
    const T* numbers = from + group * GROUP;
    if (in_blocks) {
      quantise_block(numbers, place, to);
    } else if (linear.panels) {
      const Magnitude size = magnitude_of(numbers, GROUP);
      quantise_group(numbers, place, inverse_scale(size.largest), size.largest / 127.0f + size.rest, 8, to);
    } else {
      quantise_group(numbers, place, to);
    }
  }
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// A part of a panel for many rows, with sizes and signs apart, in the L1 cache.
class alignas(64) SignedPart {
 public:
  static constexpr int DEPTH = 256;    // inputs
  static constexpr int MIN_ROWS = 32;  // measured: for fewer, unpacking takes longer than it saves

  // Unpack inputs [first, first + depth) of a panel.
  SignedPart(const int8_t* panel, int num_in, int first, int depth) : words_(depth / 4) {
    for (int j = 0; j < TILE_VECTORS; ++j) {
      const int8_t* strip = panel + (static_cast<ptrdiff_t>(j) * num_in + first) * LANES;
      Ints negatives = {};
      for (int word = 0; word < words_; ++word) {
        const SizesAndSigns parts = sizes_and_signs(*reinterpret_cast<const Words*>(strip + word * 4 * LANES));
        weights_[word][j] = parts;
        add_dots(negatives, {parts.sizes, Words{}}, parts.signs);
      }
      negatives_[j] = -negatives;
    }
  }

  // sums[ROWS][TILE_COLUMNS] = or += (`add`) the part times ROWS rows of signed bytes.
  template <int ROWS>
  MEMBER void multiply(const uint8_t* x, ptrdiff_t x_row, bool add, int32_t* sums) const {
    Ints sum[ROWS][TILE_VECTORS];
    auto place = [&](int i, int j) { return reinterpret_cast<Ints*>(sums + i * TILE_COLUMNS + j * LANES); };
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < TILE_VECTORS; ++j) sum[i][j] = add ? *place(i, j) + negatives_[j] : negatives_[j];
    for (int word = 0; word < words_; ++word)
#pragma GCC unroll 4
      for (int i = 0; i < ROWS; ++i) {
        const Words four = Words{} + load_word(x + i * x_row + 4 * word);
#pragma GCC unroll 2
        for (int j = 0; j < TILE_VECTORS; ++j)
          add_dots(sum[i][j], weights_[word][j], four);
      }
#pragma GCC unroll 4
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
      for (int j = 0; j < TILE_VECTORS; ++j) *place(i, j) = sum[i][j];
  }

 private:
  SizesAndSigns weights_[DEPTH / 4][TILE_VECTORS];
  Ints negatives_[TILE_VECTORS];  // sums of the sizes of negative weights
  int words_;
};

// sums[rows][TILE_COLUMNS] = many rows times a panel, of which a part at a time is unpacked once for all of them.
__attribute__((noinline)) static void multiply_signed(const uint8_t* x, const int8_t* panel, int num_in, int rows,
                                                      int32_t* sums) {
  for (int k = 0; k < num_in; k += SignedPart::DEPTH) {
    const int depth = std::min(SignedPart::DEPTH, num_in - k), end = k + depth;
    const SignedPart part(panel, num_in, k, depth);
    const int8_t* after = end < num_in ? panel + end * LANES : panel + static_cast<ptrdiff_t>(num_in) * TILE_COLUMNS;
    in_groups<3>(rows, [&](auto size, int first) {
      for (int j = 0; j < TILE_VECTORS; ++j)
        NextWeights{after + static_cast<ptrdiff_t>(j) * num_in * LANES, depth * LANES}.fetch_beside(first, size, rows);
      part.multiply<size.value>(x + static_cast<ptrdiff_t>(first) * num_in + k, num_in, k > 0,
                                sums + first * TILE_COLUMNS);
    });
  }
}
#endif

// Compute one panel for all rows: `use(row, sums)` is called with the TILE_COLUMNS results of every row, bias included.
template <class Use>
INLINE void multiply_panel(const Linear& linear, int panel, const Int8Rows& x, int num_rows, Use use) {
  alignas(64) int32_t sums[ROW_BLOCK * TILE_COLUMNS];
  const int num_in = linear.num_in, first = panel * TILE_COLUMNS;
  const int8_t* weights = static_cast<const int8_t*>(linear.weights) + static_cast<ptrdiff_t>(first) * num_in;
  for (int block = 0; block < num_rows; block += ROW_BLOCK) {
    const int rows = std::min(ROW_BLOCK, num_rows - block);
    const uint8_t* from = x.numbers + static_cast<ptrdiff_t>(block) * num_in;
#if defined(__AVX2__) && !defined(__AVX512F__)
    if (rows >= SignedPart::MIN_ROWS)
      multiply_signed(from, weights, num_in, rows, sums);
    else
#endif
    {
      const int done = leading_inputs(from, num_in, weights, num_in, rows, block, sums);
      add_inputs(from, num_in, weights, num_in, done, rows, block == 0, sums);
    }
    for (int row = 0; row < rows; ++row) {
      alignas(64) float result[TILE_COLUMNS];
      for (int j = 0; j < TILE_COLUMNS; j += LANES) {
        const Ints sum = *reinterpret_cast<const Ints*>(sums + row * TILE_COLUMNS + j);
        const Ints offset =
            ZERO_POINT ? *reinterpret_cast<const Ints*>(linear.zero_point_offsets + first + j) : Ints{};
        const Floats scale = load(linear.scales + first + j) * x.scales[block + row];
        const Floats product = __builtin_convertvector(sum - offset, Floats) * scale;
        store(result + j, linear.bias ? product + load(linear.bias + first + j) : product);
      }
      use(block + row, result);
    }
  }
}

// Widen row `row` of a packed weight that is not gated to float32.
INLINE void unpack_int8_row(const Linear& linear, int row, float* to) {
  unpack_row(static_cast<const int8_t*>(linear.weights), linear.num_in, row, to);
  for (int k = 0; k < linear.num_in; ++k) to[k] *= linear.scales[row];
}
