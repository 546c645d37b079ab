// A few rows of sequences, as decodes have them: the vectors run along head_dim, and what is loaded of a key serves all
// rows. Several KV heads are computed side by side, tile after tile of keys: in the cache a token's heads lie beside
// each other, so that memory is read in its order, and while a tile is computed the next one is fetched.

#pragma once

#include <type_traits>

#include "attention/rows.h"

// Rows of sequences that share a prefix: measured, and whole fours for groups of 1 to 4.
constexpr int MAX_SHARED_ROWS = 12;
constexpr int ROWS_AT_ONCE = 4;    // of one head, as many as the registers hold
constexpr int CHUNK = 16;          // keys of a tile that all heads are done with before the next ones; of LANES

// Where the tokens of a tile lie, in K: as stored, or widened. Only keys that some row sees are set.
template <class K>
struct KeyTile {
  const K *key[KEYS], *value[KEYS];
};

// What comes next, in the order of memory: heads beside each other, token after token. A part is fetched for each key
// that is computed, so that memory is never idle; as far as the second-level cache, for the first cannot hold two
// chunks.
template <class K>
class Prefetcher {
 public:
  Prefetcher(const K* const* token, int num_heads, int numbers)
      : token_(token), last_(token + CHUNK - 1), num_heads_(num_heads), numbers_(numbers) {}

