// Decode attention: few rows per sequence. Vectors run along head_dim, and a loaded key is used for all rows. Several
// KV heads are computed tile by tile: the heads of a token are adjacent in the cache, so memory is read sequentially,
// and the next tile is prefetched while one is computed.

#pragma once

#include <type_traits>

#include "attention/rows.h"

// Rows of one item with a common prefix: measured; a multiple of ROWS_AT_ONCE and of groups of 1 to 4.
constexpr int MAX_SHARED_ROWS = 12;
constexpr int ROWS_AT_ONCE = 4;    // of one head: limited by the number of registers
constexpr int CHUNK = 16;          // keys that are computed for all heads before the next keys; a multiple of LANES

// Addresses of a tile's keys and values. K: the storage type, or float if widened. Only visible keys are valid.
template <class K>
struct KeyTile {
  const K *key[KEYS], *value[KEYS];
};

// Prefetch of the next chunk in memory order: the heads of a token, then the next token. One head of one token is
// fetched for each key computed, which keeps the memory bus busy. It goes to the L2 cache, because L1 cannot hold two
// chunks.
template <class K>
class Prefetcher {
 public:
  Prefetcher(const K* const* token, int num_heads, int numbers)
      : token_(token), last_(token + CHUNK - 1), num_heads_(num_heads), numbers_(numbers) {}

  // Return the next address to prefetch; at the end it stays in the last token.
  const K* next_part() {
    const K* part = *token_ + head_ * numbers_;
    if (++head_ == num_heads_ && token_ != last_) head_ = 0, ++token_;
    if (head_ > num_heads_) head_ = num_heads_;
    return part;
  }
  void fetch_rest() {
    while (token_ != last_) fetch(next_part(), numbers_);
  }
  static void fetch(const K* from, int numbers) {
    const char* bytes = reinterpret_cast<const char*>(from);
    for (int byte = 0; byte < numbers * static_cast<int>(sizeof(K)); byte += 64) __builtin_prefetch(bytes + byte, 0, 2);
  }

 private:
  const K *const *token_, *const *last_;
  const int num_heads_, numbers_;
  int head_ = 0;
};

// One head's view of a tile, and the prefetcher that runs while it is computed.
template <class K>
struct HeadTile {
  const KeyTile<K>& current;
  ptrdiff_t offset;
  Prefetcher<K>& ahead;
  const K* key(int i) const { return current.key[i] + offset; }
  const K* value(int i) const { return current.value[i] + offset; }
};

// Visible keys of a tile: [lo, hi) is the union over the rows; row r sees its intersection with [row_lo[r], row_hi[r]).
struct VisibleKeys {
  int lo, hi, row_lo[ROWS_AT_ONCE], row_hi[ROWS_AT_ONCE];
  bool is_whole(int rows) const {
    bool all = lo == 0 && hi == KEYS;
    for (int r = 0; r < rows; ++r) all &= row_lo[r] <= 0 && row_hi[r] >= KEYS;
    return all;
  }
};

// State of the rows in the online softmax: scaled queries and partial outputs, both in the order of load_pair.
struct DecodeRows {
  int padded_dim;
  float *query, *out;             // [rows, padded_dim]
  float *scores;                  // [rows, KEYS]
  float *largest, *total, *rescale;  // [rows]
  DecodeRows from(int row) const {
    const ptrdiff_t begin = static_cast<ptrdiff_t>(row) * padded_dim;
    return {padded_dim, query + begin, out + begin, scores + row * KEYS, largest + row, total + row, rescale + row};
  }
};

