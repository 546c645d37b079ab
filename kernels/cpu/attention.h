// Attention of some queries of one sequence over one KV head, straight from the paged cache.
//
// A sequence's queries, under all the query heads that share a KV head, make up its rows: row r is head r % group of
// query r / group. Keys are taken in tiles of KEYS, aligned to multiples of KEYS in the sequence, with a running
// maximum and sum per row (FlashAttention), so that a row's result depends on nothing but the row.
//
// Two ways. A few rows (decodes, also with drafts): the vectors run along head_dim, and what is loaded of a key serves all rows. Many
// rows (prefill chunks): the vectors run along the rows, the tile is widened to float32 once, and the softmax needs no
// sum across lanes. Neither reads a slot that no row may see: whatever it holds, even NaN, can not reach a result.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "product.h"

constexpr int KEYS = 64;
constexpr int FEW_ROWS = 8;  // measured: from there on the lanes' way is faster, although it leaves lanes idle
constexpr int MOST_TOGETHER = 12;  // rows of sequences that share a prefix: measured, and whole fours for groups of 1 to 4
constexpr int DRAFT_TOKENS = 17;  // a decode, and what it may try beyond it: EngineConfig's num_speculative_tokens
constexpr float UNSEEN = -1e30f;  // below every score, and still finite: the difference of two is 0, not NaN

// One KV head of one sequence, in keys or values [num_blocks, block_size, num_kv_heads, head_dim].
template <class T>
struct PagedHead {
  const T* slots;             // this head in slot 0
  const int32_t* blocks;      // the sequence's block table
  int block_size;
  ptrdiff_t slot_stride;      // elements from one slot to the next

  // Where the tokens at positions begin ... end - 1 lie.
  void rows(int begin, int end, const T** row) const {
    int block = begin / block_size, offset = begin % block_size;
    for (int position = begin; position < end; ++position) {
      *row++ = slots + (static_cast<ptrdiff_t>(blocks[block]) * block_size + offset) * slot_stride;
      if (++offset == block_size) ++block, offset = 0;
    }
  }
};

// What one piece of work computes: `num_rows` rows from `first_row` on.
template <class T>
struct AttentionRows {
  const T* query;  // the sequence's first token, the KV head's first query head
  T* out;          // likewise
  ptrdiff_t query_stride_t, query_stride_h, out_stride_t, out_stride_h;  // elements
  PagedHead<T> keys, values;
  int first_row, num_rows, group, head_dim;
  int query_len, seq_len, window;  // tokens; window 0 = none
  float scale, soft_cap;           // soft_cap 0 = none

  int position(int row) const { return seq_len - query_len + (first_row + row) / group; }
  int end(int row) const { return position(row) + 1; }  // of the keys that a row sees
  int begin(int row) const { return window ? std::max(0, end(row) - window) : 0; }
  const T* query_row(int row) const {
    return query + (first_row + row) / group * query_stride_t + (first_row + row) % group * query_stride_h;
  }
  T* out_row(int row) const {
    return out + (first_row + row) / group * out_stride_t + (first_row + row) % group * out_stride_h;
  }
};

// Memory of one thread, kept between calls.
class Scratch {
 public:
  float* floats(size_t count) {
    if (count > capacity_) {
      std::free(memory_);
      capacity_ = count + count / 4;
      memory_ = static_cast<float*>(std::aligned_alloc(64, (capacity_ * sizeof(float) + 63) / 64 * 64));
      if (!memory_) std::abort();
    }
    return memory_;
  }
  ~Scratch() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};

INLINE Floats capped(Floats score, float soft_cap) {
  return soft_cap > 0.0f ? tanh(score / soft_cap) * soft_cap : score;
}

// ------------------------------------------------------------------------------------------ a few rows

// scores[r][i] for the keys lo ... hi - 1 of a tile.
template <int ROWS, bool WHOLE, class T>
INLINE void score_few(const float* query, int padded_dim, const T* const* key, const T* const* next, int lo, int hi,
                      float* scores) {
  constexpr int TOGETHER = 4;  // keys whose sums are under way at once
  for (int first = lo / LANES * LANES; first < hi; first += LANES) {
    Floats sums[ROWS][LANES];
    for (int i = 0; i < LANES; i += TOGETHER) {
      const T* row[TOGETHER];
      for (int t = 0; t < TOGETHER; ++t) {  // a key out of range stands in for nothing: its score is masked
        const int mine = WHOLE ? first + i + t : std::min(std::max(first + i + t, lo), hi - 1);
        row[t] = key[mine];
        for (int byte = 0; byte < padded_dim * static_cast<int>(sizeof(T)); byte += 64)
          __builtin_prefetch(reinterpret_cast<const char*>(next[mine]) + byte);
      }
      Floats sum[TOGETHER][ROWS] = {};
      for (int d = 0; d < padded_dim; d += LANES) {
        Floats q[ROWS];
        for (int r = 0; r < ROWS; ++r) q[r] = load(query + r * padded_dim + d);
        for (int t = 0; t < TOGETHER; ++t) {
          const Floats k = load(row[t] + d);
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k * q[r];
        }
      }
      for (int t = 0; t < TOGETHER; ++t)
        for (int r = 0; r < ROWS; ++r) sums[r][i + t] = sum[t][r];
    }
    for (int r = 0; r < ROWS; ++r) store(scores + r * KEYS + first, sum_each(sums[r]));
  }
}

