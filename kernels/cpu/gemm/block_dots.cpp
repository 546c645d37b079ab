// The formats of gemm/block_dots.h: packing, and dot products.

#include "gemm/block_dots.h"

#include "gemm/amx_blocks.h"
#include "gemm/block_format.h"

namespace {

constexpr int WORDS = GROUP / 4;  // of a group

INLINE Words load_words(const uint8_t* from) { return *reinterpret_cast<const Words*>(from); }

// The sum of a row's numbers of a group, or (PARTS = 2) of half `part` of one; sums: as in Int8Rows.
template <int PARTS>
INLINE int32_t sum_of_part(const int32_t* sums, int part) {
  return PARTS == 1 ? sum_of(sums[0]) + sum_of(sums[1]) : sum_of(sums[part]);
}

// Sums of dot products of four unsigned bytes below 2**BITS with four signed ones; of 8 bits, both are signed where
// ADDED is 0, and the first have ADDED added where it is not: by `ready`.
template <int BITS>
class ByteSums {
 public:
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
  static constexpr int ADDED = 0;
  static constexpr bool IN_PAIRS = true;  // of int16, which are multiplied with integer scales while they are added
  // Pairs of products, in [-127, 127] times the weights, that fit into int16 together. Of 6 bits, as many as would fit
  // with 32 subtracted from the weights, and this is done to the sums: on the way they may wrap around.
  static constexpr bool WRAPS = BITS == 6;
  static constexpr int MAX_WORDS = BITS == 4 ? 8 : BITS == 8 ? 1 : 4;

  MEMBER void add(Words weights, Words x) {
#if defined(__AVX512BW__)
    if constexpr (BITS < 8) {
      sums_ += reinterpret_cast<Pairs>(
          _mm512_maddubs_epi16(reinterpret_cast<__m512i>(weights), reinterpret_cast<__m512i>(x)));
    } else {
      const __mmask64 negative = _mm512_movepi8_mask(reinterpret_cast<__m512i>(weights));
      const __m512i signed_x =
          _mm512_mask_sub_epi8(reinterpret_cast<__m512i>(x), negative, __m512i{}, reinterpret_cast<__m512i>(x));
      sums_ += reinterpret_cast<Pairs>(
          _mm512_maddubs_epi16(_mm512_abs_epi8(reinterpret_cast<__m512i>(weights)), signed_x));
    }
#else
    __m256i sizes = reinterpret_cast<__m256i>(weights), signed_x = reinterpret_cast<__m256i>(x);
    if constexpr (BITS == 8) {
      signed_x = _mm256_sign_epi8(signed_x, sizes);
      sizes = _mm256_abs_epi8(sizes);
    }
    sums_ += reinterpret_cast<Pairs>(_mm256_maddubs_epi16(sizes, signed_x));
#endif
    if constexpr (BITS < 8) add_now(sums_);  // of eight bits no two products are added here
  }
  // Subtract 32 times the sums of the pairs, of half a group: an int32 of Int8Rows in every lane.
  MEMBER void subtract_32_of(Ints pairs) { sums_ -= reinterpret_cast<Pairs>(pairs) << 5; }
  // Return the sum of a row's numbers of a group, of which `pairs` points to those of Int8Rows, times `factor`.
  MEMBER static Ints times(int factor, const int32_t* pairs) {
    const Pairs halves = reinterpret_cast<Pairs>(Ints{} + pairs[0]) + reinterpret_cast<Pairs>(Ints{} + pairs[1]);
    return dot_int16(reinterpret_cast<Int16s>(halves), Int16s{} + static_cast<int16_t>(factor));
  }
  // Return the sums of the products of the halves of the lanes, which are int16.
  MEMBER static Ints dot_halves(Ints a, Ints b) {
    return dot_int16(reinterpret_cast<Int16s>(a), reinterpret_cast<Int16s>(b));
  }
  MEMBER Ints total() const { return dot_int16(reinterpret_cast<Int16s>(sums_), Int16s{} + 1); }
  // Return the total times the scales and `eighths` of Int8Rows; all are in both halves of their lanes.
  MEMBER Ints scaled(Ints scales, Ints eighths) const {
    return dot_int16(reinterpret_cast<Int16s>(sums_),
                     reinterpret_cast<Int16s>(scales) * reinterpret_cast<Int16s>(eighths));
  }

 private:
  typedef uint16_t Pairs __attribute__((vector_size(4 * LANES), aligned(4)));  // unsigned: they may wrap around
  Pairs sums_ = {};
#else
  static constexpr int ADDED = BITS == 8 ? ZERO_POINT : 0, MAX_WORDS = WORDS;
  static constexpr bool IN_PAIRS = false, WRAPS = false;
  MEMBER void add(Words weights, Words x) { sums_ = dot_bytes(sums_, weights, x); }
  MEMBER void subtract(int32_t x) { sums_ -= x; }
  MEMBER Ints total() const { return sums_; }

 private:
  Ints sums_ = {};
#endif

 public:
  static Words ready(Words signed_or_small) { return ADDED ? signed_or_small ^ 0x80808080u : signed_or_small; }
};

// The same of signed bytes whose signs stand apart. WEIGHTS: SizesAndSigns; only AVX2 has add_dots.
template <class WEIGHTS>
struct SignedSums {
  Ints whole;
  MEMBER void add(const WEIGHTS& weights, Words x) { add_dots(whole, weights, x); }
};

// Return a * b - c, of which c is rounded and a * b is not. Of a difference of two products GCC fuses either one, or none,
// and chooses anew for each number of rows.
INLINE Floats multiply_subtract(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_fmsub_ps(reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b), reinterpret_cast<__m512>(c)));
#elif defined(__FMA__)
  return reinterpret_cast<Floats>(
      _mm256_fmsub_ps(reinterpret_cast<__m256>(a), reinterpret_cast<__m256>(b), reinterpret_cast<__m256>(c)));
#else
  return a * b - c;
#endif
}