  // The next part, to be fetched; if there is none, one that was.
  const K* take() {
    const K* part = *token_ + head_ * numbers_;
    if (++head_ == num_heads_ && token_ != last_) head_ = 0, ++token_;
    if (head_ > num_heads_) head_ = num_heads_;
    return part;
  }
  void fetch_rest() {
    while (token_ != last_) fetch(take(), numbers_);
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

// A tile, where in each token's numbers the head's begin, and what is fetched meanwhile.
template <class K>
struct HeadTile {
  const KeyTile<K>& now;
  ptrdiff_t offset;
  Prefetcher<K>& ahead;
  const K* key(int i) const { return now.key[i] + offset; }
  const K* value(int i) const { return now.value[i] + offset; }
};

// What rows of one head see of a tile: those of the keys lo ... hi - 1 that a row sees are row_lo[r] ... row_hi[r] - 1.
struct VisibleKeys {
  int lo, hi, row_lo[ROWS_AT_ONCE], row_hi[ROWS_AT_ONCE];
  bool whole(int rows) const {
    bool all = lo == 0 && hi == KEYS;
    for (int r = 0; r < rows; ++r) all &= row_lo[r] <= 0 && row_hi[r] >= KEYS;
    return all;
  }
};

// Rows that are under way: what they ask for, scaled, and what they have so far, in the order in which load_pair loads.
struct DecodeRows {
  int padded_dim;
  float *query, *out;             // [rows, padded_dim]
  float *scores;                  // [rows, KEYS]
  float *largest, *total, *fade;  // [rows]
  DecodeRows from(int row) const {
    const ptrdiff_t begin = static_cast<ptrdiff_t>(row) * padded_dim;
    return {padded_dim, query + begin, out + begin, scores + row * KEYS, largest + row, total + row, fade + row};
  }
};

// The scores of the keys lo ... hi - 1, and of those beside them anything.
template <int ROWS, bool WHOLE, class K>
INLINE void score_keys(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi) {
  constexpr int TOGETHER = 4;  // keys whose sums are under way at once
  const float* query = rows.query;
  for (int first = lo / LANES * LANES; first < hi; first += LANES) {
    Floats sums[ROWS][LANES];
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += TOGETHER) {
      const K *row[TOGETHER], *ahead[TOGETHER];
      for (int t = 0; t < TOGETHER; ++t) {  // a key out of range stands in for nothing: its score is masked
        const int mine = WHOLE ? first + i + t : std::min(std::max(first + i + t, lo), hi - 1);
        row[t] = tile.key(mine);
        ahead[t] = tile.ahead.take();
      }
      Floats sum[TOGETHER][ROWS] = {};
      int d = 0;
      for (; d + 2 * LANES <= padded_dim; d += 2 * LANES) {
        Floats q[ROWS][2];
        for (int r = 0; r < ROWS; ++r)
          q[r][0] = load(query + r * padded_dim + d), q[r][1] = load(query + r * padded_dim + d + LANES);
        for (int t = 0; t < TOGETHER; ++t) {
          Floats k[2];
          load_pair(row[t] + d, k);
          Prefetcher<K>::fetch(ahead[t] + d, 2 * LANES);
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k[0] * q[r][0];
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k[1] * q[r][1];
        }
      }
      for (; d < padded_dim; d += LANES)
        for (int t = 0; t < TOGETHER; ++t) {
          const Floats k = load(row[t] + d);
          Prefetcher<K>::fetch(ahead[t] + d, LANES);
          for (int r = 0; r < ROWS; ++r) sum[t][r] += k * load(query + r * padded_dim + d);
        }
      for (int t = 0; t < TOGETHER; ++t)
        for (int r = 0; r < ROWS; ++r) sums[r][i + t] = sum[t][r];
    }
    for (int r = 0; r < ROWS; ++r) store(rows.scores + r * KEYS + first, sum_each(sums[r]));
  }
}

// out[r][d] = out[r][d] * fade[r] + sum over the keys lo ... hi - 1 of scores[r][i] * value[i][d], VECTORS from d on;
// what has faded already does not fade.
template <int ROWS, int VECTORS, class K>
INLINE void mix_values(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi, bool faded,
                       int d) {
  Floats sum[ROWS][VECTORS];
  float* out = rows.out + d;
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j)
      sum[r][j] = load(out + r * padded_dim + j * LANES) * (faded ? 1.0f : rows.fade[r]);
  for (int i = lo; i < hi; ++i) {
    const K* value = tile.value(i) + d;
    Floats v[VECTORS + 1];
#pragma GCC unroll 8
    for (int j = 0; j + 1 < VECTORS; j += 2) load_pair(value + j * LANES, v + j);
    if (VECTORS % 2) v[VECTORS - 1] = load(value + (VECTORS - 1) * LANES);
    if (d == 0) Prefetcher<K>::fetch(tile.ahead.take(), padded_dim);
#pragma GCC unroll 8
    for (int j = 0; j < VECTORS; ++j)
      for (int r = 0; r < ROWS; ++r) sum[r][j] += v[j] * rows.scores[r * KEYS + i];
  }
  for (int r = 0; r < ROWS; ++r)
    for (int j = 0; j < VECTORS; ++j) store(out + r * padded_dim + j * LANES, sum[r][j]);
}

// All columns from d on, as many vectors of them at once as there are; an odd number only at the end.
template <int ROWS, int VECTORS, class K>
INLINE void mix_columns(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, int lo, int hi, bool faded,
                        int d) {
  if constexpr (VECTORS % 2) {
    if (d + VECTORS * LANES == padded_dim) return mix_values<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, faded, d);
  } else {
    for (; d + VECTORS * LANES <= padded_dim; d += VECTORS * LANES)
      mix_values<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, faded, d);
  }
  if constexpr (VECTORS > 1) mix_columns<ROWS, VECTORS - 1>(rows, padded_dim, tile, lo, hi, faded, d);
}

// Turn one row's scores into weights; `fade` becomes the factor by which all before has to fade.
template <bool WHOLE>
INLINE void softmax_row(float* scores, int lo, int hi, float soft_cap, float* largest, float* total, float* fade) {
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
  const Floats faded = exp_nonpositive(splat(*largest - new_largest));
  Floats sum = {};
#pragma GCC unroll 4
  for (int i = 0; i < KEYS; i += LANES) {
    const Floats at = index + static_cast<float>(i);
    Floats weight = exp_nonpositive(score[i / LANES] - new_largest);
    if (!WHOLE) weight = at >= static_cast<float>(lo) && at < static_cast<float>(hi) ? weight : Floats{};
    store(scores + i, weight);
    sum += weight;
  }
  *total = *total * faded[0] + sum_lanes(sum);
  *largest = new_largest;
  *fade = faded[0];
}

