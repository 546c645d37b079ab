// Routing in a mixture of experts: which experts a token uses, and the tokens of each expert one after the other.

#pragma once

#include <cmath>
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
  const float largest = *std::max_element(logits, logits + count);
  float total = 0.0f, taken = 0.0f;
  for (int i = 0; i < count; ++i) total += std::exp(logits[i] - largest);
  for (int place = 0; place < experts.per_token; ++place) {
    int best = 0;  // in range for any logits, NaN included
    for (int i = 1; i < count; ++i)
      if (logits[i] > logits[best]) best = i;
    chosen[place] = best;
    taken += shares[place] = std::exp(logits[best] - largest) / total;
    logits[best] = -std::numeric_limits<float>::infinity();
  }
  for (int place = 0; experts.is_normalised && place < experts.per_token; ++place) shares[place] /= taken;
  if (!experts.has_shared) return;
  chosen[experts.per_token] = count;
  shares[experts.per_token] = 1.0f / (1.0f + std::exp(-logits[count]));
}

// Tokens of a layer in the order of their experts, and in that of the step within an expert.
struct ExpertOrder {
  int32_t *chosen, *token;  // [tokens * experts_used]: experts by token; tokens by place
  float *shares, *share;    // likewise

  // Fill in `token` and `share` from `chosen` and `shares`; return the rows of each expert, at most `most` at a time.
  std::vector<ExpertRows> group(const Experts& experts, int num_tokens, int most) const {
    const int used = experts_used(experts), all = experts_in_all(experts);
    std::vector<int> next(all + 1);
    for (int i = 0; i < num_tokens * used; ++i) ++next[chosen[i] + 1];
    for (int expert = 0; expert < all; ++expert) next[expert + 1] += next[expert];
    std::vector<ExpertRows> groups;
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
};
