// Prefill attention for bfloat16 on AMX: keys and values are multiplied as they are stored, without widening.
//
// Both products are column-major (one column per query row), so that softmax_rows of prefill.h runs between them:
//   scores [key, row]  = keys [key, dim] @ queries^T [dim, row]
//   out [dim, row]    += values^T [dim, key] @ weights [key, row]
// The second operand of a product is interleaved in pairs (VNNI layout): a 32-bit word holds rows 2 i and 2 i + 1 of a
// column.

#pragma once

#include "attention/prefill.h"
#include "gemm/amx.h"

#if defined(AMX_TILES)

// AMX tile configuration of one attention: tiles 0 to 3 hold sums, 4 and 5 sixteen rows of the first and the second
// operand. Tiles 6 and 7 are the same for the remainder of head_dim after the last multiple of 32.
class AttentionTiles {
 public:
  explicit AttentionTiles(int dim) {
    const int rest = dim % 32;
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile)
      shapes.set(tile, tile == 7 && rest ? rest / 2 : 16, tile == 6 && rest ? 2 * rest : 64);
    shapes.load();
  }
  ~AttentionTiles() { _tile_release(); }
  AttentionTiles(const AttentionTiles&) = delete;
  AttentionTiles& operator=(const AttentionTiles&) = delete;
};

// Transpose 16 x 16 words: to[j][i] = from[i][j].
INLINE void transpose_words(const __m512i* from, uint32_t* to, ptrdiff_t to_row) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(from[i], from[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(from[i], from[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + j + 2]);
      b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + j + 2]);
    }
  for (int i = 0; i < 4; ++i)
    for (int j = 0; j < 2; ++j) {
      a[i + 8 * j] = _mm512_shuffle_i32x4(b[i + 8 * j], b[i + 8 * j + 4], 0x88);
      a[i + 8 * j + 4] = _mm512_shuffle_i32x4(b[i + 8 * j], b[i + 8 * j + 4], 0xdd);
    }
  for (int i = 0; i < 8; ++i) {
    _mm512_storeu_si512(to + i * to_row, _mm512_shuffle_i32x4(a[i], a[i + 8], 0x88));
    _mm512_storeu_si512(to + (i + 8) * to_row, _mm512_shuffle_i32x4(a[i], a[i + 8], 0xdd));
  }
}

INLINE __m512i load_16_words(const BFloat16* from) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}

// Transpose a tile's values to words [dim, KEYS / 2], pairs of keys interleaved; keys outside of [lo, hi) are zeros.
INLINE void transpose_values(const BFloat16* const* value, int lo, int hi, int dim, uint32_t* words) {
  for (int d = 0; d < dim; d += 16)
    for (int first = 0; first < KEYS; first += 32) {
      __m512i pairs[16];
      for (int i = 0; i < 16; ++i) {
        const int key = first + 2 * i;
        const __m512i even = key >= lo && key < hi ? load_16_words(value[key] + d) : _mm512_setzero_si512();
        const __m512i odd = key + 1 >= lo && key + 1 < hi ? load_16_words(value[key + 1] + d) : _mm512_setzero_si512();
        pairs[i] = _mm512_or_si512(even, _mm512_slli_epi32(odd, 16));
      }
      transpose_words(pairs, words + d * (KEYS / 2) + first / 2, KEYS / 2);
    }
}

// Load the accumulator tiles from `sums`; null clears them.
template <int VECTORS>
INLINE void begin_sums(const float* sums) {
  constexpr int ROW = VECTORS * 64;
  if (!sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, sums, ROW);
  if constexpr (VECTORS > 1) _tile_loadd(1, sums + 16, ROW);
  if constexpr (VECTORS > 2) _tile_loadd(2, sums + 32, ROW);
  if constexpr (VECTORS > 3) _tile_loadd(3, sums + 48, ROW);
}

// Store the accumulator tiles.
template <int VECTORS>
INLINE void end_sums(float* sums) {
  constexpr int ROW = VECTORS * 64;
  _tile_stored(0, sums, ROW);
  if constexpr (VECTORS > 1) _tile_stored(1, sums + 16, ROW);
  if constexpr (VECTORS > 2) _tile_stored(2, sums + 32, ROW);
  if constexpr (VECTORS > 3) _tile_stored(3, sums + 48, ROW);
}