// One of the three passes over a tile, for ROWS rows of a head: all heads' scores first, then all their weights, then
// what they mix. So what a row has to wait for within a pass is hidden by the next row's. Scores and mixtures are those
// of one chunk of the keys.
enum class Pass { SCORE, WEIGH, MIX };

template <Pass PASS, int ROWS, bool WHOLE, class K>
INLINE void decode_pass(const DecodeRows& rows, int padded_dim, const HeadTile<K>& tile, const VisibleKeys& visible,
                        int chunk, float soft_cap) {
  constexpr int VECTORS = std::min(8, REGISTERS / 2 / ROWS) / 2 * 2;
  const int lo = WHOLE ? chunk : std::max(visible.lo, chunk);
  const int hi = WHOLE ? chunk + CHUNK : std::min(visible.hi, chunk + CHUNK);
  if constexpr (PASS == Pass::SCORE) score_keys<ROWS, WHOLE>(rows, padded_dim, tile, lo, hi);
  if constexpr (PASS == Pass::WEIGH)
    for (int r = 0; r < ROWS; ++r)
      softmax_row<WHOLE>(rows.scores + r * KEYS, visible.row_lo[r], visible.row_hi[r], soft_cap, rows.largest + r,
                       rows.total + r, rows.fade + r);
  if constexpr (PASS == Pass::MIX) mix_columns<ROWS, VECTORS>(rows, padded_dim, tile, lo, hi, chunk > visible.lo, 0);
}

// The same for whichever tile, and the head_dims that are common known to the compiler.
template <Pass PASS, int ROWS, class K>
static void decode_pass(const DecodeRows& rows, const HeadTile<K>& tile, const VisibleKeys& visible, int chunk,
                        float soft_cap) {
  auto of_dim = [&](auto dim) { decode_pass<PASS, ROWS, true>(rows, dim, tile, visible, chunk, soft_cap); };
  if (!visible.whole(ROWS))
    return decode_pass<PASS, ROWS, false>(rows, rows.padded_dim, tile, visible, chunk, soft_cap);
  switch (rows.padded_dim) {
    case 48: return of_dim(std::integral_constant<int, 48>{});
    case 64: return of_dim(std::integral_constant<int, 64>{});
    case 128: return of_dim(std::integral_constant<int, 128>{});
    default: return of_dim(rows.padded_dim);
  }
}

// Rows that go over the same keys, from `begin` to `end` - 1: row r sees those from row_begin[r] to row_end[r] - 1.
template <class T>
struct KeyWalk {
  const AttentionRows<T>* work;
  int row, num_rows, begin, end;
  const int *row_begin, *row_end;

  int first_tile() const { return begin / KEYS * KEYS; }

  __attribute__((noinline)) void find(int tile, KeyTile<T>& found) const {
    const int lo = std::max(begin - tile, 0), hi = std::min(end - tile, KEYS);
    work->keys.rows(tile + lo, tile + hi, found.key + lo);
    work->values.rows(tile + lo, tile + hi, found.value + lo);
    std::fill(found.key, found.key + lo, found.key[lo]);  // something to fetch beside them
    std::fill(found.value, found.value + lo, found.value[lo]);
    std::fill(found.key + hi, found.key + KEYS, found.key[lo]);
    std::fill(found.value + hi, found.value + KEYS, found.value[lo]);
  }
};