// out[r][d] = out[r][d] * fade[r] + sum over the keys lo ... hi - 1 of weights[r][i] * value[i][d], VECTORS from d on.
template <int ROWS, int VECTORS, class T>
INLINE void mix_few(const float* weights, const float* fade, const T* const* value, const T* const* next, int lo,
                    int hi, int d, int padded_dim, float* out) {
  Floats sum[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j) sum[r][j] = load(out + r * padded_dim + d + j * LANES) * fade[r];
  for (int i = lo; i < hi; ++i) {
    for (int byte = 0; byte < VECTORS * LANES * static_cast<int>(sizeof(T)); byte += 64)
      __builtin_prefetch(reinterpret_cast<const char*>(next[i] + d) + byte);
    for (int j = 0; j < VECTORS; ++j) {
      const Floats v = load(value[i] + d + j * LANES);
      for (int r = 0; r < ROWS; ++r) sum[r][j] += v * weights[r * KEYS + i];
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j) store(out + r * padded_dim + d + j * LANES, sum[r][j]);
}

// All columns from d on, as many vectors of them at once as there are.
template <int ROWS, int VECTORS, class T>
INLINE void mix_columns(const float* weights, const float* fade, const T* const* value, const T* const* next, int lo,
                        int hi, int d, int padded_dim, float* out) {
  for (; d + VECTORS * LANES <= padded_dim; d += VECTORS * LANES)
    mix_few<ROWS, VECTORS>(weights, fade, value, next, lo, hi, d, padded_dim, out);
  if constexpr (VECTORS > 1)
    mix_columns<ROWS, VECTORS / 2>(weights, fade, value, next, lo, hi, d, padded_dim, out);
}

// Turn one row's scores into weights; returns by what factor all before has to fade.
template <bool WHOLE>
INLINE float weigh_few(float* scores, int lo, int hi, float soft_cap, float* largest, float* total) {
  Floats index;
  for (int lane = 0; lane < LANES; ++lane) index[lane] = static_cast<float>(lane);
  Floats most = splat(*largest);
  for (int i = 0; i < KEYS; i += LANES) {
    const Floats at = index + static_cast<float>(i);
    const Floats score = capped(load(scores + i), soft_cap);
    const Floats seen =
        WHOLE ? score : at >= static_cast<float>(lo) && at < static_cast<float>(hi) ? score : splat(UNSEEN);
    store(scores + i, seen);
    most = larger(most, seen);
  }
  const float new_largest = largest_lane(most);
  const Floats fade = exp_nonpositive(splat(*largest - new_largest));
  Floats sum = {};
  for (int i = 0; i < KEYS; i += LANES) {
    const Floats at = index + static_cast<float>(i);
    const Floats weight = exp_nonpositive(load(scores + i) - new_largest);
    const Floats seen =
        WHOLE ? weight : at >= static_cast<float>(lo) && at < static_cast<float>(hi) ? weight : Floats{};
    store(scores + i, seen);
    sum += seen;
  }
  *total = *total * fade[0] + sum_lanes(sum);
  *largest = new_largest;
  return fade[0];
}

// One tile of keys for ROWS rows, whose vectors of keys and values may be loaded whole. WHOLE: every row sees every key.
template <int ROWS, bool WHOLE, class T>
INLINE void few_tile(const float* query, int padded_dim, const T* const* key, const T* const* value,
                     const T* const* next_key, int lo, int hi, const int* row_lo, const int* row_hi, float soft_cap,
                     float* largest, float* total, float* out) {
  constexpr int VECTORS = std::min(8, REGISTERS / 2 / ROWS);
  alignas(64) float scores[ROWS * KEYS] = {};
  float fade[ROWS];
  score_few<ROWS, WHOLE>(query, padded_dim, key, value, lo, hi, scores);
  for (int r = 0; r < ROWS; ++r)
    fade[r] = weigh_few<WHOLE>(scores + r * KEYS, row_lo[r], row_hi[r], soft_cap, largest + r, total + r);
  mix_columns<ROWS, VECTORS>(scores, fade, value, next_key, lo, hi, 0, padded_dim, out);
}

// The same for whichever tile, and the head_dims that are common known to the compiler.
template <int ROWS, class T>
static void few_tile(const float* query, int padded_dim, const T* const* key, const T* const* value,
                     const T* const* next_key, int lo, int hi, const int* row_lo, const int* row_hi, float soft_cap,
                     float* largest, float* total, float* out) {
  bool whole = lo == 0 && hi == KEYS;
  for (int r = 0; r < ROWS; ++r) whole &= row_lo[r] <= 0 && row_hi[r] >= KEYS;
  auto of_dim = [&](auto dim) {
    few_tile<ROWS, true>(query, dim, key, value, next_key, 0, KEYS, row_lo, row_hi, soft_cap, largest, total, out);
  };
  if (!whole)
    return few_tile<ROWS, false>(query, padded_dim, key, value, next_key, lo, hi, row_lo, row_hi, soft_cap, largest,
                                 total, out);
  switch (padded_dim) {
    case 48: return of_dim(std::integral_constant<int, 48>{});
    case 64: return of_dim(std::integral_constant<int, 64>{});
    case 128: return of_dim(std::integral_constant<int, 128>{});
    default: return of_dim(padded_dim);
  }
}

// Rows that are under way: what they ask for, scaled, and what they have so far.
struct FewRows {
  int padded_dim;
  float *query, *out;         // [rows, padded_dim]
  float *largest, *total;     // [rows]
  float *wide_keys, *wide_values;  // [KEYS, padded_dim], for a tile that has to be widened
  FewRows from(int row) const {
    const ptrdiff_t begin = static_cast<ptrdiff_t>(row) * padded_dim;
    return {padded_dim, query + begin, out + begin, largest + row, total + row, wide_keys, wide_values};
  }
};

// The keys begin ... end - 1 for ROWS rows, of which row r sees those from row_begin[r] to row_end[r] - 1.
template <int ROWS, class T>
static void few_tiles(const AttentionRows<T>& work, int begin, int end, const int* row_begin, const int* row_end,
                      const FewRows& rows) {
  const int dim = work.head_dim, padded_dim = rows.padded_dim;
  const T *key[KEYS], *value[KEYS], *next_key[KEYS];
  work.keys.rows(begin, std::min(end, begin / KEYS * KEYS + KEYS), key + begin % KEYS);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    work.values.rows(tile + lo, tile + hi, value + lo);
    const int num_next = std::min(KEYS, end - tile - KEYS);
    std::copy(key, key + KEYS, next_key);  // something to prefetch for those that have no successor
    if (num_next > 0) work.keys.rows(tile + KEYS, tile + KEYS + num_next, next_key);
    int row_lo[ROWS], row_hi[ROWS];
    for (int r = 0; r < ROWS; ++r) {
      row_lo[r] = row_begin[r] - tile;
      row_hi[r] = std::min(row_end[r] - tile, hi);
    }
    if (std::is_same<T, Float16>::value || padded_dim != dim) {
      // The last vector of a row would reach into its neighbour; and float16 is rare.
      const float *wide_key[KEYS], *wide_value[KEYS];
      for (int i = lo; i < hi; ++i) {
        widen_row(key[i], dim, rows.wide_keys + i * padded_dim);
        widen_row(value[i], dim, rows.wide_values + i * padded_dim);
        wide_key[i] = rows.wide_keys + i * padded_dim;
        wide_value[i] = rows.wide_values + i * padded_dim;
      }
      few_tile<ROWS>(rows.query, padded_dim, wide_key, wide_value, wide_key, lo, hi, row_lo, row_hi, work.soft_cap,
                     rows.largest, rows.total, rows.out);
    } else if constexpr (!std::is_same<T, Float16>::value) {
      few_tile<ROWS>(rows.query, padded_dim, key, value, next_key, lo, hi, row_lo, row_hi, work.soft_cap,
                     rows.largest, rows.total, rows.out);
    }
    std::copy(next_key, next_key + KEYS, key);
  }
}