// Compute the scores of keys [lo, hi). Scores of other keys in the same vectors are undefined.
template <int ROWS, bool WHOLE, class K>
INLINE void score_keys(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi) {
  constexpr int KEYS_AT_ONCE = 4;  // independent sums hide the latency of the additions
  const float* query = rows.query;
  for (int first = lo / LANES * LANES; first < hi; first += LANES) {
    Floats sums[ROWS][LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += KEYS_AT_ONCE) {
      const K *row[KEYS_AT_ONCE], *ahead[KEYS_AT_ONCE];
      for (int t = 0; t < KEYS_AT_ONCE; ++t) {  // out of range: any valid key will do, its score is masked
        const int mine = WHOLE ? first + i + t : std::min(std::max(first + i + t, lo), hi - 1);
        row[t] = tile.key(mine);
        ahead[t] = tile.ahead.next_part();
      }
      Floats sum[KEYS_AT_ONCE][ROWS] = {};
      int d = 0;
      for (; d + 2 * LANES <= padded_dim; d += 2 * LANES) {
        Floats q[ROWS][2];
        for (int r = 0; r < ROWS; ++r)
          q[r][0] = load(query + r * padded_dim + d), q[r][1] = load(query + r * padded_dim + d + LANES);
        for (int t = 0; t < KEYS_AT_ONCE; ++t) {
          Floats k[2];
          load_pair(row[t] + d, k);
          Prefetcher<K>::fetch(ahead[t] + d, 2 * LANES);
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k[0] * q[r][0];
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k[1] * q[r][1];
        }
      }
      for (; d < padded_dim; d += LANES)
        for (int t = 0; t < KEYS_AT_ONCE; ++t) {
          const Floats k = load(row[t] + d);
          Prefetcher<K>::fetch(ahead[t] + d, LANES);
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k * load(query + r * padded_dim + d);
        }
      for (int t = 0; t < KEYS_AT_ONCE; ++t)
        for (int r = 0; r < ROWS; ++r) sums[r][i + t] = sum[t][r];
    }
    for (int r = 0; r < ROWS; ++r) store(rows.scores + r * KEYS + first, sum_each(sums[r]));
  }
}

// out[r][d] = out[r][d] * rescale[r] + sum over keys [lo, hi) of scores[r][i] * value[i][d], for VECTORS vectors from d
// on. rescaled: an earlier chunk of the tile has applied the factor.
template <int ROWS, int VECTORS, class K>
INLINE void add_values(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi, bool rescaled,
                       int d) {
  Floats sum[ROWS][VECTORS];
  float* out = rows.out + d;
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j)
      sum[r][j] = load(out + r * padded_dim + j * LANES) * (rescaled ? 1.0f : rows.rescale[r]);
  for (int i = lo; i < hi; ++i) {
    const K* value = tile.value(i) + d;
    Floats v[VECTORS + 1];
#pragma GCC unroll 8
    for (int j = 0; j + 1 < VECTORS; j += 2) load_pair(value + j * LANES, v + j);
    if (VECTORS % 2) v[VECTORS - 1] = load(value + (VECTORS - 1) * LANES);
    if (d == 0) Prefetcher<K>::fetch(tile.ahead.next_part(), padded_dim);
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j)
      for (int r = 0; r < ROWS; ++r) sum[r][j] += v[j] * rows.scores[r * KEYS + i];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j) store(out + r * padded_dim + j * LANES, sum[r][j]);
}

// Accumulate all columns from d on, in blocks of up to VECTORS vectors; an odd number of vectors only at the end.
template <int ROWS, int VECTORS, class K>
INLINE void add_columns(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi, bool rescaled,
                        int d) {
  if constexpr (VECTORS % 2) {
    if (d + VECTORS * LANES == padded_dim)
      return add_values<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, rescaled, d);
  } else {
    for (; d + VECTORS * LANES <= padded_dim; d += VECTORS * LANES)
      add_values<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, rescaled, d);
  }
  if constexpr (VECTORS > 1) add_columns<ROWS, VECTORS - 1>(rows, padded_dim, tile, lo, hi, rescaled, d);
}

// Replace one row's scores by softmax weights; `rescale` is set to the factor for the sums of earlier tiles.
template <bool WHOLE>
INLINE void softmax_row(float* scores, int lo, int hi, float soft_cap, float* largest, float* total, float* rescale) {
  Floats index;
  for (int lane = 0; lane < LANES; ++lane) index[lane] = static_cast<float>(lane);
  Floats score[KEYS / LANES], most = splat(*largest);
#pragma GCC unroll 4
  for (int i = 0; i < KEYS; i += LANES) {
    const Floats at = index + static_cast<float>(i);
    score[i / LANES] = capped(load(scores + i), soft_cap);
    if (!WHOLE)
      score[i / LANES] = at >= static_cast<float>(lo) && at < static_cast<float>(hi) ? score[i / LANES] : splat(MASKED);
    most = larger(most, score[i / LANES]);
  }
  const float new_largest = largest_lane(most);
  const Floats factor = exp_nonpositive(splat(*largest - new_largest));
  Floats sum = {};
#pragma GCC unroll 4
  for (int i = 0; i < KEYS; i += LANES) {
    const Floats at = index + static_cast<float>(i);
    Floats weight = exp_nonpositive(score[i / LANES] - new_largest);
    if (!WHOLE) weight = at >= static_cast<float>(lo) && at < static_cast<float>(hi) ? weight : Floats{};
    store(scores + i, weight);
    sum += weight;
  }
  *total = *total * factor[0] + sum_lanes(sum);
  *largest = new_largest;
  *rescale = factor[0];
}