// Add tile FIRST times each column tile of the second operand, loaded through tile SECOND, to the accumulators. A
// macro, because the intrinsics accept only literal tile numbers.
#define ADD_TILES(FIRST, SECOND)                                        \
  do {                                                                  \
    constexpr int ROW = VECTORS * 64;                                   \
    _tile_loadd(SECOND, words, ROW);                                    \
    _tile_dpbf16ps(0, FIRST, SECOND);                                   \
    if constexpr (VECTORS > 1) _tile_loadd(SECOND, words + 16, ROW);    \
    if constexpr (VECTORS > 1) _tile_dpbf16ps(1, FIRST, SECOND);        \
    if constexpr (VECTORS > 2) _tile_loadd(SECOND, words + 32, ROW);    \
    if constexpr (VECTORS > 2) _tile_dpbf16ps(2, FIRST, SECOND);        \
    if constexpr (VECTORS > 3) _tile_loadd(SECOND, words + 48, ROW);    \
    if constexpr (VECTORS > 3) _tile_dpbf16ps(3, FIRST, SECOND);        \
  } while (false)

// scores [16, VECTORS * 16] = sixteen consecutive keys times the interleaved queries.
template <int VECTORS>
INLINE void score_tiles(const BFloat16* keys, ptrdiff_t key_row, const uint32_t* queries, int dim, float* scores) {
  begin_sums<VECTORS>(nullptr);
  const int whole = dim / 32 * 32;
  for (int d = 0; d < whole; d += 32) {
    const uint32_t* words = queries + d / 2 * VECTORS * 16;
    _tile_loadd(4, keys + d, key_row * sizeof(BFloat16));
    ADD_TILES(4, 5);
  }
  if (whole < dim) {
    const uint32_t* words = queries + whole / 2 * VECTORS * 16;
    _tile_loadd(6, keys + whole, key_row * sizeof(BFloat16));
    ADD_TILES(6, 7);
  }
  end_sums<VECTORS>(scores);
}

// out [dim, VECTORS * 16] += transposed values times interleaved weights.
template <int VECTORS>
INLINE void accumulate_value_tiles(const uint32_t* values, const uint32_t* weights, int dim, float* out) {
  for (int d = 0; d < dim; d += 16) {
    float* sums = out + d * VECTORS * 16;
    begin_sums<VECTORS>(sums);
    for (int pair = 0; pair < KEYS / 2; pair += 16) {
      const uint32_t* words = weights + pair * VECTORS * 16;
      _tile_loadd(4, values + d * (KEYS / 2) + pair, KEYS / 2 * sizeof(uint32_t));
      ADD_TILES(4, 5);
    }
    end_sums<VECTORS>(sums);
  }
}

// Round rows to bfloat16 and interleave rows 2 i and 2 i + 1 in words[i]. Adding 0x8000 rounds correctly because
// softmax weights are finite and not negative.
template <int VECTORS>
INLINE void interleave_pairs(const float* rows, int num_rows, uint32_t* words) {
  constexpr int WIDTH = VECTORS * LANES;
  for (int i = 0; i < num_rows; i += 2)
    for (int j = 0; j < WIDTH; j += LANES) {
      const Words even = reinterpret_cast<Words>(load(rows + i * WIDTH + j)) + 0x8000u;
      const Words odd = reinterpret_cast<Words>(load(rows + (i + 1) * WIDTH + j)) + 0x8000u;
      *reinterpret_cast<Words*>(words + i / 2 * WIDTH + j) = (even >> 16) | (odd & 0xffff0000u);
    }
}

// Transpose the query rows to words [dim / 2, WIDTH], pairs of dims interleaved; columns past the last row are zeros.
template <int WIDTH>
INLINE void transpose_queries(const AttentionRows<BFloat16>& work, uint32_t* queries) {
  const int words = work.head_dim / 2;
  for (int first = 0; first < WIDTH; first += 16)
    for (int d = 0; d < words; d += 16) {
      const __mmask16 mask = words - d < 16 ? 0x00ff : 0xffff;
      __m512i rows[16];
      for (int i = 0; i < 16; ++i)
        rows[i] = first + i < work.num_rows ? _mm512_maskz_loadu_epi32(mask, work.query_row(first + i) + 2 * d)
                                            : _mm512_setzero_si512();
      transpose_words(rows, queries + d * WIDTH + first, WIDTH);
    }
}