// Rows that see the same keys in the same places, as many at once as the registers hold; `from` on, of each what it sees.
template <class T>
static void few_tiles(const AttentionRows<T>& work, int num_rows, int from, const int* row_begin, const int* row_end,
                      const FewRows& rows) {
  for (int row = 0, size; row < num_rows; row += size) {
    size = std::min(num_rows - row, 4);
    const int begin = std::max(from, row_begin[row]), end = row_end[row + size - 1];
    switch (size) {
      case 1: few_tiles<1>(work, begin, end, row_begin + row, row_end + row, rows.from(row)); break;
      case 2: few_tiles<2>(work, begin, end, row_begin + row, row_end + row, rows.from(row)); break;
      case 3: few_tiles<3>(work, begin, end, row_begin + row, row_end + row, rows.from(row)); break;
      case 4: few_tiles<4>(work, begin, end, row_begin + row, row_end + row, rows.from(row)); break;
    }
  }
}

// Few rows of each of some sequences, whose first `shared` keys, a multiple of KEYS that all rows see, are the same. Over
// those all rows go together; then each sequence's go on alone, from where they stand: in the order of a row alone.
template <class T>
static void attend_few(const AttentionRows<T>* works, int num_works, int shared, Scratch& scratch) {
  const int dim = works[0].head_dim, padded_dim = round_up(dim, LANES);
  float* memory = scratch.floats(static_cast<size_t>(padded_dim) * 2 * (MOST_TOGETHER + KEYS));
  float largest[MOST_TOGETHER], total[MOST_TOGETHER] = {};
  int row_begin[MOST_TOGETHER], row_end[MOST_TOGETHER], all_shared[MOST_TOGETHER], none[MOST_TOGETHER] = {}, num_rows = 0;
  const FewRows rows{padded_dim, memory, memory + MOST_TOGETHER * padded_dim, largest, total,
                     memory + 2 * MOST_TOGETHER * padded_dim, memory + (2 * MOST_TOGETHER + KEYS) * padded_dim};
  std::fill(rows.out, rows.out + MOST_TOGETHER * padded_dim, 0.0f);
  std::fill(largest, largest + MOST_TOGETHER, UNSEEN);
  std::fill(all_shared, all_shared + MOST_TOGETHER, shared);
  for (int i = 0; i < num_works; ++i) {
    for (int r = 0; r < works[i].num_rows; ++r, ++num_rows) {
      float* query = rows.query + num_rows * padded_dim;
      widen_row(works[i].query_row(r), dim, query);
      for (int d = 0; d < dim; ++d) query[d] *= works[i].scale;
      row_begin[num_rows] = works[i].begin(r);
      row_end[num_rows] = works[i].end(r);
    }
  }
  if (shared) few_tiles(works[0], num_rows, 0, none, all_shared, rows);
  for (int i = 0, row = 0; i < num_works; row += works[i++].num_rows) {
    few_tiles(works[i], works[i].num_rows, shared, row_begin + row, row_end + row, rows.from(row));
    for (int r = 0; r < works[i].num_rows; ++r)
      narrow_row(rows.out + (row + r) * padded_dim, dim, 1.0f / total[row + r], works[i].out_row(r));
  }
}

