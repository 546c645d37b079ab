// Draw one token from a row of logits: temperature, min_p, top_k, top_p, and noise that is a function of (seed,
// position, token id). The rules and their order are those of random_draw.py and top_k_top_p.py in
// triolet.model.sampling, the noise is that of noise.py.
//
// Nothing is sorted but what is drawn from. A row is passed over once or twice in vectors: its likeliest tokens are
// taken out as candidates, hardly more than top_k and top_p keep; and a token that the noise could not let win, even if
// it were the smallest that its random bits allow, costs no logarithm.

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

// Number `index` of the SplitMix64 stream that starts at `start`; for one number or for a vector of them.
template <class Bits>
INLINE Bits stream_output(Bits start, Bits index) {
  Bits bits = start + (index + 1) * GOLDEN_GAMMA;
  bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
  bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
  return bits ^ (bits >> 31);
}

// 63 random bits as numbers in (0, 1).
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
  int64_t answer, position;            // of the noise: where the answer's begins, and which of its tokens this will be
  float temperature, max_logit, log_min_p;  // peak: the largest logit; log_min_p: -infinity = none
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
    if (!(std::fabs(max_logit_) <= std::numeric_limits<float>::max())) return 0;  // it fails: any will do
    const bool has_top_p = draw_.top_p <= 1.0;
    if (!draw_.top_k && !has_top_p) return among_all();
    const double total = draw_.top_k ? 0.0 : weigh_all();
    float reach = draw_.top_k ? 8.0f : reach_for(goal(total));
    take_candidates(max_logit_ - reach);
    while (!holds_all(total) && reach < std::numeric_limits<float>::infinity()) {
      reach = reach < 16.0f ? 2.0f * reach : std::numeric_limits<float>::infinity();
      take_candidates(max_logit_ - reach);
    }
    if (draw_.top_k) keep_top_k();
    if (has_top_p) keep_top_p(draw_.top_k ? weight_of(0, kept_.size()) : total);
    return among_kept();
  }

 private:
  struct Candidate {
    float logit, weight;
    int32_t token;
    bool operator<(const Candidate& other) const {
      return logit > other.logit || (logit == other.logit && token < other.token);
    }
  };

  static constexpr int BUCKETS = 64, BUCKETS_PER_UNIT = 2;  // of logits, from the largest down

  Floats scaled(int64_t token) const { return load(logits_ + token) / draw_.temperature; }
  float scaled_one(int64_t token) const { return widen(logits_[token]) / draw_.temperature; }
  double weight(float logit) const { return std::exp(static_cast<double>(logit) - max_logit_); }
  Floats weights(Floats logit) const {  // 0 for what min_p drops, and for what exp would round to it
    const Floats below = logit - max_logit_;
    return logit >= floor_ && below > -87.0f ? exp_nonpositive(below) : Floats{};
  }

  // A likelier token has come, or not; the noise of a token is made only if it may win with it.
  void offer(double weight, float number, int64_t token) {
    if (!(weight > best_ * number)) return;  // -log(1 - u) is at least u
    const double score = weight / -std::log1p(-number);
    if (score > best_ || token_ < 0) best_ = score, token_ = token;
  }

  int64_t among_all() {
    Longs lane_index;
    for (int lane = 0; lane < LANES; ++lane) lane_index[lane] = lane;
    const Longs start = Longs{} + stream_;
    int64_t i = 0;
    for (; i + LANES <= count_; i += LANES) {
      const Floats weight = weights(scaled(i));
      const Floats number = uniform(stream_output(start, lane_index + static_cast<uint64_t>(i)));
      if (any(weight > static_cast<float>(best_ * 0.999999) * number))
        for (int lane = 0; lane < LANES; ++lane) offer(weight[lane], number[lane], i + lane);
    }
    for (; i < count_; ++i) {
      const float logit = scaled_one(i);
      if (logit >= floor_) offer(weight(logit), number_of(i), i);
    }
    return std::max<int64_t>(token_, 0);
  }

  int64_t among_kept() {
    for (const Candidate& each : kept_) offer(each.weight, number_of(each.token), each.token);
    return std::max<int64_t>(token_, 0);
  }

  float number_of(int64_t token) const {
    return uniform(stream_output(stream_, static_cast<uint64_t>(token)));
  }

  // The sum of all weights; on the way, how much of it is how far below the peak.
  double weigh_all() {
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

  // How far below the peak the goal is reached.
  float reach_for(double goal) const {
    double sum = 0.0;
    for (int bucket = 0; bucket < BUCKETS - 1; ++bucket)
      if ((sum += buckets_[bucket]) >= goal) return static_cast<float>(bucket + 1) / BUCKETS_PER_UNIT;
    return std::numeric_limits<float>::infinity();
  }

  void take_candidates(float least) {
    least = std::max(least, floor_);
    kept_.clear();
    auto consider = [&](float logit, float weight, int64_t token) {
      if (logit >= least && logit > -std::numeric_limits<float>::infinity())
        kept_.push_back({logit, weight, static_cast<int32_t>(token)});
    };
    int64_t i = 0;
    for (; i + LANES <= count_; i += LANES) {
      const Floats logit = scaled(i);
      if (!any(logit >= least)) continue;
      const Floats weight = weights(logit);
      for (int lane = 0; lane < LANES; ++lane) consider(logit[lane], weight[lane], i + lane);
    }
    for (; i < count_; ++i) consider(scaled_one(i), static_cast<float>(weight(scaled_one(i))), i);
  }

  // Whether no token outside of the candidates would be kept.
  bool holds_all(double total) const {
    if (draw_.top_k) return kept_.size() >= static_cast<size_t>(draw_.top_k);
    return weight_of(0, kept_.size()) >= goal(total);
  }

  double goal(double total) const { return draw_.top_p * total * (1.0 - TOP_P_TOLERANCE); }

  double weight_of(size_t begin, size_t end) const {
    double sum = 0.0;
    for (size_t i = begin; i < end; ++i) sum += kept_[i].weight;
    return sum;
  }

  // The k-th and what ties with it stay.
  void keep_top_k() {
    const size_t k = static_cast<size_t>(draw_.top_k);
    if (kept_.size() <= k) return;
    std::nth_element(kept_.begin(), kept_.begin() + (k - 1), kept_.end());
    const float kth = kept_[k - 1].logit;
    kept_.erase(std::remove_if(kept_.begin() + k, kept_.end(), [&](const Candidate& c) { return c.logit < kth; }),
                kept_.end());
  }

  // Those before which less than the goal was reached: found by halving, then in order.
  void keep_top_p(double total) {
    constexpr size_t FEW = 64;
    size_t begin = 0, end = kept_.size();
    double before = 0.0;
    const float sure = max_logit_ - reach_for(goal(total)) + 1.0f / BUCKETS_PER_UNIT;  // most need no order
    if (!draw_.top_k) {
      const auto rest = std::partition(kept_.begin(), kept_.end(), [&](const Candidate& c) { return c.logit > sure; });
      const size_t middle = static_cast<size_t>(rest - kept_.begin());
      if (const double upper = weight_of(0, middle); upper < goal(total)) before = upper, begin = middle;
    }
    while (end - begin > FEW) {
      const size_t middle = begin + (end - begin) / 2;
      std::nth_element(kept_.begin() + begin, kept_.begin() + middle, kept_.begin() + end);
      const double upper = weight_of(begin, middle);
      if (before + upper >= goal(total))
        end = middle;
      else
        before += upper, begin = middle;
    }
    std::sort(kept_.begin() + begin, kept_.begin() + end);
    for (; begin < end && before < goal(total); ++begin) before += kept_[begin].weight;
    kept_.resize(std::max<size_t>(begin, 1));
  }

  static bool any(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask(reinterpret_cast<__m512i>(mask), reinterpret_cast<__m512i>(mask)) != 0;
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
