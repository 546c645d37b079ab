// One layer's attention of a whole step, cut into pieces of work.

#pragma once

#include <vector>

#include "attention.h"

// Mirrored by AttentionCall in paged_attention.py, field by field.
struct AttentionCall {
  const void *query, *keys, *values;
  void* out;  // [num_tokens, num_heads, head_dim], contiguous
  const int32_t *cu_query_lens, *seq_lens, *block_tables;
  int64_t query_stride_t, query_stride_h, block_tables_stride;
  int32_t num_seqs, num_heads, num_kv_heads, head_dim, block_size, sliding_window, dtype, num_threads;
  float scale, soft_cap;
};

// Some rows of one sequence, under each KV head a unit of work.
struct Piece {
  int sequence, first_row, num_rows;
};

inline std::vector<Piece> pieces_of(const AttentionCall& call) {
  std::vector<Piece> pieces;
  const int group = call.num_heads / call.num_kv_heads;
  for (int sequence = 0; sequence < call.num_seqs; ++sequence) {
    const int query_len = call.cu_query_lens[sequence + 1] - call.cu_query_lens[sequence], rows = query_len * group;
    if (rows == 0) continue;
    const int most = rows_per_piece(query_len, group);
    // From the end: the last queries see the most keys, and what takes longest is best begun first.
    for (int first = (rows - 1) / most * most; first >= 0; first -= most)
      pieces.push_back({sequence, first, std::min(most, rows - first)});
  }
  return pieces;
}

template <class T>
inline AttentionRows<T> rows_of(const AttentionCall& call, const Piece& piece, int kv_head) {
  const int group = call.num_heads / call.num_kv_heads, dim = call.head_dim;
  const ptrdiff_t slot_stride = static_cast<ptrdiff_t>(call.num_kv_heads) * dim;
  const ptrdiff_t first_token = call.cu_query_lens[piece.sequence];
  const int32_t* blocks = call.block_tables + piece.sequence * call.block_tables_stride;
  const ptrdiff_t head = static_cast<ptrdiff_t>(kv_head) * dim;
  AttentionRows<T> work;
  work.query = static_cast<const T*>(call.query) + first_token * call.query_stride_t + kv_head * group * call.query_stride_h;
  work.out = static_cast<T*>(call.out) + first_token * call.num_heads * dim + head * group;
  work.query_stride_t = call.query_stride_t;
  work.query_stride_h = call.query_stride_h;
  work.out_stride_t = static_cast<ptrdiff_t>(call.num_heads) * dim;
  work.out_stride_h = dim;
  work.keys = {static_cast<const T*>(call.keys) + head, blocks, call.block_size, slot_stride};
  work.values = {static_cast<const T*>(call.values) + head, blocks, call.block_size, slot_stride};
  work.first_row = piece.first_row;
  work.num_rows = piece.num_rows;
  work.group = group;
  work.head_dim = dim;
  work.query_len = call.cu_query_lens[piece.sequence + 1] - call.cu_query_lens[piece.sequence];
  work.seq_len = call.seq_lens[piece.sequence];
  work.window = call.sliding_window;
  work.scale = call.scale;
  work.soft_cap = call.soft_cap;
  return work;
}