// The three passes over a tile: scores of all heads, then softmax, then weighted sums of values. Within a pass the rows
// are independent, which hides the latency of each one's dependent instructions. SCORE and OUTPUT process one
// chunk of the keys, SOFTMAX the whole tile.
enum class Pass { SCORE, SOFTMAX, OUTPUT };

template <Pass PASS, int ROWS, bool WHOLE, class K>
INLINE void decode_pass(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, const VisibleKeys& visible,
                        int chunk, float soft_cap) {
  constexpr int VECTORS = std::min(8, REGISTERS / 2 / ROWS) / 2 * 2;
  const int lo = WHOLE ? chunk : std::max(visible.lo, chunk);
  const int hi = WHOLE ? chunk + CHUNK : std::min(visible.hi, chunk + CHUNK);
  if constexpr (PASS == Pass::SCORE) score_keys<ROWS, WHOLE>(rows, padded_dim, tile, lo, hi);
  if constexpr (PASS == Pass::SOFTMAX)
    for (int r = 0; r < ROWS; ++r)
      softmax_row<WHOLE>(rows.scores + r * KEYS, visible.row_lo[r], visible.row_hi[r], soft_cap, rows.largest + r,
                       rows.total + r, rows.rescale + r);
  if constexpr (PASS == Pass::OUTPUT) add_columns<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, chunk > visible.lo, 0);
}

// Dispatch on visibility and head_dim: common head_dims are compile-time constants.
template <Pass PASS, int ROWS, class K>
static void decode_pass(const DecodeRows& rows, const HeadTile<K>& tile, const VisibleKeys& visible, int chunk,
                        float soft_cap) {
  auto of_dim = [&](auto dim) { decode_pass<PASS, ROWS, true>(rows, dim, tile, visible, chunk, soft_cap); };
  if (!visible.is_whole(ROWS))
    return decode_pass<PASS, ROWS, false>(rows, rows.padded_dim, tile, visible, chunk, soft_cap);
  switch (rows.padded_dim) {
    case 48: return of_dim(std::integral_constant<int, 48>{});
    case 64: return of_dim(std::integral_constant<int, 64>{});
    case 128: return of_dim(std::integral_constant<int, 128>{});
    default: return of_dim(rows.padded_dim);
  }
}

// Rows that read the same keys [begin, end); row r sees [row_begin[r], row_end[r]).
template <class T>
struct KeyRange {
  const AttentionRows<T>* work;
  int row, num_rows, begin, end;
  const int *row_begin, *row_end;

  int first_tile() const { return begin / KEYS * KEYS; }

  __attribute__((noinline)) void find(int tile, KeyTile<T>& found) const {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    work->keys.rows(tile + lo, tile + hi, found.key + lo);
    work->values.rows(tile + lo, tile + hi, found.value + lo);
    std::fill(found.key, found.key + lo, found.key[lo]);  // the prefetcher reads all addresses: they must be valid
    std::fill(found.value, found.value + lo, found.value[lo]);
    std::fill(found.key + hi, found.key + KEYS, found.key[lo]);
    std::fill(found.value + hi, found.value + KEYS, found.value[lo]);
  }
};