// Copy the integers of a group into column `column` of its words. at(k): the k-th.
template <class At>
INLINE void put_nibbles(At at, int column, uint8_t* words) {
  for (int k = 0; k < GROUP; ++k) {
    uint8_t* byte = words + (k / 8 * TILE_COLUMNS + column) * 4 + k % 4;
    *byte = static_cast<uint8_t>(k % 8 < 4 ? at(k) & 15 : *byte | (at(k) & 15) << 4);
  }
}
template <class At>
INLINE void put_fifth_bits(At at, int column, uint8_t* words) {
  for (int k = 0; k < GROUP; ++k) {
    uint8_t* byte = words + column * 4 + k % 4;
    *byte = static_cast<uint8_t>((k < 4 ? 0 : *byte) | (at(k) >> 4 & 1) << k / 4);
  }
}
// Three words in the lower bits of three, and the fourth in their upper two bits.
template <class At>
INLINE void put_six_bits(At at, int column, uint8_t* words) {
  for (int k = 0; k < GROUP; ++k) {
    const int word = k / 4 % 4, first = k / 16 * 3;
    auto byte = [&](int i) -> uint8_t& { return words[((first + i) * TILE_COLUMNS + column) * 4 + k % 4]; };
    if (word < 3)
      byte(word) = static_cast<uint8_t>(at(k) & 63);
    else
      for (int i = 0; i < 3; ++i) byte(i) = static_cast<uint8_t>(byte(i) | (at(k) >> (4 - 2 * i) & 3) << 6);
  }
}
template <class At>
INLINE void put_bytes(At at, int column, uint8_t* words) {
  for (int k = 0; k < GROUP; ++k)
    words[(k / 4 * TILE_COLUMNS + column) * 4 + k % 4] = static_cast<uint8_t>(at(k));
}

// Word `word` of a group's weights, for LANES columns.
INLINE Words nibbles(const uint8_t* words, int word) {
  const Words both = load_words(words + word / 2 * TILE_COLUMNS * 4);
  return (word % 2 ? both >> 4 : both) & 0x0f0f0f0fu;
}
INLINE Words fifth_bits(const uint8_t* words, int word) {
  const Words bits = load_words(words);
  return (word < 4 ? bits << (4 - word) : bits >> (word - 4)) & 0x10101010u;
}
INLINE Words six_bits_of(const uint8_t* words, int word) {
  const uint8_t* three = words + word / 4 * 3 * TILE_COLUMNS * 4;
  auto stored = [&](int i) { return load_words(three + i * TILE_COLUMNS * 4); };
  if (word % 4 < 3) return stored(word % 4) & 0x3f3f3f3fu;
  return (stored(0) >> 2 & 0x30303030u) | (stored(1) >> 4 & 0x0c0c0c0cu) | (stored(2) >> 6 & 0x03030303u);
}

// Each format below has
//   BITS, of ByteSums; ZERO, what every weight has added to it;
//   HALVES: scales belong to 16 inputs; SCALED: there are integer scales, MINIMA: and minima; ZEROS: zero points, for each
//   column;
//   inputs(), columns of a file's block; file_bytes(), its size; panel_bytes(), the size of a panel's block;
//   put: copy a file's block into column `column` of a panel's block;
// and of LANES columns of a group in a panel's block, `at` columns on:
//   word: four weights of each; those of 8 bits are signed;
//   scales: integers in both halves of the lanes; of the first or second half of the group;
//   zeros: zero points, of ZEROS;
//   factor: of all that; minimum: what is subtracted, for each unit of the row's sum;
//   minima: integers of two groups, in the halves of the lanes, and minimum_factor, of MINIMA.

template <int TYPE_BITS>
struct PlainDots {  // Q4_0, Q5_0, Q8_0
  static constexpr int BITS = TYPE_BITS, HIGH = BITS == 5 ? 4 : 0;  // bytes of fifth bits
  static constexpr int ZERO = BITS == 8 ? 0 : BITS == 5 ? 16 : 8;
  static constexpr bool HALVES = false, SCALED = false, MINIMA = false, ZEROS = false;
  explicit PlainDots(int) {}
  int inputs() const { return GROUP; }
  int file_bytes() const { return 2 + HIGH + (BITS == 8 ? 32 : 16); }
  int panel_bytes() const { return file_bytes() * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    uint8_t* words = to + (2 + HIGH) * TILE_COLUMNS;
    const uint8_t* integers = from + 2 + HIGH;
    auto nibble = [&](int k) { return integers[k % 16] >> (k / 16 * 4) & 15; };
    if (BITS == 8) return put_bytes([&](int k) { return integers[k]; }, column, words);
    put_nibbles(nibble, column, words);
    if (BITS == 5) put_fifth_bits([&](int k) { return (from[2 + k / 8] >> k % 8 & 1) << 4; }, column, to + 2 * TILE_COLUMNS);
  }
  MEMBER Words word(const uint8_t* block, int, int word, int at) const {
    const uint8_t* words = block + (2 + HIGH) * TILE_COLUMNS + 4 * at;
    if constexpr (BITS == 8) return load_words(words + word * TILE_COLUMNS * 4);
    if constexpr (BITS == 5) return nibbles(words, word) | fifth_bits(block + 2 * TILE_COLUMNS + 4 * at, word);
    return nibbles(words, word);
  }
  MEMBER Ints scales(const uint8_t*, int, int, int) const { return Ints{}; }
  MEMBER Floats minimum(const uint8_t*, int, int) const { return Floats{}; }
  MEMBER Floats factor(const uint8_t* block, int at) const { return load_halves(block + 2 * at); }
};

