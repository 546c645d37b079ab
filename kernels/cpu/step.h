// Weights of a decoder, input and output of one step, and progress of a multi-step run. Mirrored in abi.py.

#pragma once

#include "gemm/lora.h"
#include "sampling/argmax_candidates.h"

struct Layer {
  Linear qkv, attention_out, gate_up, down;
  const float *attention_norm, *query_norm, *key_norm, *mlp_norm;  // query_norm, key_norm: null = none
  const float *attention_norm_bias, *mlp_norm_bias;  // of layer norms; null = root-mean-square norms
  // Of what attention and feed-forward block add to the residual stream; null = added as it is.
  const float *post_attention_norm, *post_mlp_norm;
  const float* cos_sin;  // [positions, rotary_dim], cosines first; null = positions are learned vectors
  int32_t rotary_dim, sliding_window;
  float scale;
};

struct Model {
  const Layer* layers;
  const void* embedding;  // [vocab_size, hidden], or rows of a file's blocks; null = the head's weights, packed
  const void* learned_positions;  // [positions, hidden]; null = none
  const float *final_norm, *final_norm_bias;
  Linear head;
  ArgmaxFilter argmax_filter;  // for the head
  int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, dtype, gelu;
  int32_t embedding_format;  // a BlockFormat of GGUF; 0 = the model's dtype
  float eps, attention_soft_cap, logit_soft_cap;  // a soft cap of 0 = none
  float embedding_scale;  // embeddings are multiplied by it
};

struct Step {
  int64_t *token_ids, *positions, *slots;
  const int64_t* logits_indices;
  const int32_t* cu_query_lens;
  int32_t* seq_lens;
  const int32_t* block_tables;
  void *const *keys, *const *values;  // one cache per layer
  const void* const* embeddings;      // [num_tokens]: rows of hidden numbers in the place of embeddings; null = none
  void* hidden;                       // [num_tokens, hidden], normalised; if not null, the only output
  void* logits;                       // [num_logits, vocab_size]; null = compute max_logits and argmax instead
  float* max_logits;                       // [num_logits]: the largest logits; NaN if any logit is NaN
  int64_t* argmax;                      // [num_logits]: the first token with the largest logit
  const int64_t* adapter_slots;      // [num_tokens]: places in `adapters`, negative = none; null = no token has one
  const Adapter* const* adapters;    // by slot; null = leave its tokens as they are
  int64_t block_tables_stride;
  int32_t num_tokens, num_seqs, num_logits, block_size, num_threads;
};

// Several steps in a background thread. The caller reads and writes this struct during the run.
struct MultiStepRun {
  float* elapsed_s;   // [num_steps]: duration of each step, seconds
  int32_t num_steps;  // maximum: logits that are not finite end the run early
  int32_t is_halted;  // set by the caller: end the run after the current step
  int32_t num_done;   // completed steps; negative once the run is over
};

EXPORT void triolet_step(const Model* model, const Step* step);

// Compute only the head: logits, or max_logits and argmax, of `hidden`, which is an input [num_logits, hidden] here and
// of the model's dtype; `adapter_slots` is [num_logits] then.
EXPORT void triolet_head(const Model* model, const Step* step);