template <Pass PASS, class T, class K>
static void decode_pass(const DecodeRows& rows, const KeyRange<T>& range, int first, int chunk,
                        const HeadTile<K>& tile) {
  for (int row = 0, size; row < range.num_rows; row += size) {
    size = std::min(range.num_rows - row, ROWS_AT_ONCE);
    VisibleKeys visible;
    visible.lo = std::max(std::max(range.begin, range.row_begin[row]) - first, 0);
    visible.hi = std::min(range.row_end[row + size - 1] - first, KEYS);
    if (visible.lo >= visible.hi) continue;
    if (PASS != Pass::SOFTMAX && (visible.lo >= chunk + CHUNK || visible.hi <= chunk)) continue;
    for (int r = 0; r < size; ++r) {
      visible.row_lo[r] = range.row_begin[row + r] - first;
      visible.row_hi[r] = std::min(range.row_end[row + r] - first, visible.hi);
    }
    const DecodeRows mine = rows.from(row);
    const float soft_cap = range.work->soft_cap;
    switch (size) {
      case 1: decode_pass<PASS, 1>(mine, tile, visible, chunk, soft_cap); break;
      case 2: decode_pass<PASS, 2>(mine, tile, visible, chunk, soft_cap); break;
      case 3: decode_pass<PASS, 3>(mine, tile, visible, chunk, soft_cap); break;
      case 4: decode_pass<PASS, 4>(mine, tile, visible, chunk, soft_cap); break;
    }
  }
}

// Compute the tile that begins at `first` for all rows and heads; the rows of adjacent heads are `step` apart. Keys,
// then values are read chunk by chunk, and the next chunk is prefetched.
template <class T>
static void decode_tile(const KeyRange<T>& range, int num_heads, const DecodeRows& rows, int step, int first,
                     const KeyTile<T>& current, const KeyTile<T>& next, int next_chunk) {
  const int lo = std::max(range.begin - first, 0) / CHUNK * CHUNK, hi = std::min(range.end - first, KEYS);
  auto pass = [&](auto which, int chunk, const T* const* next_work) {
    Prefetcher<T> ahead(next_work, num_heads, range.work->head_dim);
    for (int head = 0; head < num_heads; ++head)
      decode_pass<which.value>(rows.from(head * step), range, first, chunk,
                            HeadTile<T>{current, static_cast<ptrdiff_t>(head) * range.work->head_dim, ahead});
    if (which.value != Pass::SOFTMAX) ahead.fetch_rest();
  };
  for (int chunk = lo; chunk < hi; chunk += CHUNK)
    pass(std::integral_constant<Pass, Pass::SCORE>{}, chunk,
         chunk + CHUNK < hi ? current.key + chunk + CHUNK : current.value + lo);
  pass(std::integral_constant<Pass, Pass::SOFTMAX>{}, lo, current.value + lo);
  for (int chunk = lo; chunk < hi; chunk += CHUNK)
    pass(std::integral_constant<Pass, Pass::OUTPUT>{}, chunk,
         chunk + CHUNK < hi ? current.value + chunk + CHUNK : next.key + next_chunk);
}

// The same through a float32 copy: for float16, which load_pair does not widen, and for head_dims that are no multiple
// of LANES, where a vector load would read the adjacent head. wide: [2, KEYS, padded_dim].
template <class T>
static void widened_decode_tile(const KeyRange<T>& range, int num_heads, const DecodeRows& rows, int step, int first,
                             const KeyTile<T>& current, float* wide) {
  const int dim = range.work->head_dim, padded_dim = rows.padded_dim;
  const int lo = std::max(range.begin - first, 0), hi = std::min(range.end - first, KEYS);
  KeyTile<float> widened;
  for (int i = 0; i < KEYS; ++i) {
    widened.key[i] = wide + i * padded_dim;
    widened.value[i] = wide + (KEYS + i) * padded_dim;
  }
  Prefetcher<float> nothing(widened.key, 0, 0);
  const HeadTile<float> tile{widened, 0, nothing};
  for (int head = 0; head < num_heads; ++head) {
    for (int i = lo; i < hi; ++i) {
      widen_row(current.key[i] + head * dim, dim, wide + i * padded_dim);
      widen_row(current.value[i] + head * dim, dim, wide + (KEYS + i) * padded_dim);
    }
    const DecodeRows mine = rows.from(head * step);
    const int begin = lo / CHUNK * CHUNK;
    for (int chunk = begin; chunk < hi; chunk += CHUNK) decode_pass<Pass::SCORE>(mine, range, first, chunk, tile);
    decode_pass<Pass::SOFTMAX>(mine, range, first, 0, tile);
    for (int chunk = begin; chunk < hi; chunk += CHUNK) decode_pass<Pass::OUTPUT>(mine, range, first, chunk, tile);
  }
}