template <int TYPE_BITS>
struct KDots {  // Q4_K, Q5_K
  static constexpr int BITS = TYPE_BITS, ZERO = 0, HIGH = BITS == 5 ? 4 : 0;  // bytes of fifth bits of a group
  static constexpr int HEAD = 4, GROUP_BYTES = 2 + HIGH + 16;                 // of a column
  static constexpr bool HALVES = false, SCALED = true, MINIMA = true, ZEROS = false;
  explicit KDots(int) {}
  int inputs() const { return 256; }
  int file_bytes() const { return 144 + 8 * HIGH; }
  int panel_bytes() const { return (HEAD + 8 * GROUP_BYTES) * TILE_COLUMNS; }
  // Return the offset of byte `byte` of a group's columns.
  MEMBER static int place(int group, int byte) { return (HEAD + group * GROUP_BYTES + byte) * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    std::memcpy(to + 2 * (TILE_COLUMNS + column), from + 2, 2);
    for (int group = 0; group < 8; ++group) {
      to[place(group, 0) + column] = six_bits(from + 4, group, false);
      to[place(group, 1) + column] = six_bits(from + 4, group, true);
      const uint8_t* integers = from + 16 + 8 * HIGH + group / 2 * 32;
      put_nibbles([&](int k) { return integers[k] >> (group % 2 * 4); }, column, to + place(group, 2 + HIGH));
      if (BITS == 5)
        put_fifth_bits([&](int k) { return (from[16 + k] >> group & 1) << 4; }, column, to + place(group, 2));
    }
  }
  MEMBER Words word(const uint8_t* block, int group, int word, int at) const {
    const Words low = nibbles(block + place(group, 2 + HIGH) + 4 * at, word);
    if constexpr (BITS == 5) return low | fifth_bits(block + place(group, 2) + 4 * at, word);
    return low;
  }
  MEMBER Ints scales(const uint8_t* block, int group, int at, int) const {
    return load_unsigned_twice(block + place(group, 0) + at);
  }
  MEMBER Floats factor(const uint8_t* block, int at) const { return load_halves(block + 2 * at); }
  MEMBER Floats minimum(const uint8_t* block, int group, int at) const {
    return minimum_factor(block, at) * to_floats(load_unsigned(block + place(group, 1) + at));
  }
  MEMBER Ints minima(const uint8_t* block, int pair, int at) const {
    return load_unsigned(block + place(2 * pair, 1) + at) | load_unsigned(block + place(2 * pair + 1, 1) + at) << 16;
  }
  MEMBER Floats minimum_factor(const uint8_t* block, int at) const {
    return load_halves(block + 2 * (TILE_COLUMNS + at));
  }
};

struct Q6KDots {
  static constexpr int BITS = 6, ZERO = 32, HEAD = 2, GROUP_BYTES = 2 + 24;  // of a column
  static constexpr bool HALVES = true, SCALED = true, MINIMA = false, ZEROS = false;
  explicit Q6KDots(int) {}
  int inputs() const { return 256; }
  int file_bytes() const { return 210; }
  int panel_bytes() const { return 210 * TILE_COLUMNS; }
  // Return the offset of byte `byte` of a group's columns.
  MEMBER static int place(int group, int byte) { return (HEAD + group * GROUP_BYTES + byte) * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from + 208, 2);
    auto integer = [&](int k) {
      const int low = from[k / 128 * 64 + k % 64] >> (k / 64 % 2 * 4) & 15;
      return low | (from[128 + k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3) << 4;
    };
    for (int group = 0; group < 8; ++group) {
      auto of_group = [&](int k) { return integer(GROUP * group + k); };
      for (int half = 0; half < 2; ++half) to[place(group, half) + column] = from[192 + 2 * group + half];
      put_six_bits(of_group, column, to + place(group, 2));
    }
  }
  MEMBER Words word(const uint8_t* block, int group, int word, int at) const {
    return six_bits_of(block + place(group, 2) + 4 * at, word);
  }
  MEMBER Ints scales(const uint8_t* block, int group, int at, int half) const {
    return load_signed_twice(block + place(group, half) + at);
  }
  MEMBER Floats minimum(const uint8_t*, int, int) const { return Floats{}; }
  MEMBER Floats factor(const uint8_t* block, int at) const { return load_halves(block + 2 * at); }
};

template <int TYPE_BITS>
struct WordDots {  // U4, I8: blocks as blocks.py makes them
  static constexpr int BITS = TYPE_BITS, ZERO = 0, HEAD = BITS == 4 ? 5 : 4, GROUP_BYTES_OF = BITS == 4 ? 16 : 32;
  static constexpr bool HALVES = false, SCALED = false, MINIMA = false, ZEROS = BITS == 4;
  explicit WordDots(int inputs) : inputs_(inputs) {}
  int inputs() const { return inputs_; }
  int file_bytes() const { return HEAD + inputs_ * BITS / 8; }
  int panel_bytes() const { return file_bytes() * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 4 * column, from, 4);
    if (BITS == 4) to[4 * TILE_COLUMNS + column] = from[4];
    for (int group = 0; group < inputs_ / GROUP; ++group) {
      const uint8_t* integers = from + HEAD + group * GROUP_BYTES_OF;
      uint8_t* words = to + (HEAD + group * GROUP_BYTES_OF) * TILE_COLUMNS;
      if (BITS == 8)
        put_bytes([&](int k) { return integers[k]; }, column, words);
      else
        put_nibbles([&](int k) { return integers[k / 2] >> (k % 2 * 4); }, column, words);
    }
  }
  MEMBER Words word(const uint8_t* block, int group, int word, int at) const {
    const uint8_t* words = block + (HEAD + group * GROUP_BYTES_OF) * TILE_COLUMNS + 4 * at;
    if constexpr (BITS == 8) return load_words(words + word * TILE_COLUMNS * 4);
    return nibbles(words, word);
  }
  MEMBER Ints scales(const uint8_t*, int, int, int) const { return Ints{}; }
  MEMBER Ints zeros(const uint8_t* block, int at) const { return load_unsigned(block + 4 * TILE_COLUMNS + at); }
  MEMBER Floats minimum(const uint8_t* block, int, int at) const {
    if constexpr (BITS == 8) return Floats{};
    return to_floats(zeros(block, at)) * factor(block, at);
  }
  MEMBER Floats factor(const uint8_t* block, int at) const { return load(reinterpret_cast<const float*>(block + 4 * at)); }

 private:
  int inputs_;
};

// Call use(format) with the format's struct; `inputs` matters to U4 and I8 only.
template <class Use>
INLINE void with_format(int32_t format, int inputs, Use use) {
  switch (format) {
    case Q4_0: return use(PlainDots<4>(inputs));
    case Q5_0: return use(PlainDots<5>(inputs));
    case Q8_0: return use(PlainDots<8>(inputs));
    case Q4_K: return use(KDots<4>(inputs));
    case Q5_K: return use(KDots<5>(inputs));
    case Q6_K: return use(Q6KDots(inputs));
    case U4: return use(WordDots<4>(inputs));
    case I8: return use(WordDots<8>(inputs));
  }
}

