// Input and output of attention: query rows, and keys and values in the paged cache.

#pragma once

#include <algorithm>

#include "scratch.h"
#include "simd.h"

constexpr int KEYS = 64;  // of a tile
constexpr float MASKED = -1e30f;  // below every score, and finite: the difference of two is 0, not NaN

// One KV head of one sequence, in keys or values [num_blocks, block_size, num_kv_heads, head_dim].
template <class T>
struct PagedHead {
  const T* slots;             // this head in slot 0
  const int32_t* blocks;      // the sequence's block table
  int block_size;
  ptrdiff_t slot_stride;      // elements from one slot to the next

  // Write the addresses of positions [begin, end) to `row`.
  void rows(int begin, int end, const T** row) const {
    int offset = begin % block_size;
    for (const int32_t* block = blocks + begin / block_size; begin < end; ++block, offset = 0) {
      const int count = std::min(end - begin, block_size - offset);
      const T* next = slots + (static_cast<ptrdiff_t>(*block) * block_size + offset) * slot_stride;
      for (int i = 0; i < count; ++i, next += slot_stride) row[i] = next;
      row += count;
      begin += count;
    }
  }
};

// Rows [first_row, first_row + num_rows) of one sequence and one KV head.
template <class T>
struct AttentionRows {
  const T* query;  // the sequence's first token, the KV head's first query head
  T* out;          // likewise
  ptrdiff_t query_stride_t, query_stride_h, out_stride_t, out_stride_h;  // elements
  PagedHead<T> keys, values;
  int first_row, num_rows, group, head_dim;
  int query_len, seq_len, window;  // tokens; window 0 = none
  float scale, soft_cap;           // soft_cap 0 = none
  const float* sinks;              // of the KV head's query heads: scores without a value; null = none

  int position(int row) const { return seq_len - query_len + (first_row + row) / group; }
  // Row `row` sees keys [begin(row), end(row)).
  int end(int row) const { return position(row) + 1; }
  int begin(int row) const { return window ? std::max(0, end(row) - window) : 0; }
  const T* query_row(int row) const {
    return query + (first_row + row) / group * query_stride_t + (first_row + row) % group * query_stride_h;
  }
  float sink(int row) const { return sinks[(first_row + row) % group]; }
  T* out_row(int row) const {
    return out + (first_row + row) / group * out_stride_t + (first_row + row) % group * out_stride_h;
  }
  // Return `count` of the rows, from row `first` on.
  AttentionRows part(int first, int count) const {
    AttentionRows rows = *this;
    rows.first_row += first;
    rows.num_rows = count;
    return rows;
  }
  // Return the same rows for the KV head `count` after this one.
  AttentionRows at_kv_head(int count) const {
    AttentionRows rows = *this;
    rows.query += count * group * query_stride_h;
    rows.out += count * group * out_stride_h;
    rows.keys.slots += count * head_dim;
    rows.values.slots += count * head_dim;
    if (sinks) rows.sinks += count * group;
    return rows;
  }
};

INLINE Floats capped(Floats score, float soft_cap) {
  return soft_cap > 0.0f ? tanh(score / soft_cap) * soft_cap : score;
}
