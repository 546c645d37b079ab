// Work items of one layer's attention: the units that threads take.

#pragma once

#include <cstring>
#include <memory_resource>
#include <utility>
#include <vector>

#include "attention/attention.h"

// Mirrored in abi.py.
struct AttentionCall {
  const void *query, *keys, *values;
  const float* sinks;  // [num_heads]: a score of each query head without a value; null = none
  void* out;  // [num_tokens, num_heads, head_dim], contiguous
  const int32_t *cu_query_lens, *seq_lens, *block_tables;
  int64_t query_stride_t, query_stride_h, block_tables_stride;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, sliding_window, dtype, num_threads;
  float scale, soft_cap;
};

// A unit of work for some KV heads: some rows of one sequence, or all rows of several decode sequences with a common
// prefix of `shared` keys.
struct WorkItem {
  int first_head, num_heads, first_row, num_rows, num_sequences, shared;
  int sequences[MAX_SHARED_ROWS];
};

using WorkItems = std::pmr::vector<WorkItem>;

// Common prefixes of sequences, by their block tables. Only whole tiles before a sequence's new tokens are compared.
class Prefixes {
 public:
  explicit Prefixes(const AttentionCall& call) : call_(call) {}

  int length(int sequence) const {
    const int query_len = call_.cu_query_lens[sequence + 1] - call_.cu_query_lens[sequence];
    return (call_.seq_lens[sequence] - query_len) / KEYS * KEYS;
  }

  // Total order that makes sequences with equal prefixes adjacent, longer ones first.
  bool before(int one, int other) const {
    const int length_one = num_blocks(one), length_other = num_blocks(other);
    const int sign = std::memcmp(blocks(one), blocks(other), std::min(length_one, length_other) * sizeof(int32_t));
    return sign ? sign > 0 : length_one != length_other ? length_one > length_other : one < other;
  }

  // Return the length of the common prefix in keys, a multiple of KEYS.
  int shared(int one, int other) const {
    const int most = std::min(num_blocks(one), num_blocks(other));
    const int32_t* begin = blocks(one);
    const ptrdiff_t num_equal = std::mismatch(begin, begin + most, blocks(other)).first - begin;
    return std::min({static_cast<int>(num_equal) * call_.block_size / KEYS * KEYS, length(one), length(other)});
  }

 private:
  int num_blocks(int sequence) const { return (length(sequence) + call_.block_size - 1) / call_.block_size; }
  const int32_t* blocks(int sequence) const { return call_.block_tables + sequence * call_.block_tables_stride; }
  const AttentionCall& call_;
};

// Add items for decode sequences, each for all KV heads. Sequences with a common prefix share an item, but only as many
// as leave work for every thread.
inline void add_shared_items(const AttentionCall& call, std::pmr::vector<int> sequences, WorkItems& items) {
  const int group = call.num_heads / call.num_kv_heads;
  const Prefixes prefixes(call);
  const int limit = static_cast<int>(sequences.size()) * call.num_kv_heads / (2 * std::max(1, call.num_threads));
  std::sort(sequences.begin(), sequences.end(), [&](int one, int other) { return prefixes.before(one, other); });
  bool may_grow = false;
  for (int sequence : sequences) {
    const int rows = (call.cu_query_lens[sequence + 1] - call.cu_query_lens[sequence]) * group;
    if (may_grow) {
      WorkItem& last = items.back();
      const int shared = prefixes.shared(last.sequences[0], sequence);
      const bool fits = last.num_rows + rows <= MAX_SHARED_ROWS && last.num_sequences < limit;
      if (fits && shared > 0 && 2 * shared >= last.shared) {
        last.shared = last.shared ? std::min(last.shared, shared) : shared;
        last.num_rows += rows;
        last.sequences[last.num_sequences++] = sequence;
        continue;
      }
    }
    items.push_back({0, call.num_kv_heads, 0, rows, 1, 0, {sequence}});
    may_grow = true;
  }
}

// Return the number of KV heads per decode item: few enough for every thread to have several items, and for two tiles
// to fit into the L2 cache.
inline int heads_per_item(const AttentionCall& call, int num_items) {
  constexpr int ITEMS_PER_THREAD = 8, TILE_BYTES = 256 * 1024;
  const int parts = (ITEMS_PER_THREAD * call.num_threads + num_items - 1) / std::max(1, num_items);
  const int head_bytes = 2 * KEYS * call.head_dim * (call.dtype == 0 ? 4 : 2);
  return std::max(1, std::min((call.num_kv_heads + parts - 1) / parts, TILE_BYTES / head_bytes));
}

// Split each item into items of at most `max_heads` KV heads. Those of the same heads follow each other: where
// sequences, or the parts of a long prompt, have keys and values in common, a core reads them from its own cache.
inline WorkItems cut_by_heads(const WorkItems& items, int num_kv_heads, int max_heads) {
  WorkItems cut(items.get_allocator());
  cut.reserve(items.size() * ((num_kv_heads + max_heads - 1) / max_heads));
  for (int head = 0; head < num_kv_heads; head += max_heads)
    for (const WorkItem& item : items) {
      cut.push_back(item);
      cut.back().first_head = head;
      cut.back().num_heads = std::min(max_heads, num_kv_heads - head);
    }
  return cut;
}