constexpr int BYTES_AHEAD = 2048;  // prefetch distance in a panel

// Return the size of a group's share of a panel's block, in bytes and in cache lines.
template <class Format>
INLINE int group_bytes(const Format& format) {
  return format.panel_bytes() / (format.inputs() / GROUP);
}
template <class Format>
INLINE int group_lines(const Format& format) {
  return (group_bytes(format) + 63) / 64;
}

// Prefetch `count` cache lines from `first` on of what lies `ahead` bytes after a group of a panel's block.
template <class Format>
INLINE void fetch_lines(const Format& format, const uint8_t* block, int group, ptrdiff_t ahead, int first, int count) {
  const uint8_t* from = block + group * group_bytes(format) + ahead;
  for (int line = first; line < first + count; ++line) __builtin_prefetch(from + line * 64);
}

// What to prefetch beside each group: nothing, as hardware does it.
struct NoPrefetch {
  template <class Format>
  MEMBER void operator()(const Format&, const uint8_t*, int) const {}
};

// What comes BYTES_AHEAD later in the panel.
struct PrefetchAhead {
  template <class Format>
  MEMBER void operator()(const Format& format, const uint8_t* block, int group) const {
    fetch_lines(format, block, group, BYTES_AHEAD, 0, group_lines(format));
  }
};

// One of `num_parts` parts of the next panel, which this thread is likely to multiply next.
struct PrefetchNextPanel {
  int num_in, part, num_parts;

  template <class Format>
  MEMBER void operator()(const Format& format, const uint8_t* block, int group) const {
    const int lines = (group_lines(format) + num_parts - 1) / num_parts;
    const ptrdiff_t panel = static_cast<ptrdiff_t>(num_in / format.inputs()) * format.panel_bytes();
    fetch_lines(format, block, group, panel, part * lines, lines);
  }
};

// ------------------------------------------------------------------------------------ int8 activations

// Add `count` words from `first` on of group `group` of the blocks to the sums of ROWS rows; `numbers`: the group's in
// the first row. blocks[v]: the panel's block of vector v of columns, and at[v] its first column.
template <int ROWS, int VECTORS, class Format, class Sums>
INLINE void add_words(const Format& format, const uint8_t* const* blocks, const int* at, int group, int first,
                      int count, const uint8_t* numbers, int num_in, Sums (&sums)[ROWS][VECTORS]) {
#pragma GCC unroll 8
  for (int word = first; word < first + count; ++word) {
    decltype(format.ready_word(blocks[0], group, word, at[0])) weights[VECTORS];
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) weights[v] = format.ready_word(blocks[v], group, word, at[v]);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      const Words four = Words{} + load_word(numbers + static_cast<ptrdiff_t>(i) * num_in + 4 * word);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[i][v].add(weights[v], four);
    }
  }
}

// Add the blocks, whose first group is `place` in the rows, to the sums of ROWS rows from `row` on. fetch(group):
// prefetch.
template <int ROWS, int VECTORS, class Format, class Fetch>
INLINE void add_block(const Format& format, const uint8_t* const* blocks, const int* at, const Int8Rows& x, int row,
                      int num_in, int place, Fetch fetch, Floats (&total)[ROWS][VECTORS]) {
  using Sums = ByteSums<Format::BITS>;
  constexpr int STEP = std::min(Sums::MAX_WORDS, Format::HALVES ? WORDS / 2 : WORDS);
  const ptrdiff_t groups = num_in / GROUP, first = row * groups + place;
  Ints whole[ROWS][VECTORS] = {};
  for (int group = 0; group < GROUPS_OF_BLOCK; ++group) {
    fetch(group);
    const ptrdiff_t at_group = first + group;
#pragma GCC unroll 8
    for (int word = 0; word < WORDS; word += STEP) {
      Sums sums[ROWS][VECTORS];
      add_words(format, blocks, at, group, word, STEP, x.numbers + at_group * GROUP, num_in, sums);
      if constexpr (Sums::WRAPS)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; ++v)
            sums[i][v].subtract_32_of(Ints{} + x.zero_point_offsets[2 * (at_group + i * groups) + word / STEP]);
      Ints scales[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) scales[v] = format.scales(blocks[v], group, at[v], word * 2 / WORDS);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
          whole[i][v] += sums[i][v].scaled(scales[v], Ints{} + x.eighths[at_group + i * groups]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i) {
    const ptrdiff_t at_row = first + i * groups;
    Ints least[VECTORS] = {};
    if constexpr (Format::MINIMA)
#pragma GCC unroll 4
      for (int pair = 0; pair < GROUPS_OF_BLOCK / 2; ++pair) {
        const Ints two = Ints{} + static_cast<int32_t>(load_word(x.eighth_sums + at_row + 2 * pair));
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v)
          least[v] += Sums::dot_halves(format.minima(blocks[v], pair, at[v]), two);
      }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const Floats factor = format.factor(blocks[v], 0, at[v]);
      Floats sum = to_floats(whole[i][v]);
      if constexpr (Format::MINIMA)
        sum = multiply_subtract(sum, factor, to_floats(least[v]) * format.minimum_factor(blocks[v], at[v]));
      else
        sum *= factor;
      total[i][v] += sum * x.eighth_scales[at_row / GROUPS_OF_BLOCK];
    }
  }
}

