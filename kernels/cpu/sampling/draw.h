// Draw one token from a row of logits: temperature, min_p, top_k, top_p, and noise that is a function of (seed,
// position, token id). The rules and their order are those of random_draw.py and top_k_top_p.py in
// triolet.model.sampling, the noise is that of noise.py.
//
// The row is not sorted. One or two vector passes collect the tokens with the largest logits as candidates, few more
// than top_k and top_p keep, and only these are ordered. The logarithm of the noise is computed only for a token that
// could win with a lower bound of it.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "simd.h"

typedef uint64_t Longs __attribute__((vector_size(8 * LANES), aligned(8)));
typedef int64_t SignedLongs __attribute__((vector_size(8 * LANES), aligned(8)));

constexpr uint64_t GOLDEN_GAMMA = 0x9E3779B97F4A7C15u;
constexpr float BELOW_ONE = 1.0f - 0x1p-24f;
constexpr double TOP_P_TOLERANCE = 1e-6;  // see top_k_top_p.py

// Return output `index` of the SplitMix64 stream that starts at `start`; for a number or a vector.
template <class Bits>
INLINE Bits stream_output(Bits start, Bits index) {
  Bits bits = start + (index + 1) * GOLDEN_GAMMA;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// Convert 63 random bits to numbers in (0, 1).
INLINE float uniform(uint64_t bits) {
  return std::min(static_cast<float>(static_cast<int64_t>((bits >> 1) | 1)) * 0x1p-63f, BELOW_ONE);
}
INLINE Floats uniform(Longs bits) {
  const Floats number = __builtin_convertvector(reinterpret_cast<SignedLongs>((bits >> 1) | 1), Floats) * 0x1p-63f;
  return number < BELOW_ONE ? number : splat(BELOW_ONE);
}

// Sampling parameters of one row. Mirrored in abi.py.
struct Draw {
  double top_p;                        // above 1 = none
  int64_t answer, position;            // noise stream of the answer, and index of the token in the answer
  float temperature, max_logit, log_min_p;  // max_logit: of the row; log_min_p: -infinity = none
  int32_t top_k;                       // 0 = none
};

template <class T>
class RowDraw {
 public:
  RowDraw(const Draw& draw, const T* logits, int64_t count)
      : draw_(draw), logits_(logits), count_(count),
        stream_(stream_output(static_cast<uint64_t>(draw.answer), static_cast<uint64_t>(draw.position))),
        max_logit_(draw.max_logit / draw.temperature), floor_(max_logit_ + draw.log_min_p) {}

  int64_t token() {
    // The request fails: any token will do.
    if (!(std::fabs(max_logit_) <= std::numeric_limits<float>::max())) return 0;
    const bool has_top_p = draw_.top_p <= 1.0;
    if (!draw_.top_k && !has_top_p) return draw_from_all();
    const double total = draw_.top_k ? 0.0 : bucket_weights();
    float logit_range = draw_.top_k ? 8.0f : logit_range_for(target_weight(total));
    take_candidates(max_logit_ - logit_range);
    while (!covers_kept(total) && logit_range < std::numeric_limits<float>::infinity()) {
      logit_range = logit_range < 16.0f ? 2.0f * logit_range : std::numeric_limits<float>::infinity();
      take_candidates(max_logit_ - logit_range);
    }
    if (draw_.top_k) keep_top_k();
    if (has_top_p) keep_top_p(draw_.top_k ? weight_of(0, kept_.size()) : total);
    return draw_from_kept();
  }

 private:
  struct Candidate {
    float logit, weight;
    int32_t token;
    bool operator<(const Candidate& other) const {
      return logit > other.logit || (logit == other.logit && token < other.token);
    }
  };

  static constexpr int BUCKETS = 64, BUCKETS_PER_UNIT = 2;  // histogram of logits, from the largest down

  Floats scaled(int64_t token) const { return load(logits_ + token) / draw_.temperature; }
  float scaled_one(int64_t token) const { return widen(logits_[token]) / draw_.temperature; }
  double weight(float logit) const { return std::exp(static_cast<double>(logit) - max_logit_); }
  Floats weights(Floats logit) const {  // 0 for tokens below min_p, and where exp underflows
    const Floats below = logit - max_logit_;
    return logit >= floor_ && below > -87.0f ? exp_nonpositive(below) : Floats{};
  }

  // Replace the best token if this one scores higher. The logarithm is skipped if the token cannot win.
  void update_best(double weight, float number, int64_t token) {
    if (!(weight > best_ * number)) return;  // -log(1 - u) is at least u
    const double score = weight / -std::log1p(-number);
    if (score > best_ || token_ < 0) best_ = score, token_ = token;
  }

  int64_t draw_from_all() {
    Longs lane_index;
    for (int lane = 0; lane < LANES; ++lane) lane_index[lane] = lane;
    const Longs start = Longs{} + stream_;
    int64_t i = 0;
    for (; i + LANES <= count_; i += LANES) {
      const Floats weight = weights(scaled(i));
      const Floats number = uniform(stream_output(start, lane_index + static_cast<uint64_t>(i)));
      if (any(weight > static_cast<float>(best_ * 0.999999) * number))
        for (int lane = 0; lane < LANES; ++lane) update_best(weight[lane], number[lane], i + lane);
    }
    for (; i < count_; ++i) {
      const float logit = scaled_one(i);
      if (logit >= floor_) update_best(weight(logit), number_of(i), i);
    }
    return std::max<int64_t>(token_, 0);
  }

  int64_t draw_from_kept() {
    for (const Candidate& each : kept_) update_best(each.weight, number_of(each.token), each.token);
    return std::max<int64_t>(token_, 0);
  }

  float number_of(int64_t token) const {
    return uniform(stream_output(stream_, static_cast<uint64_t>(token)));
  }

  // Return the sum of all weights, and fill the histogram of weights by distance from the largest logit.
  double bucket_weights() {
    std::fill(buckets_, buckets_ + BUCKETS, 0.0);
    int64_t i = 0;
    for (; i + LANES <= count_; i += LANES) {
      const Floats logit = scaled(i), weight = weights(logit);
      const Floats far = (max_logit_ - logit) * BUCKETS_PER_UNIT;
      const Ints bucket = __builtin_convertvector(far < BUCKETS - 1.0f ? far : splat(BUCKETS - 1.0f), Ints);
      for (int lane = 0; lane < LANES; ++lane) buckets_[bucket[lane]] += weight[lane];
    }
    for (; i < count_; ++i)
      if (const float logit = scaled_one(i); logit >= floor_) {
        const float far = std::min((max_logit_ - logit) * BUCKETS_PER_UNIT, 1e3f);
        buckets_[std::min(BUCKETS - 1, static_cast<int>(far))] += weight(logit);
      }
    double total = 0.0;
    for (double each : buckets_) total += each;
    return total;
  }

  // Return the distance from the largest logit within which the weights reach `target_weight`.
  float logit_range_for(double target_weight) const {
    double sum = 0.0;
    for (int bucket = 0; bucket < BUCKETS - 1; ++bucket)
      if ((sum += buckets_[bucket]) >= target_weight) return static_cast<float>(bucket + 1) / BUCKETS_PER_UNIT;
    return std::numeric_limits<float>::infinity();
  }

  void take_candidates(float min_logit) {
    min_logit = std::max(min_logit, floor_);
    kept_.clear();
    auto add_if_kept = [&](float logit, float weight, int64_t token) {
      if (logit >= min_logit && logit > -std::numeric_limits<float>::infinity())
        kept_.push_back({logit, weight, static_cast<int32_t>(token)});
    };
    int64_t i = 0;
    for (; i + LANES <= count_; i += LANES) {
      const Floats logit = scaled(i);
      if (!any(logit >= min_logit)) continue;
      const Floats weight = weights(logit);
      for (int lane = 0; lane < LANES; ++lane) add_if_kept(logit[lane], weight[lane], i + lane);
    }
    for (; i < count_; ++i) add_if_kept(scaled_one(i), static_cast<float>(weight(scaled_one(i))), i);
  }

  // Return whether the candidates include every token that top_k or top_p keeps.
  bool covers_kept(double total) const {
    if (draw_.top_k) return kept_.size() >= static_cast<size_t>(draw_.top_k);
    return weight_of(0, kept_.size()) >= target_weight(total);
  }

  double target_weight(double total) const { return draw_.top_p * total * (1.0 - TOP_P_TOLERANCE); }

  double weight_of(size_t begin, size_t end) const {
    double sum = 0.0;
    for (size_t i = begin; i < end; ++i) sum += kept_[i].weight;
    return sum;
  }

  // Keep the k largest candidates and ties with the k-th.
  void keep_top_k() {
    const size_t k = static_cast<size_t>(draw_.top_k);
    if (kept_.size() <= k) return;
    std::nth_element(kept_.begin(), kept_.begin() + (k - 1), kept_.end());
    const float kth = kept_[k - 1].logit;
    kept_.erase(std::remove_if(kept_.begin() + k, kept_.end(), [&](const Candidate& c) { return c.logit < kth; }),
                kept_.end());
  }

  // Keep candidates until their weights reach the target: narrowed by bisection, then sorted.
  void keep_top_p(double total) {
    constexpr size_t FEW = 64;
    size_t begin = 0, end = kept_.size();
    double before = 0.0;
    // Larger logits need not be sorted.
    const float certain = max_logit_ - logit_range_for(target_weight(total)) + 1.0f / BUCKETS_PER_UNIT;
    if (!draw_.top_k) {
      const auto rest =
          std::partition(kept_.begin(), kept_.end(), [&](const Candidate& c) { return c.logit > certain; });
      const size_t middle = static_cast<size_t>(rest - kept_.begin());
      if (const double upper = weight_of(0, middle); upper < target_weight(total)) before = upper, begin = middle;
    }
    while (end - begin > FEW) {
      const size_t middle = begin + (end - begin) / 2;
      std::nth_element(kept_.begin() + begin, kept_.begin() + middle, kept_.begin() + end);
      const double upper = weight_of(begin, middle);
      if (before + upper >= target_weight(total))
        end = middle;
      else
        before += upper, begin = middle;
    }
    std::sort(kept_.begin() + begin, kept_.begin() + end);
    for (; begin < end && before < target_weight(total); ++begin) before += kept_[begin].weight;
    kept_.resize(std::max<size_t>(begin, 1));
  }

  static bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
#elif defined(__aarch64__)
    return vmaxvq_u32(reinterpret_cast<uint32x4_t>(mask)) != 0;
#else
    int32_t some = 0;
    for (int lane = 0; lane < LANES; ++lane) some |= mask[lane];
    return some != 0;
#endif
  }

  const Draw& draw_;
  const T* logits_;
  const int64_t count_;
  const uint64_t stream_;
  const float max_logit_, floor_;
  std::vector<Candidate> kept_;
  double buckets_[BUCKETS];
  double best_ = -1.0;
  int64_t token_ = -1;
};
