// Routing in a mixture of experts: which experts a token uses, and the tokens of each expert one after the other.

#pragma once

#include <cmath>
#include <memory_resource>
#include <vector>

#include "step.h"

// Some tokens of an expert: places [first, first + count) of the order by expert.
struct ExpertRows {
  int expert, first, count;
};

// Experts that a token uses: `per_token` of all, and the shared one if there is one.
INLINE int experts_used(const Experts& experts) { return experts.per_token + experts.has_shared; }
INLINE int experts_in_all(const Experts& experts) { return experts.num_experts + experts.has_shared; }

// Choose the experts of a token. logits: of the router, overwritten; chosen, shares: [experts_used].
static void route(const Experts& experts, float* logits, int32_t* chosen, float* shares) {
  const int count = experts.num_experts;
  auto sigmoid_of = [](float x) { return 1.0f / (1.0f + std::exp(-x)); };
  float largest = 0.0f, total = 0.0f, taken = 0.0f;
  if (experts.is_sigmoid) {
    std::transform(logits, logits + count, logits, sigmoid_of);
  } else {
    largest = *std::max_element(logits, logits + count);
    for (int i = 0; i < count; ++i) total += std::exp(logits[i] - largest);
  }
  // Scores that are corrected for the choice are shares; of a softmax without that the logits have the same order.
  const bool are_shares = experts.is_sigmoid || experts.correction;
  if (are_shares && !experts.is_sigmoid)
    std::transform(logits, logits + count, logits, [&](float x) { return std::exp(x - largest) / total; });
  auto rank = [&](int i) { return experts.correction == nullptr ? logits[i] : logits[i] + experts.correction[i]; };
  for (int place = 0; place < experts.per_token; ++place) {
    int best = 0;  // in range for any logits, NaN included
    for (int i = 1; i < count; ++i)
      if (rank(i) > rank(best)) best = i;
    chosen[place] = best;
    taken += shares[place] = are_shares ? logits[best] : std::exp(logits[best] - largest) / total;
    logits[best] = -std::numeric_limits<float>::infinity();
  }
  for (int place = 0; place < experts.per_token; ++place)
    shares[place] *= (experts.is_normalised ? 1.0f / taken : 1.0f) * experts.share_scale *
                     (experts.scales == nullptr ? 1.0f : experts.scales[chosen[place]]);
  if (!experts.has_shared) return;
  chosen[experts.per_token] = count;
  shares[experts.per_token] = experts.has_shared_gate ? sigmoid_of(logits[count]) : 1.0f;
}

// Tokens of a layer in the order of their experts, and in that of the step within an expert.
struct ExpertOrder {
  int32_t *chosen, *token;  // [tokens * experts_used]: experts by token; tokens by place
  float *shares, *share;    // likewise

  // Fill in `token` and `share` from `chosen` and `shares`; return the rows of each expert, at most `most` at a time,
  // in `memory`.
  std::pmr::vector<ExpertRows> group(const Experts& experts, int num_tokens, int most,
                                     std::pmr::memory_resource* memory) const {
    const int used = experts_used(experts), all = experts_in_all(experts);
    std::pmr::vector<int> next(all + 1, memory);
    for (int i = 0; i < num_tokens * used; ++i) ++next[chosen[i] + 1];
    for (int expert = 0; expert < all; ++expert) next[expert + 1] += next[expert];
    std::pmr::vector<ExpertRows> groups(memory);
    for (int expert = 0; expert < all; ++expert)
      for (int first = next[expert]; first < next[expert + 1]; first += most)
        groups.push_back({expert, first, std::min(most, next[expert + 1] - first)});
    for (int i = 0; i < num_tokens * used; ++i) {
      const int place = next[chosen[i]]++;
      token[place] = i / used;
      share[place] = shares[i];
    }
    return groups;
  }

  // Return whether the tokens of some rows follow each other.
  bool are_adjacent(const ExpertRows& rows) const {
    return token[rows.first + rows.count - 1] - token[rows.first] == rows.count - 1;
  }

  bool have_same_tokens(const ExpertRows& one, const ExpertRows& other) const {
    return std::equal(token + one.first, token + one.first + one.count, token + other.first,
                      token + other.first + other.count);
  }
};
