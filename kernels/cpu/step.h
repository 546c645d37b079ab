// Weights of a decoder, input and output of one step, and progress of a multi-step run. Mirrored in abi.py.

#pragma once

#include "gemm/lora.h"
#include "sampling/argmax_candidates.h"

// A mixture of experts in place of a layer's feed-forward block, or beside it.
struct Experts {
  Linear router;            // its last output is the gate of the shared expert, if that has one
  const Linear *in, *out;   // [num_experts], and the shared one: gate and up; down
  const float* correction;  // [num_experts]: added to the scores for the choice alone; null = none
  const float* scales;      // [num_experts]: the shares are multiplied by them; null = none
  // Beside a dense block: the norms through which router and experts read the residual stream, and those of what experts
  // and dense block give; null = there are experts alone, and they read what the dense block would.
  const float *router_norm, *norm, *post_norm, *post_dense_norm;
  int32_t num_experts, per_token;
  int32_t is_sigmoid;       // scores are sigmoids of what the router gives, not a softmax
  int32_t is_normalised;    // the shares of a token's experts add up to 1
  int32_t has_shared;       // all tokens use one more expert
  int32_t has_shared_gate;  // its share is the sigmoid of its gate, not 1
  float share_scale;        // the shares of a token's experts are multiplied by it
  float gate_alpha, gate_limit;  // (up + 1) * gate * sigmoid(alpha * gate), both within the limit; 0 = as in other layers
};

struct Layer {
  Linear qkv, attention_out, gate_up, down;
  // Of the layer's input beside the residual stream, see LayerInputs: its gate, and back to the width of the stream.
  Linear input_gate, input_out;
  const Experts* experts;  // null = gate_up and down alone
  const float* sinks;      // [num_heads]: a score of each query head without a value; null = none
  // Null = none. query_norm, key_norm: [head_dim], or with `norms_rows` or `norms_heads` of Model
  // [num_heads or num_kv_heads, head_dim].
  const float *attention_norm, *query_norm, *key_norm, *value_norm, *mlp_norm;
  // Of layer norms; null = root-mean-square norms. query_norm_bias, key_norm_bias: [head_dim], of all heads.
  const float *attention_norm_bias, *mlp_norm_bias, *query_norm_bias, *key_norm_bias;
  // Of what attention and feed-forward block add to the residual stream; null = added as it is.
  const float *post_attention_norm, *post_mlp_norm, *post_input_norm;
  const float* cos_sin;  // [positions, rotary_dim], cosines first; null = queries and keys do not turn
  int32_t num_kv_heads, head_dim, rotary_dim, sliding_window;
  int32_t interleaved;   // adjacent dimensions turn together, not those of the two halves
  int32_t only_queries;  // it reads the cache of an earlier layer, and has no keys and values of its own
  float scale;
  float output_scale;  // the residual stream behind it is multiplied by it
  // Of XIELU: factors of x * x above 0, and of exp(x) - 1 - x from 0 down; slope; largest number that exp(x) - 1 is of.
  float xielu_positive, xielu_negative, xielu_slope, xielu_largest;
};

// An input of each layer beside the residual stream: of the rows that a token has in a table of its own, and of its
// embedding.
struct LayerInputs {
  const void* embedding;  // [rows, num_layers * size], of the model's dtype or of a file's blocks
  Linear projection;      // of the embedding; num_layers * size outputs
  const float* norm;      // [size], of each layer's part of the projection
  int32_t size;              // 0 = the model has no such inputs
  int32_t embedding_format;  // as that of Model
  float embedding_scale, projection_scale, scale;  // factors of the rows, of the projection, of their sum
};

enum Activation : int32_t { SILU, GELU_TANH, RELU, RELU_SQUARED, GELU, XIELU };

struct Model {
  const Layer* layers;
  const void* embedding;  // [vocab_size, hidden], or rows of a file's blocks; null = the head's weights, packed
  const void* learned_positions;  // [positions, hidden]; null = none
  const float* query_factors;     // [positions]: rotated queries are multiplied by them; null = 1
  const float *final_norm, *final_norm_bias;
  Linear head;
  ArgmaxFilter argmax_filter;  // for the head
  LayerInputs layer_inputs;
  int32_t num_layers, hidden, num_heads, dtype;
  int32_t activation;        // of feed-forward blocks: an Activation
  int32_t embedding_format;  // a BlockFormat of GGUF; 0 = the model's dtype
  int32_t norms_rows;        // queries are normalised over all heads of a token together, and so are keys
  int32_t norms_heads;       // each head of queries and keys has norm weights of its own
  int32_t norms_turned;      // queries and keys are normalised after they have turned
  int32_t parallel;          // both blocks of a layer read the residual stream at once
  int32_t few_rows;          // up to so many rows are normalised, quantised and split by every thread for itself
  float eps, attention_soft_cap, logit_soft_cap;  // a soft cap of 0 = none
  float embedding_scale, residual_scale, logit_scale;  // factors of embeddings, of what a block adds, of logits
};

// Where the tokens and sequences of a step are in the layers of one cache group.
struct CacheGroup {
  int64_t* slots;               // [num_tokens]
  const int32_t* block_tables;  // [num_seqs, block_tables_stride]
};

struct Step {
  int64_t *token_ids, *positions;
  const int64_t* logits_indices;
  const int32_t* cu_query_lens;
  int32_t* seq_lens;
  const CacheGroup* groups;
  const int32_t* group_of_layer;      // [num_layers]: places in `groups`
  void *const *keys, *const *values;  // one cache per layer
  const void* const* embeddings;      // [num_tokens]: rows of hidden numbers in the place of embeddings; null = none
  void* hidden;                       // [num_tokens, hidden], normalised; if not null, the only output
  void* logits;                       // [num_logits, vocab_size]; null = compute max_logits and argmax instead
  float* max_logits;                       // [num_logits]: the largest logits; NaN if any logit is NaN
  int64_t* argmax;                      // [num_logits]: the first token with the largest logit
  const int64_t* adapter_slots;      // [num_tokens]: places in `adapters`, negative = none; null = no token has one
  const Adapter* const* adapters;    // by slot; null = leave its tokens as they are
  int64_t block_tables_stride;
  int32_t num_groups, num_tokens, num_seqs, num_logits, block_size, num_threads;
};

// Several steps in a background thread. The caller reads and writes this struct during the run.
struct MultiStepRun {
  float* elapsed_s;   // [num_steps]: duration of each step, seconds
  int32_t num_steps;  // maximum: logits that are not finite end the run early
  int32_t is_halted;  // set by the caller: end the run after the current step
  int32_t lacks_memory;  // not 0: there was none for the last step, which is not computed; the run is over
  int32_t num_done;   // completed steps; negative once the run is over
};

// Return 0, or 1 if there is no memory for the step: nothing of its output may be read then, and its keys and values must
// be computed again.
EXPORT int32_t triolet_step(const Model* model, const Step* step);

// Compute only the head: logits, or max_logits and argmax, of `hidden`, which is an input [num_logits, hidden] here and
// of the model's dtype; `adapter_slots` is [num_logits] then.
EXPORT int32_t triolet_head(const Model* model, const Step* step);