// Return the number of rows per prefill item: whole strips, few enough for every thread to have several items. A row's
// result does not depend on it.
inline int prefill_rows_per_item(const AttentionCall& call) {
  constexpr int ITEMS_PER_THREAD = 8;
  const int group = call.num_heads / call.num_kv_heads;
  int64_t num_strips = 0;
  for (int sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int query_len = call.cu_query_lens[sequence + 1] - call.cu_query_lens[sequence];
    if (!is_decode(query_len, group)) num_strips += (query_len * group + TILE_COLUMNS - 1) / TILE_COLUMNS;
  }
  const int64_t strips = num_strips * call.num_kv_heads / (ITEMS_PER_THREAD * std::max(1, call.num_threads));
  return TILE_COLUMNS * static_cast<int>(std::clamp<int64_t>(strips, 1, MAX_PREFILL_ROWS / TILE_COLUMNS));
}

// Return the items of a call, in `memory`.
inline WorkItems work_items_of(const AttentionCall& call, std::pmr::memory_resource* memory) {
  WorkItems decode_items(memory), prefill_items(memory);
  std::pmr::vector<int> decode_sequences(memory);
  const int group = call.num_heads / call.num_kv_heads, prefill_rows = prefill_rows_per_item(call);
  for (int sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int query_len = call.cu_query_lens[sequence + 1] - call.cu_query_lens[sequence], rows = query_len * group;
    if (rows == 0) continue;
    if (2 * rows <= MAX_SHARED_ROWS) {
      decode_sequences.push_back(sequence);
      continue;
    }
    const int most = rows_per_item(query_len, group, prefill_rows);
    // Longest first, for load balance: the last queries see the most keys.
    for (int first = (rows - 1) / most * most; first >= 0; first -= most)
      prefill_items.push_back({0, call.num_kv_heads, first, std::min(most, rows - first), 1, 0, {sequence}});
  }
  add_shared_items(call, std::move(decode_sequences), decode_items);
  WorkItems items = cut_by_heads(prefill_items, call.num_kv_heads, 1);
  const int max_heads = heads_per_item(call, static_cast<int>(decode_items.size()));
  const WorkItems cut = cut_by_heads(decode_items, call.num_kv_heads, max_heads);
  items.insert(items.end(), cut.begin(), cut.end());
  return items;
}

// Return all rows of a sequence.
template <class T>
inline AttentionRows<T> rows_of(const AttentionCall& call, int sequence, int kv_head) {
  const int group = call.num_heads / call.num_kv_heads, dim = call.head_dim;
  const ptrdiff_t slot_stride = static_cast<ptrdiff_t>(call.num_kv_heads) * dim;
  const ptrdiff_t first_token = call.cu_query_lens[sequence];
  const int32_t* blocks = call.block_tables + sequence * call.block_tables_stride;
  const ptrdiff_t head = static_cast<ptrdiff_t>(kv_head) * dim;
  AttentionRows<T> work;
  work.query = static_cast<const T*>(call.query) + first_token * call.query_stride_t +
               kv_head * group * call.query_stride_h;
  work.out = static_cast<T*>(call.out) + first_token * call.num_heads * dim + head * group;
  work.query_stride_t = call.query_stride_t;
  work.query_stride_h = call.query_stride_h;
  work.out_stride_t = static_cast<ptrdiff_t>(call.num_heads) * dim;
  work.out_stride_h = dim;
  work.keys = {static_cast<const T*>(call.keys) + head, blocks, call.block_size, slot_stride};
  work.values = {static_cast<const T*>(call.values) + head, blocks, call.block_size, slot_stride};
  work.query_len = call.cu_query_lens[sequence + 1] - call.cu_query_lens[sequence];
  work.first_row = 0;
  work.num_rows = work.query_len * group;
  work.group = group;
  work.head_dim = dim;
  work.seq_len = call.seq_lens[sequence];
  work.window = call.sliding_window;
  work.scale = call.scale;
  work.soft_cap = call.soft_cap;
  work.sinks = call.sinks ? call.sinks + kv_head * group : nullptr;
  return work;
}

// Compute one item; the next one is prefetched, since the same thread is likely to take it.
template <class T>
inline void attend(const AttentionCall& call, const WorkItems& items, size_t index, Scratch& scratch) {
  auto rows_at = [&](const WorkItem& item, int i) { return rows_of<T>(call, item.sequences[i], item.first_head); };
  const WorkItem& item = items[index];
  AttentionRows<T> works[MAX_SHARED_ROWS], next_work;
  for (int i = 0; i < item.num_sequences; ++i) works[i] = rows_at(item, i);
  if (item.num_sequences == 1) {
    works[0].first_row = item.first_row;
    works[0].num_rows = item.num_rows;
  }
  const bool is_last = index + 1 == items.size();
  if (!is_last) next_work = rows_at(items[index + 1], 0);
  attend(works, item.num_sequences, item.num_heads, item.shared, is_last ? nullptr : &next_work, scratch);
}