// ------------------------------------------------------------------------------------------- many rows

// Widen a tile's rows lo ... hi - 1 to [KEYS, padded_dim]; zeros for the others.
template <class T>
INLINE void widen_tile(const PagedHead<T>& head, int tile, int lo, int hi, int dim, int padded_dim, float* wide) {
  const T* row[KEYS];
  head.rows(tile + lo, tile + hi, row + lo);
  std::fill(wide, wide + lo * padded_dim, 0.0f);
  for (int i = lo; i < hi; ++i) widen_row(row[i], dim, wide + i * padded_dim);
  std::fill(wide + hi * padded_dim, wide + KEYS * padded_dim, 0.0f);
}

// Turn VECTORS * LANES rows' scores [KEYS, VECTORS * LANES] into weights, and fade what they have in `out`.
template <int VECTORS>
INLINE void weigh_many(float* scores, const int* row_lo, const int* row_hi, bool all_seen, float soft_cap,
                       float* largest, float* total, float* out, int dim) {
  constexpr int WIDTH = VECTORS * LANES;
  for (int j = 0; j < WIDTH; j += LANES) {
    const Ints lo = *reinterpret_cast<const Ints*>(row_lo + j), hi = *reinterpret_cast<const Ints*>(row_hi + j);
    const Floats old_largest = load(largest + j);
    Floats most = old_largest;
    for (int i = 0; i < KEYS; ++i) {
      Floats score = capped(load(scores + i * WIDTH + j), soft_cap);
      if (!all_seen) score = (lo <= i) & (hi > i) ? score : splat(UNSEEN);
      store(scores + i * WIDTH + j, score);
      most = larger(most, score);
    }
    Floats sum = {};
    for (int i = 0; i < KEYS; ++i) {
      Floats weight = exp_nonpositive(load(scores + i * WIDTH + j) - most);
      if (!all_seen) weight = (lo <= i) & (hi > i) ? weight : Floats{};
      store(scores + i * WIDTH + j, weight);
      sum += weight;
    }
    const Floats fade = exp_nonpositive(old_largest - most);
    store(total + j, load(total + j) * fade + sum);
    store(largest + j, most);
    for (int d = 0; d < dim; ++d) store(out + d * WIDTH + j, load(out + d * WIDTH + j) * fade);
  }
}