// Transpose out [dim, WIDTH] back, divide by the softmax totals and store the rows; `buffer` is [16, dim].
template <int WIDTH>
INLINE void transpose_out(const AttentionRows<BFloat16>& work, const float* out, const float* total, float* buffer) {
  const int dim = work.head_dim;
  for (int first = 0; first < work.num_rows; first += 16) {
    for (int d = 0; d < dim; d += 16) {
      __m512i columns[16];
      for (int i = 0; i < 16; ++i) columns[i] = _mm512_loadu_si512(out + (d + i) * WIDTH + first);
      transpose_words(columns, reinterpret_cast<uint32_t*>(buffer + d), dim);
    }
    for (int i = 0; i < std::min(16, work.num_rows - first); ++i)
      narrow_row(buffer + i * dim, dim, 1.0f / total[first + i], work.out_row(first + i));
  }
}

// Tiles load sixteen keys with one stride, so sixteen aligned positions must be contiguous in one block.
INLINE bool can_use_amx(const AttentionRows<BFloat16>& work) {
  return amx_usable() && work.head_dim % 16 == 0 && work.keys.block_size % 16 == 0;
}

template <int VECTORS>
static void attend_prefill_amx(const AttentionRows<BFloat16>& work, Scratch& scratch) {
  constexpr int WIDTH = VECTORS * LANES;
  const int dim = work.head_dim;
  float* out = scratch.floats(static_cast<size_t>(dim) * (WIDTH + 16 + KEYS / 2 + WIDTH / 2) + (2 * KEYS + 8) * WIDTH);
  float* buffer = out + dim * WIDTH;                                       // [16, dim]
  float* scores = buffer + 16 * dim;                                       // [KEYS, WIDTH]
  uint32_t* weights = reinterpret_cast<uint32_t*>(scores + KEYS * WIDTH);  // [KEYS / 2, WIDTH]
  uint32_t* values = weights + KEYS / 2 * WIDTH;                           // [dim, KEYS / 2]
  uint32_t* queries = values + dim * (KEYS / 2);                           // [dim / 2, WIDTH], sixteen rows at a time
  std::fill(out, out + dim * WIDTH, 0.0f);
  transpose_queries<WIDTH>(work, queries);
  RowState<WIDTH> rows(work);
  const AttentionTiles tiles(dim);
  const int begin = work.begin(0), end = work.end(work.num_rows - 1);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS), first = lo / 16 * 16;
    const BFloat16 *key[KEYS], *value[KEYS];
    work.keys.rows(tile + first, tile + hi, key + first);
    for (int i = first; i < hi; i += 16)
      score_tiles<VECTORS>(key[i], work.keys.slot_stride, queries, dim, scores + i * WIDTH);
    softmax_rows<VECTORS>(scores, tile, work.scale, work.soft_cap, rows, out, dim);
    work.values.rows(tile + lo, tile + hi, value + lo);
    transpose_values(value, lo, hi, dim, values);
    interleave_pairs<VECTORS>(scores, KEYS, weights);
    accumulate_value_tiles<VECTORS>(values, weights, dim, out);
  }
  transpose_out<WIDTH>(work, out, rows.total, buffer);
}

#undef ADD_TILES
#endif

// Prefill attention, on AMX where it applies.
template <class T>
static void attend_prefill(const AttentionRows<T>& work, Scratch& scratch) {
#if defined(AMX_TILES)
  if constexpr (std::is_same<T, BFloat16>::value) {
    if (can_use_amx(work)) {
      for (int first = 0; first < work.num_rows; first += TILE_COLUMNS) {
        const AttentionRows<T> part = work.part(first, std::min(TILE_COLUMNS, work.num_rows - first));
        with_vectors(part.num_rows, [&](auto vectors) { attend_prefill_amx<vectors>(part, scratch); });
      }
      return;
    }
  }
#endif
  attend_strips(work, scratch);
}