// Add group `group` of the blocks to the sums of ROWS rows from `row` on; `place` is the group's index in the rows.
template <int ROWS, int VECTORS, class Format>
INLINE void add_group(const Format& format, const uint8_t* const* blocks, const int* at, int group, const Int8Rows& x,
                      int row, int num_in, int place, Floats (&total)[ROWS][VECTORS]) {
  using Sums = ByteSums<Format::BITS>;
  constexpr int PARTS = Format::HALVES ? 2 : 1, STEP = std::min(Sums::MAX_WORDS, WORDS / PARTS);
  const int groups = num_in / GROUP;
  const uint8_t* numbers = x.numbers + static_cast<ptrdiff_t>(row) * num_in + place * GROUP;
  const float* scales = x.scales + static_cast<ptrdiff_t>(row) * groups + place;
  const int32_t* pairs = x.zero_point_offsets + 2 * (static_cast<ptrdiff_t>(row) * groups + place);
  auto put_total = [&](int i, int v, Ints whole, Floats scale) __attribute__((always_inline)) {
    if constexpr (Format::ZEROS)
      whole -= format.zeros(blocks[v], group, at[v]) * sum_of_part<1>(pairs + 2 * i * groups, 0);
    total[i][v] += to_floats(whole) * scale * scales[i * groups];
  };
  if constexpr (Format::SIGNS) {
    SignedSums<SizesAndSigns> sums[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) sums[i][v].whole = format.negatives(group, at[v]);
    add_words(format, blocks, at, group, 0, WORDS, numbers, num_in, sums);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) put_total(i, v, sums[i][v].whole, format.factor(blocks[v], group, at[v]));
  } else if constexpr (Sums::IN_PAIRS) {
    Ints whole[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int word = 0; word < WORDS; word += STEP) {
      Sums sums[ROWS][VECTORS];
      add_words(format, blocks, at, group, word, STEP, numbers, num_in, sums);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
          const Ints part = sums[i][v].total();
          whole[i][v] = word ? whole[i][v] + part : part;
          if constexpr (Sums::MAX_WORDS == 1) add_now(whole[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
      Ints zero = {};
      if constexpr (!Format::ZEROS && Format::BITS < 8) zero = Sums::times(format.zero(), pairs + 2 * i * groups);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        put_total(i, v, whole[i][v] - zero, format.factor(blocks[v], group, at[v]));
    }
  } else {
#pragma GCC unroll 2
    for (int part = 0; part < PARTS; ++part) {
      Sums sums[ROWS][VECTORS];
      if constexpr (!Format::ZEROS && !Format::MINIMA)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const int32_t zero = format.zero() * sum_of_part<PARTS>(pairs + 2 * i * groups, part);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; ++v) sums[i][v].subtract(zero);
        }
      add_words(format, blocks, at, group, part * STEP, STEP, numbers, num_in, sums);
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          put_total(i, v, sums[i][v].total(), format.scale(blocks[v], group, at[v], part));
    }
    if constexpr (Format::MINIMA)
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v) {
        const Floats minimum = format.minimum(blocks[v], group, at[v]);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          total[i][v] -= minimum * x.group_sums[static_cast<ptrdiff_t>(row + i) * groups + place];
      }
  }
}

// A part of a panel, for several rows: all that add_group asks a format for, in the L1 cache.
template <int TYPE_BITS, bool IN_HALVES, bool HAS_SCALES, bool HAS_MINIMA, bool HAS_ZEROS>
class alignas(64) Int8Tile {
 public:
  static constexpr int BITS = TYPE_BITS, GROUPS = HAS_SCALES ? GROUPS_OF_BLOCK : 4;  // with scales, a block
  static constexpr bool HALVES = IN_HALVES, SCALED = HAS_SCALES, MINIMA = HAS_MINIMA, ZEROS = HAS_ZEROS;
  static constexpr bool SIGNS = BITS == 8 && ByteSums<BITS>::IN_PAIRS;  // apart from the sizes

  // Unpack group `group` of a panel's block to place `to`.
  template <class Panel>
  MEMBER void unpack(const Panel& format, const uint8_t* block, int group, int to) {
    zero_ = format.zero();
#pragma GCC unroll 4
    for (int at = 0; at < TILE_COLUMNS; at += LANES) {
#pragma GCC unroll 8
      for (int word = 0; word < WORDS; ++word) put(words_[to][word] + at, format.ready_word(block, group, word, at));
      if constexpr (SIGNS) put_signs_apart(to, at);
#pragma GCC unroll 2
      for (int half = 0; half < (HALVES ? 2 : 1); ++half)
        if constexpr (!IN_PAIRS)
          store(factors_[to][half] + at, format.scale(block, group, at, half));
        else if constexpr (HAS_SCALES)
          put(scales_[to][half] + at, format.scales(block, group, at, half));
      if constexpr (IN_PAIRS) store(factors_[to][0] + at, format.factor(block, group, at));
      if constexpr (ZEROS) put(zeros_[to] + at, format.zeros(block, group, at));
      if constexpr (MINIMA && !HAS_SCALES) store(minima_[to] + at, format.minimum(block, group, at));
      if constexpr (MINIMA && HAS_SCALES)
        if (group % 2 == 0) put(pairs_of_minima_[to / 2] + at, format.minima(block, group / 2, at));
      if constexpr (MINIMA && HAS_SCALES) store(minima_[0] + at, format.minimum_factor(block, at));
    }
  }
  int zero() const { return zero_; }
  MEMBER auto ready_word(const uint8_t*, int group, int word, int at) const {
    const Words stored = *reinterpret_cast<const Words*>(words_[group][word] + at);
    if constexpr (SIGNS)
      return SizesAndSigns{stored, *reinterpret_cast<const Words*>(signs_[group][word] + at)};
    else
      return stored;
  }
  // Return the sums of the sizes of negative weights.
  MEMBER Ints negatives(int group, int at) const { return *reinterpret_cast<const Ints*>(negatives_[group] + at); }
  MEMBER Ints scales(const uint8_t*, int group, int at, int half) const {
    return *reinterpret_cast<const Ints*>(scales_[group][HALVES ? half : 0] + at);
  }
  MEMBER Ints zeros(const uint8_t*, int group, int at) const {
    return *reinterpret_cast<const Ints*>(zeros_[group] + at);
  }
  MEMBER Floats factor(const uint8_t*, int group, int at) const { return load(factors_[group][0] + at); }
  MEMBER Floats scale(const uint8_t*, int group, int at, int half) const { return load(factors_[group][half] + at); }
  MEMBER Floats minimum(const uint8_t*, int group, int at) const { return load(minima_[group] + at); }
  MEMBER Ints minima(const uint8_t*, int pair, int at) const {
    return *reinterpret_cast<const Ints*>(pairs_of_minima_[pair] + at);
  }
  MEMBER Floats minimum_factor(const uint8_t*, int at) const { return load(minima_[0] + at); }