template <Pass PASS, class T, class K>
static void decode_pass(const DecodeRows& rows, const KeyWalk<T>& walk, int first, int chunk, const HeadTile<K>& tile) {
  for (int row = 0, size; row < walk.num_rows; row += size) {
    size = std::min(walk.num_rows - row, ROWS_AT_ONCE);
    VisibleKeys visible;
    visible.lo = std::max(std::max(walk.begin, walk.row_begin[row]) - first, 0);
    visible.hi = std::min(walk.row_end[row + size - 1] - first, KEYS);
    if (visible.lo >= visible.hi) continue;
    if (PASS != Pass::WEIGH && (visible.lo >= chunk + CHUNK || visible.hi <= chunk)) continue;
    for (int r = 0; r < size; ++r) {
      visible.row_lo[r] = walk.row_begin[row + r] - first;
      visible.row_hi[r] = std::min(walk.row_end[row + r] - first, visible.hi);
    }
    const DecodeRows mine = rows.from(row);
    const float soft_cap = walk.work->soft_cap;
    switch (size) {
      case 1: decode_pass<PASS, 1>(mine, tile, visible, chunk, soft_cap); break;
      case 2: decode_pass<PASS, 2>(mine, tile, visible, chunk, soft_cap); break;
      case 3: decode_pass<PASS, 3>(mine, tile, visible, chunk, soft_cap); break;
      case 4: decode_pass<PASS, 4>(mine, tile, visible, chunk, soft_cap); break;
    }
  }
}

// The tile that begins at `first`, for the walk's rows of every head; those of neighbouring heads are `step` apart.
// Keys, then values, chunk after chunk; the one after each is fetched meanwhile.
template <class T>
static void decode_tile(const KeyWalk<T>& walk, int num_heads, const DecodeRows& rows, int step, int first,
                     const KeyTile<T>& now, const KeyTile<T>& next, int next_chunk) {
  const int lo = std::max(walk.begin - first, 0) / CHUNK * CHUNK, hi = std::min(walk.end - first, KEYS);
  auto pass = [&](auto which, int chunk, const T* const* following) {
    Prefetcher<T> ahead(following, num_heads, walk.work->head_dim);
    for (int head = 0; head < num_heads; ++head)
      decode_pass<which.value>(rows.from(head * step), walk, first, chunk,
                            HeadTile<T>{now, static_cast<ptrdiff_t>(head) * walk.work->head_dim, ahead});
    if (which.value != Pass::WEIGH) ahead.fetch_rest();
  };
  for (int chunk = lo; chunk < hi; chunk += CHUNK)
    pass(std::integral_constant<Pass, Pass::SCORE>{}, chunk,
         chunk + CHUNK < hi ? now.key + chunk + CHUNK : now.value + lo);
  pass(std::integral_constant<Pass, Pass::WEIGH>{}, lo, now.value + lo);
  for (int chunk = lo; chunk < hi; chunk += CHUNK)
    pass(std::integral_constant<Pass, Pass::MIX>{}, chunk,
         chunk + CHUNK < hi ? now.value + chunk + CHUNK : next.key + next_chunk);
}

// The same, for heads whose last vectors would reach into their neighbours, or that are float16, which is rare.
// wide: [2, KEYS, padded_dim].
template <class T>
static void widened_decode_tile(const KeyWalk<T>& walk, int num_heads, const DecodeRows& rows, int step, int first,
                             const KeyTile<T>& now, float* wide) {
  const int dim = walk.work->head_dim, padded_dim = rows.padded_dim;
  const int lo = std::max(walk.begin - first, 0), hi = std::min(walk.end - first, KEYS);
  KeyTile<float> widened;
  for (int i = 0; i < KEYS; ++i) {
    widened.key[i] = wide + i * padded_dim;
    widened.value[i] = wide + (KEYS + i) * padded_dim;
  }
  Prefetcher<float> nothing(widened.key, 0, 0);
  const HeadTile<float> tile{widened, 0, nothing};
  for (int head = 0; head < num_heads; ++head) {
    for (int i = lo; i < hi; ++i) {
      widen_row(now.key[i] + head * dim, dim, wide + i * padded_dim);
      widen_row(now.value[i] + head * dim, dim, wide + (KEYS + i) * padded_dim);
    }
    const DecodeRows mine = rows.from(head * step);
    const int begin = lo / CHUNK * CHUNK;
    for (int chunk = begin; chunk < hi; chunk += CHUNK) decode_pass<Pass::SCORE>(mine, walk, first, chunk, tile);
    decode_pass<Pass::WEIGH>(mine, walk, first, 0, tile);
    for (int chunk = begin; chunk < hi; chunk += CHUNK) decode_pass<Pass::MIX>(mine, walk, first, chunk, tile);
  }
}