// Compute decode attention of sequences with a common prefix of `shared` keys (see attend). All rows process the prefix
// together, then each sequence its own keys. The order of the keys is that of a sequence alone, so the result has the
// same bits.
template <class T>
static void attend_decode(const AttentionRows<T>* works, int num_works, int num_heads, int shared,
                       const AttentionRows<T>* next_work, Scratch& scratch) {
  const int dim = works[0].head_dim, padded_dim = round_up(dim, LANES);
  const bool is_widened = std::is_same<T, Float16>::value || padded_dim != dim;
  int row_begin[MAX_SHARED_ROWS], row_end[MAX_SHARED_ROWS], all_shared[MAX_SHARED_ROWS], none[MAX_SHARED_ROWS] = {};
  KeyRange<T> ranges[MAX_SHARED_ROWS + 2];
  int count = 0, num_ranges = shared > 0;
  for (int i = 0; i < num_works; ++i) {
    const int row = count;
    for (int r = 0; r < works[i].num_rows; ++r, ++count) {
      row_begin[count] = works[i].begin(r);
      row_end[count] = works[i].end(r);
      all_shared[count] = shared;
    }
    const int begin = std::max(shared, row_begin[row]);
    ranges[num_ranges++] = {works + i, row, count - row, begin, row_end[count - 1], row_begin + row, row_end + row};
  }
  if (shared) ranges[0] = {works, 0, count, 0, shared, none, all_shared};
  if (next_work) ranges[num_ranges] = {next_work, 0, 0, next_work->begin(0), next_work->end(0), none, none};

  const int num_rows = count * num_heads;
  float* memory = scratch.floats(static_cast<size_t>(2 * padded_dim + KEYS + 3) * num_rows + 2 * KEYS * padded_dim);
  float* scores = memory + 2 * num_rows * padded_dim;
  float* wide = scores + num_rows * KEYS;
  float* sums = wide + 2 * KEYS * padded_dim;
  const DecodeRows rows{padded_dim, memory, memory + num_rows * padded_dim, scores,
                     sums,       sums + num_rows, sums + 2 * num_rows};
  std::fill(rows.out, rows.out + num_rows * padded_dim, 0.0f);
  std::fill(rows.scores, rows.scores + num_rows * KEYS, 0.0f);
  std::fill(rows.largest, rows.largest + num_rows, MASKED);
  std::fill(rows.total, rows.total + num_rows, 0.0f);
  auto each_row = [&](auto use) {
    for (int head = 0, row = 0; head < num_heads; ++head)
      for (int i = 0; i < num_works; ++i) {
        const AttentionRows<T> mine = works[i].at_kv_head(head);
        for (int r = 0; r < mine.num_rows; ++r, ++row) use(mine, r, row);
      }
  };
  each_row([&](const AttentionRows<T>& work, int r, int row) {
    float* query = rows.query + row * padded_dim;
    if (is_widened)
      widen_row(work.query_row(r), dim, query);
    else
      widen_pairs(work.query_row(r), dim, query);
    for (int d = 0; d < dim; ++d) query[d] *= work.scale;
    if (!work.sinks) return;
    rows.largest[row] = work.sink(r);  // as if a key without a value had been seen
    rows.total[row] = 1.0f;
  });
  KeyTile<T> tiles[2];
  KeyTile<T>*current = tiles, *next = tiles + 1;
  ranges[0].find(ranges[0].first_tile(), *current);
  for (int i = 0; i < num_ranges; ++i) {
    const KeyRange<T>& range = ranges[i];
    for (int first = range.first_tile(); first < range.end; first += KEYS) {
      int chunk = 0;  // first chunk of the next tile
      if (first + KEYS < range.end) {
        range.find(first + KEYS, *next);
      } else if (i + 1 < num_ranges + (next_work != nullptr)) {
        ranges[i + 1].find(ranges[i + 1].first_tile(), *next);
        chunk = ranges[i + 1].begin % KEYS / CHUNK * CHUNK;
      }
      const DecodeRows mine = rows.from(range.row);
      if (is_widened)
        widened_decode_tile(range, num_heads, mine, count, first, *current, wide);
      else
        decode_tile(range, num_heads, mine, count, first, *current, *next, chunk);
      std::swap(current, next);
    }
  }
  each_row([&](const AttentionRows<T>& work, int r, int row) {
    const float *out = rows.out + row * padded_dim, factor = 1.0f / rows.total[row];
    if (is_widened)
      narrow_row(out, dim, factor, work.out_row(r));
    else
      narrow_pairs(out, dim, factor, work.out_row(r));
  });
}