 private:
  static constexpr bool IN_PAIRS = ByteSums<BITS>::IN_PAIRS;
  static void put(uint32_t* to, Words x) { *reinterpret_cast<Words*>(to) = x; }
  static void put(int32_t* to, Ints x) { *reinterpret_cast<Ints*>(to) = x; }
  MEMBER void put_signs_apart(int group, int at) {
    ByteSums<6> sum;  // sizes are up to 128, signs 0 or -1: all pairs of a group fit into int16
#pragma GCC unroll 8
    for (int word = 0; word < WORDS; ++word) {
      const SizesAndSigns parts = sizes_and_signs(*reinterpret_cast<const Words*>(words_[group][word] + at));
      put(words_[group][word] + at, parts.sizes), put(signs_[group][word] + at, parts.signs);
      sum.add(parts.sizes, parts.signs);
    }
    put(negatives_[group] + at, -sum.total());
  }

  uint32_t words_[GROUPS][WORDS][TILE_COLUMNS], signs_[SIGNS ? GROUPS : 1][WORDS][TILE_COLUMNS];
  int32_t negatives_[SIGNS ? GROUPS : 1][TILE_COLUMNS];
  int32_t scales_[GROUPS][2][TILE_COLUMNS], zeros_[GROUPS][TILE_COLUMNS];
  float factors_[GROUPS][2][TILE_COLUMNS], minima_[GROUPS][TILE_COLUMNS];
  int32_t pairs_of_minima_[GROUPS / 2][TILE_COLUMNS];
  int zero_;
};

// Formats with the same sums have the same tile: products with it are compiled once.
template <class Format, class Sums = ByteSums<Format::BITS>>
Int8Tile<Sums::IN_PAIRS ? Format::BITS : 4, Format::HALVES, Format::SCALED && Sums::IN_PAIRS, Format::MINIMA,
         Format::ZEROS>
tile_for(const Int8Rows&, const Format&);

// -------------------------------------------------------------------------------- bfloat16 activations

#if defined(__AVX512BF16__)

// Return the bits of a small integer as bfloat16.
constexpr uint16_t bfloat16_bits(int number) {
  if (number == 0) return 0;
  const int size = number < 0 ? -number : number;
  int exponent = 7;
  while (!(size >> exponent & 1)) --exponent;
  return static_cast<uint16_t>((number < 0 ? 0x8000 : 0) | (127 + exponent) << 7 | (size << (7 - exponent) & 127));
}

template <int ZERO>
struct alignas(64) Bf16Table {
  uint16_t values[64];
  constexpr Bf16Table() : values() {
    for (int i = 0; i < 64; ++i) values[i] = bfloat16_bits(i - ZERO);
  }
};

// Return two of the four weights of each column as bfloat16: the first and third, or the others if `is_odd`.
template <int BITS, int ZERO>
INLINE Words bf16_pair(Words word, bool is_odd) {
  if constexpr (BITS == 8) {
    // A byte is converted where it lies, with 128 added, as shifts are slow; only the last one has its sign there.
    auto number = [&](uint32_t byte, uint32_t sign, float unit) {
      return to_floats(reinterpret_cast<Ints>((word ^ sign) & byte)) * unit - (sign ? 128.0f : 0.0f);
    };
    const Floats first = is_odd ? number(0xff00u, 0x8000u, 0x1p-8f) : number(0xffu, 0x80u, 1.0f);
    const Floats second = is_odd ? number(0xff000000u, 0, 0x1p-24f) : number(0xff0000u, 0x800000u, 0x1p-16f);
    return reinterpret_cast<Words>(first) >> 16 | (reinterpret_cast<Words>(second) & 0xffff0000u);
  }
  static constexpr Bf16Table<ZERO> TABLE;
  const __m512i lower = _mm512_load_si512(TABLE.values), upper = _mm512_load_si512(TABLE.values + 32);
  const __m512i index = reinterpret_cast<__m512i>(is_odd ? word >> 8 : word);
  return reinterpret_cast<Words>(BITS == 6 ? _mm512_permutex2var_epi16(lower, index, upper)
                                           : _mm512_permutexvar_epi16(index, lower));
}

template <int ROWS, int VECTORS, class Format>
INLINE void add_group(const Format& format, const uint8_t* const* blocks, const int* at, int group, const Bf16Rows& x,
                      int row, int num_in, int place, Floats (&total)[ROWS][VECTORS]) {
  constexpr int STEP = Format::HALVES ? WORDS / 2 : WORDS;
  const BFloat16* numbers = x.numbers + static_cast<ptrdiff_t>(row) * num_in + place * GROUP;
#pragma GCC unroll 2
  for (int word = 0; word < WORDS; word += STEP) {
    Floats sums[ROWS][VECTORS] = {};
#pragma GCC unroll 8
    for (int step = word; step < word + STEP; ++step)
#pragma GCC unroll 2
      for (int odd = 0; odd < 2; ++odd) {
        Words weights[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) weights[v] = format.pair(blocks[v], group, step, odd, at[v]);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i) {
          const Words two = Words{} + load_word(numbers + static_cast<ptrdiff_t>(i) * num_in + 4 * step + 2 * odd);
#pragma GCC unroll 8
          for (int v = 0; v < VECTORS; ++v) sums[i][v] = dot_add(sums[i][v], weights[v], two);
        }
      }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const Floats scale = format.scale(blocks[v], group, at[v], word / (WORDS / 2));
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i) total[i][v] += sums[i][v] * scale;
    }
  }
  if constexpr (Format::MINIMA || Format::ZEROS)
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) {
      const Floats minimum = format.minimum(blocks[v], group, at[v]);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
        total[i][v] -= minimum * x.group_sums[static_cast<ptrdiff_t>(row + i) * (num_in / GROUP) + place];
    }
}

// The same for bfloat16.
template <bool IN_HALVES, bool HAS_MINIMA>
class alignas(64) Bf16Tile {
 public:
  static constexpr int GROUPS = 4;
  static constexpr bool HALVES = IN_HALVES, MINIMA = HAS_MINIMA, ZEROS = false;

