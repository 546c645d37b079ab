// Attention of some queries of one sequence over KV heads, straight from the paged cache.
//
// A sequence's queries, under all the query heads that share a KV head, make up its rows: row r is head r % group of
// query r / group. Keys are taken in tiles of KEYS, aligned to multiples of KEYS in the sequence, with a running
// maximum and sum per row (FlashAttention), so that a row's result depends on nothing but the row.
//
// Two ways. A few rows (decodes, also with drafts): the vectors run along head_dim, and what is loaded of a key serves
// all rows. Many rows (prefill chunks): the vectors run along the rows. Neither lets what a row may not see reach its
// result, whatever it is, even NaN.

#pragma once

#include "attention/amx.h"
#include "attention/decode.h"

constexpr int MAX_DECODE_ROWS = 8;  // measured: from there on the lanes' way is faster, although it leaves lanes idle
constexpr int DRAFT_TOKENS = 17;  // a decode, and what it may try beyond it: EngineConfig's num_speculative_tokens

// The way is chosen by all the rows that the sequence has: the last item of a long chunk is computed like the others,
// and a decode with a draft, bit for bit, like one without.
INLINE bool is_decode(int query_len, int group) {
  return query_len * group <= MAX_DECODE_ROWS || (group <= MAX_DECODE_ROWS && query_len <= DRAFT_TOKENS);
}

// Rows of one work item.
INLINE int rows_per_item(int query_len, int group) {
  return is_decode(query_len, group) ? std::min(query_len * group, MAX_DECODE_ROWS) : TILE_COLUMNS;
}

// Some rows of one sequence; or all of each of several, which are few, and whose first `shared` keys are the same: a
// multiple of KEYS that all rows see. num_works: at most MOST_TOGETHER. All under `num_heads` KV heads, from the
// works' on. following: what comes next, so that it can be fetched; null = nothing is known.
template <class T>
void attend(const AttentionRows<T>* works, int num_works, int num_heads, int shared, const AttentionRows<T>* following,
            Scratch& scratch) {
  const AttentionRows<T>& work = works[0];
  if (is_decode(work.query_len, work.group))
    return attend_decode(works, num_works, num_heads, work.window ? 0 : shared, following, scratch);
  for (int head = 0; head < num_heads; ++head) attend_prefill(work.under(head), scratch);
}