template <int VECTORS, class T>
static void attend_many(const AttentionRows<T>& work, Scratch& scratch) {
  constexpr int WIDTH = VECTORS * LANES;
  const int dim = work.head_dim, padded_dim = round_up(dim, LANES);
  float* query = scratch.floats(static_cast<size_t>(padded_dim) * (2 * WIDTH + 2 * KEYS + 1) + KEYS * WIDTH);
  float* out = query + padded_dim * WIDTH;      // both [dim, WIDTH]: a row's numbers stand under each other
  float* keys = out + padded_dim * WIDTH;       // [KEYS, padded_dim]
  float* values = keys + KEYS * padded_dim;     // [KEYS, padded_dim]
  float* scores = values + KEYS * padded_dim;   // [KEYS, WIDTH]
  float* row = scores + KEYS * WIDTH;           // [padded_dim]
  std::fill(query, query + 2 * padded_dim * WIDTH, 0.0f);
  for (int r = 0; r < work.num_rows; ++r) {
    widen_row(work.query_row(r), dim, row);
    for (int d = 0; d < dim; ++d) query[d * WIDTH + r] = row[d] * work.scale;
  }
  alignas(64) float largest[WIDTH], total[WIDTH] = {};
  std::fill(largest, largest + WIDTH, UNSEEN);
  const int begin = work.begin(0), end = work.end(work.num_rows - 1);
  for (int tile = begin / KEYS * KEYS; tile < end; tile += KEYS) {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    int row_lo[WIDTH], row_hi[WIDTH];
    for (int r = 0; r < WIDTH; ++r) {  // the lanes past the last row repeat it
      row_lo[r] = work.begin(std::min(r, work.num_rows - 1)) - tile;
      row_hi[r] = work.end(std::min(r, work.num_rows - 1)) - tile;
    }
    const bool all_seen = row_lo[WIDTH - 1] <= 0 && row_hi[0] >= KEYS;
    widen_tile(work.keys, tile, lo, hi, dim, padded_dim, keys);
    multiply<VECTORS>(KEYS, keys, padded_dim, 1, query, WIDTH, dim, scores, WIDTH, false);
    weigh_many<VECTORS>(scores, row_lo, row_hi, all_seen, work.soft_cap, largest, total, out, dim);
    widen_tile(work.values, tile, lo, hi, dim, padded_dim, values);
    multiply<VECTORS>(dim, values, 1, padded_dim, scores, WIDTH, KEYS, out, WIDTH, true);
  }
  for (int r = 0; r < work.num_rows; ++r) {
    for (int d = 0; d < dim; ++d) row[d] = out[d * WIDTH + r];
    narrow_row(row, dim, 1.0f / total[r], work.out_row(r));
  }
}

// -------------------------------------------------------------------------------------------- either

// The way is chosen by all the rows that the sequence has: the last piece of a long chunk is computed like the others, and
// a decode with a draft, bit for bit, like one without.
INLINE bool has_few_rows(int query_len, int group) {
  return query_len * group <= FEW_ROWS || (group <= FEW_ROWS && query_len <= DRAFT_TOKENS);
}

// Rows of one piece of work.
INLINE int rows_per_piece(int query_len, int group) {
  return has_few_rows(query_len, group) ? std::min(query_len * group, FEW_ROWS) : TILE_COLUMNS;
}

// Some rows of one sequence; or all of each of several, which are few, and whose first `shared` keys are the same: a
// multiple of KEYS that all rows see. num_works: at most MOST_TOGETHER.
template <class T>
void attend(const AttentionRows<T>* works, int num_works, int shared, Scratch& scratch) {
  const AttentionRows<T>& work = works[0];
  if (has_few_rows(work.query_len, work.group)) return attend_few(works, num_works, work.window ? 0 : shared, scratch);
  const int vectors = (work.num_rows + LANES - 1) / LANES;
  if (vectors == 1) return attend_many<1>(work, scratch);
  if (vectors == 2) return attend_many<2>(work, scratch);
  return attend_many<TILE_VECTORS>(work, scratch);
}