  // Unpack group `group` of a panel's block to place `to`.
  template <class Panel>
  MEMBER void unpack(const Panel& format, const uint8_t* block, int group, int to) {
#pragma GCC unroll 4
    for (int at = 0; at < TILE_COLUMNS; at += LANES) {
#pragma GCC unroll 8
      for (int word = 0; word < WORDS; ++word)
        for (int odd = 0; odd < 2; ++odd)
          *reinterpret_cast<Words*>(pairs_[to][2 * word + odd] + at) = format.pair(block, group, word, odd, at);
#pragma GCC unroll 2
      for (int half = 0; half < (HALVES ? 2 : 1); ++half)
        store(scales_[to][half] + at, format.scale(block, group, at, half));
      if constexpr (MINIMA) store(minima_[to] + at, format.minimum(block, group, at));
    }
  }
  MEMBER Words pair(const uint8_t*, int group, int word, bool odd, int at) const {
    return *reinterpret_cast<const Words*>(pairs_[group][2 * word + odd] + at);
  }
  MEMBER Floats scale(const uint8_t*, int group, int at, int half) const { return load(scales_[group][half] + at); }
  MEMBER Floats minimum(const uint8_t*, int group, int at) const { return load(minima_[group] + at); }

 private:
  uint32_t pairs_[GROUPS][2 * WORDS][TILE_COLUMNS];
  float scales_[GROUPS][2][TILE_COLUMNS], minima_[GROUPS][TILE_COLUMNS];
};

template <class Format>
Bf16Tile<Format::HALVES, Format::MINIMA || Format::ZEROS> tile_for(const Bf16Rows&, const Format&);

#endif

// ---------------------------------------------------------------------------------------- the products

// A format's blocks where they lie in a panel, as add_group and the tiles ask for them.
template <class Format>
struct InPanel : Format {
  explicit InPanel(const Format& format) : Format(format) {}
  static constexpr bool SIGNS = false;
  static constexpr int zero() { return Format::ZERO + ByteSums<Format::BITS>::ADDED; }
  MEMBER Words ready_word(const uint8_t* block, int group, int word, int at) const {
    return ByteSums<Format::BITS>::ready(this->word(block, group, word, at));
  }
  MEMBER Floats factor(const uint8_t* block, int, int at) const { return Format::factor(block, at); }
  MEMBER Ints zeros(const uint8_t* block, int, int at) const { return Format::zeros(block, at); }
#if defined(__AVX512BF16__)
  MEMBER Words pair(const uint8_t* block, int group, int word, bool is_odd, int at) const {
    return bf16_pair<Format::BITS, Format::ZERO>(this->word(block, group, word, at), is_odd);
  }
#endif
  // Return the scale that integers have in the end, which is exact.
  MEMBER Floats scale(const uint8_t* block, int group, int at, int half) const {
    const Floats factor = Format::factor(block, at);
    return Format::SCALED ? factor * to_floats(this->scales(block, group, at, half) << 16 >> 16) : factor;
  }
};

// Return whether products of a block of 256 inputs are integers up to the end.
template <class Format, class Rows>
constexpr bool sums_blocks() {
  if constexpr (std::is_same_v<Rows, Int8Rows>) return Format::SCALED && ByteSums<Format::BITS>::IN_PAIRS;
  return false;
}

// total = ROWS rows times vectors of columns of panels as they are; `fetches`: prefetch.
template <int ROWS, int VECTORS, class Format, class Rows, class Prefetch>
INLINE void dot_panels(const Format& format, const uint8_t* const* panels, const int* at, const Rows& x, int row,
                       int num_in, bool fetches, Prefetch prefetch, Floats (&total)[ROWS][VECTORS]) {
  const InPanel<Format> in_panel(format);
  const int per_block = format.inputs() / GROUP;
  const uint8_t* blocks[VECTORS];
  std::copy(panels, panels + VECTORS, blocks);
  auto fetch = [&](int group) __attribute__((always_inline)) {
    if (fetches) prefetch(format, blocks[0], group);
  };
  for (int place = 0; place < num_in / GROUP; place += per_block) {
    if constexpr (sums_blocks<Format, Rows>())
      add_block(in_panel, blocks, at, x, row, num_in, place, fetch, total);
    else
      for (int group = 0; group < per_block; ++group) {
        fetch(group);
        add_group(in_panel, blocks, at, group, x, row, num_in, place + group, total);
      }
#pragma GCC unroll 8
    for (int v = 0; v < VECTORS; ++v) blocks[v] += format.panel_bytes();
  }
}

constexpr int PAIR = 2;  // vectors at once for several rows: sums and weights of more would not fit into the registers

// Return whether all sums of a group and of the rows fit, so that the panel is read as one ascending stream. Hardware
// prefetches it best: with pairs of vectors in turns, or with prefetches of our own, a row was half as fast.
constexpr bool reads_in_order(int rows) { return TILE_VECTORS == PAIR || (2 * rows + 1) * TILE_VECTORS < REGISTERS; }

// sums[ROWS][TILE_COLUMNS] = a few rows times a panel.
template <int ROWS, class Format, class Rows, class Prefetch>
__attribute__((noinline)) void dot_few(const Format& format, const uint8_t* panel, const Rows& x, int row, int num_in,
                                       Prefetch prefetch, float* sums) {
  constexpr int VECTORS = reads_in_order(ROWS) ? TILE_VECTORS : PAIR;
  const uint8_t* panels[VECTORS];
  std::fill(panels, panels + VECTORS, panel);
  for (int from = 0; from < TILE_VECTORS; from += VECTORS) {
    int at[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) at[v] = (from + v) * LANES;
    Floats total[ROWS][VECTORS] = {};
    dot_panels(format, panels, at, x, row, num_in, from == 0, prefetch, total);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) store(sums + i * TILE_COLUMNS + (from + v) * LANES, total[i][v]);
  }
}

// Return for how many rows sums fit into 16 registers: fewer if there are those of a block, too, or signs of weights.
template <class Tile, class Rows>
constexpr int most_rows_of_tile() {
  if constexpr (REGISTERS == 16 && std::is_same_v<Rows, Int8Rows>)
    return sums_blocks<Tile, Rows>() ? 4 : Tile::SIGNS ? 3 : TILE_ROWS;
  return TILE_ROWS;
}