// Few rows of each of some sequences, whose first `shared` keys, a multiple of KEYS that all rows see, are the same.
// Over those all rows go together; then each sequence's go on alone, from where they stand: in the order of a row
// alone. What `following` begins with is fetched at the end; null = nothing.
template <class T>
static void attend_decode(const AttentionRows<T>* works, int num_works, int num_heads, int shared,
                       const AttentionRows<T>* following, Scratch& scratch) {
  const int dim = works[0].head_dim, padded_dim = round_up(dim, LANES);
  const bool is_wide = std::is_same<T, Float16>::value || padded_dim != dim;
  int row_begin[MAX_SHARED_ROWS], row_end[MAX_SHARED_ROWS], all_shared[MAX_SHARED_ROWS], none[MAX_SHARED_ROWS] = {};
  KeyWalk<T> walks[MAX_SHARED_ROWS + 2];
  int count = 0, num_walks = shared > 0;
  for (int i = 0; i < num_works; ++i) {
    const int row = count;
    for (int r = 0; r < works[i].num_rows; ++r, ++count) {
      row_begin[count] = works[i].begin(r);
      row_end[count] = works[i].end(r);
      all_shared[count] = shared;
    }
    const int begin = std::max(shared, row_begin[row]);
    walks[num_walks++] = {works + i, row, count - row, begin, row_end[count - 1], row_begin + row, row_end + row};
  }
  if (shared) walks[0] = {works, 0, count, 0, shared, none, all_shared};
  if (following) walks[num_walks] = {following, 0, 0, following->begin(0), following->end(0), none, none};

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
        const AttentionRows<T> mine = works[i].under(head);
        for (int r = 0; r < mine.num_rows; ++r, ++row) use(mine, r, row);
      }
  };
  each_row([&](const AttentionRows<T>& work, int r, int row) {
    float* query = rows.query + row * padded_dim;
    if (is_wide)
      widen_row(work.query_row(r), dim, query);
    else
      widen_pairs(work.query_row(r), dim, query);
    for (int d = 0; d < dim; ++d) query[d] *= work.scale;
  });
  KeyTile<T> tiles[2];
  KeyTile<T>*now = tiles, *next = tiles + 1;
  walks[0].find(walks[0].first_tile(), *now);
  for (int i = 0; i < num_walks; ++i) {
    const KeyWalk<T>& walk = walks[i];
    for (int first = walk.first_tile(); first < walk.end; first += KEYS) {
      int chunk = 0;  // of the next tile, that comes first
      if (first + KEYS < walk.end) {
        walk.find(first + KEYS, *next);
      } else if (i + 1 < num_walks + (following != nullptr)) {
        walks[i + 1].find(walks[i + 1].first_tile(), *next);
        chunk = walks[i + 1].begin % KEYS / CHUNK * CHUNK;
      }
      const DecodeRows mine = rows.from(walk.row);
      if (is_wide)
        widened_decode_tile(walk, num_heads, mine, count, first, *now, wide);
      else
        decode_tile(walk, num_heads, mine, count, first, *now, *next, chunk);
      std::swap(now, next);
    }
  }
  each_row([&](const AttentionRows<T>& work, int r, int row) {
    const float *out = rows.out + row * padded_dim, factor = 1.0f / rows.total[row];
    if (is_wide)
      narrow_row(out, dim, factor, work.out_row(r));
    else
      narrow_pairs(out, dim, factor, work.out_row(r));
  });
}
