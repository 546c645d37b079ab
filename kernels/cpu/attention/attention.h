// Attention of some queries of one sequence over KV heads, straight from the paged cache.
//
// Rows are (query, query head) pairs that share a KV head: row r is head r % group of query r / group. Keys are
// processed in tiles of KEYS, aligned to multiples of KEYS in the sequence, with an online softmax per row
// (FlashAttention). Tile borders do not depend on the batch, so neither does a row's result.
//
// There are two algorithms. Decode (few rows, also with draft tokens): vectors run along head_dim, and a loaded key is
// used for all rows. Prefill (many rows): vectors run along the rows. In both, masked keys and values cannot affect a
// row's result, even if they are NaN.

#pragma once

#include "attention/amx.h"
#include "attention/decode.h"

// Measured: above this the prefill algorithm is faster, although some lanes are idle.
constexpr int MAX_DECODE_ROWS = 8;
constexpr int DRAFT_TOKENS = 17;  // one token and the maximum of EngineConfig's num_speculative_tokens

// Return whether the decode algorithm applies. The choice depends on the sequence, not on the work item: the short last
// item of a long chunk must be computed like the others, and a decode with draft tokens must give the same bits as one
// without.
INLINE bool is_decode(int query_len, int group) {
  return query_len * group <= MAX_DECODE_ROWS || (group <= MAX_DECODE_ROWS && query_len <= DRAFT_TOKENS);
}

// Measured: more rows of one prefill item read keys and values less often, and their queries and outputs leave the cache.
constexpr int MAX_PREFILL_ROWS = 128;
static_assert(MAX_PREFILL_ROWS % TILE_COLUMNS == 0, "work items consist of whole strips");

// Maximum number of rows of one work item, if prefill items may have `prefill_rows`.
INLINE int rows_per_item(int query_len, int group, int prefill_rows) {
  return is_decode(query_len, group) ? std::min(query_len * group, MAX_DECODE_ROWS) : prefill_rows;
}

// Compute attention of one work item: some rows of one sequence, or all rows of several decode sequences with a common
// prefix.
//
// num_works: number of sequences; their rows together are at most MAX_SHARED_ROWS.
// num_heads: consecutive KV heads, from that of `works` on.
// shared: length of the common prefix in keys, a multiple of KEYS, visible to all rows; 0 = none.
// next_work: rows to be computed after these, whose first keys are prefetched; null = none.
template <class T>
void attend(const AttentionRows<T>* works, int num_works, int num_heads, int shared, const AttentionRows<T>* next_work,
            Scratch& scratch) {
  const AttentionRows<T>& work = works[0];
  if (is_decode(work.query_len, work.group))
    return attend_decode(works, num_works, num_heads, work.window ? 0 : shared, next_work, scratch);
  for (int head = 0; head < num_heads; ++head) attend_prefill(work.at_kv_head(head), scratch);
}