// sums[rows][TILE_COLUMNS] = (where `place` is 0) or += rows times the first `count` groups of a tile, the rows' from
// `place` on.
template <class Tile, class Rows>
__attribute__((noinline)) void dot_tile(const Tile& tile, const Rows& x, int row, int num_in, int rows, int place,
                                        int count, NextWeights next, float* sums) {
  constexpr int MOST = most_rows_of_tile<Tile, Rows>();
  in_groups<MOST>(rows, [&](auto size, int first) {
    constexpr int ROWS = size.value;
    next.fetch_beside(first, ROWS, rows);
    const uint8_t* const none[PAIR] = {};
    for (int from = 0; from < TILE_VECTORS; from += PAIR) {
      const int at[PAIR] = {from * LANES, (from + 1) * LANES};
      float* mine = sums + first * TILE_COLUMNS + from * LANES;
      Floats total[ROWS][PAIR] = {};
      if (place)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
          for (int v = 0; v < PAIR; ++v) total[i][v] = load(mine + i * TILE_COLUMNS + v * LANES);
      if constexpr (sums_blocks<Tile, Rows>())
        add_block(tile, none, at, x, row + first, num_in, place, [](int) __attribute__((always_inline)) {}, total);
      else
        for (int group = 0; group < count; ++group)
          add_group(tile, none, at, group, x, row + first, num_in, place + group, total);
#pragma GCC unroll 8
      for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 2
        for (int v = 0; v < PAIR; ++v) store(mine + i * TILE_COLUMNS + v * LANES, total[i][v]);
    }
  });
}

#if defined(AMX_TILES)
template <class Rows, bool HALVES, bool MINIMA>
void dot_tile(const AmxBlockTile<Rows, HALVES, MINIMA>& tile, const Rows& x, int row, int num_in, int rows, int place,
              int count, NextWeights next, float* sums) {
  next.fetch_beside(0, rows, rows);
  tile.multiply(x, row, num_in, rows, place, count, sums);
}
#endif

// sums[rows][TILE_COLUMNS] = many rows times a panel, of which a part at a time is unpacked once for all of them.
template <class Tile, class Format, class Rows>
__attribute__((noinline)) void dot_many(const Format& format, const uint8_t* panel, const Rows& x, int row, int num_in,
                                        int rows, float* sums) {
  Tile tile;
  const InPanel<Format> blocks(format);
  const int groups = num_in / GROUP, per_block = format.inputs() / GROUP;
  auto block_of = [&](int place) { return panel + static_cast<ptrdiff_t>(place / per_block) * format.panel_bytes(); };
  for (int place = 0; place < groups; place += tile.GROUPS) {
    const int count = std::min(tile.GROUPS, groups - place), size = group_bytes(format), end = place + count;
    for (int i = 0; i < count; ++i) tile.unpack(blocks, block_of(place + i), (place + i) % per_block, i);
    const NextWeights next{block_of(end) + end % per_block * size, tile.GROUPS * size};
    dot_tile(tile, x, row, num_in, rows, place, count, next, sums);
  }
}

template <class Rows>
INLINE void dot_rows_of(const BlockPanel& panel, const Rows& x, int row, int num_in, int rows, float* sums) {
  with_format(panel.format, panel.inputs, [&](auto format) {
    // VNNI multiplies in other units than those that unpack: it takes less time to unpack for each group of rows than to
    // store and load.
#if defined(__AVX512VNNI__)
    constexpr bool UNPACKS = !std::is_same_v<Rows, Int8Rows>;
#else
    constexpr bool UNPACKS = true;
#endif
    using Tile = decltype(tile_for(x, format));
#if defined(AMX_TILES)
    using Format = decltype(format);
    // Zero points of columns are subtracted from int8 weights, and from the sums of bfloat16.
    constexpr bool MINIMA = Format::MINIMA || (Format::ZEROS && !std::is_same_v<Rows, Int8Rows>);
    using AmxTile = AmxBlockTile<Rows, Format::HALVES, MINIMA>;
    if (rows > TILE_ROWS && amx_usable()) {
      const AmxTiles shapes = AmxTile::shapes(rows);
      return dot_many<AmxTile>(format, panel.blocks, x, row, num_in, rows, sums);
    }
#endif
    if constexpr (UNPACKS)
      if (rows > TILE_ROWS) return dot_many<Tile>(format, panel.blocks, x, row, num_in, rows, sums);
    // The first rows take the panel from memory. Those after them find it in the L2 cache, and fetch the next one.
    PrefetchNextPanel next{num_in, 0, (rows - 1) / TILE_ROWS};
    in_groups(rows, [&](auto size, int first) {
      constexpr int ROWS = size.value;
      using Ahead = std::conditional_t<reads_in_order(ROWS), NoPrefetch, PrefetchAhead>;
      float* mine = sums + first * TILE_COLUMNS;
      if (UNPACKS || first == 0) return dot_few<ROWS>(format, panel.blocks, x, row + first, num_in, Ahead(), mine);
      if constexpr (!UNPACKS) dot_few<ROWS>(format, panel.blocks, x, row + first, num_in, next, mine);
      ++next.part;
    });
  });
}

}  // namespace

void dot_block_rows(const BlockPanel& panel, const Int8Rows& x, int row, int num_in, int rows, float* sums) {
  dot_rows_of(panel, x, row, num_in, rows, sums);
}

#if defined(__AVX512BF16__)
void dot_block_rows(const BlockPanel& panel, const Bf16Rows& x, int row, int num_in, int rows, float* sums) {
  dot_rows_of(panel, x, row, num_in, rows, sums);
}
#endif

// Return whether the product of blocks takes bfloat16 rows, see gemm/block_dots.h.
EXPORT int32_t triolet_block_dots_take_bf16() {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}

// rows: [num_out, num_in / inputs] blocks as a file has them. A panel takes as many bytes as that of triolet_pack_blocks.
EXPORT void triolet_pack_block_dots(int32_t format, int32_t inputs, const uint8_t* rows, int32_t num_out,
                                    int32_t num_in, int32_t gated, int32_t num_threads, uint8_t* packed) {
  with_format(format, inputs,
              [&](auto blocks) { pack_blocks(blocks, rows, num_out, num_in, gated, num_threads, packed); });
}
