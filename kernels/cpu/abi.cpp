// The layouts of the structs that Python fills in, for abi.py to compare with its mirrors.
//
// Each list of fields is held to its struct twice when this file is compiled: a structured binding must name as many
// fields as the struct has, and offsetof must know each name.

#include <cstddef>
#include <initializer_list>
#include <string>

#include "attention/work_items.h"
#include "sampling/draw.h"
#include "step.h"

namespace {

#define BLOCK_PANEL(_) _(blocks), _(format), _(inputs)
#define LINEAR(_) \
  _(weights), _(bias), _(scales), _(zero_point_offsets), _(panels), _(num_out), _(num_in), _(bits), _(gated)
#define ARGMAX_FILTER(_) _(int8), _(bounds), _(max_rows)
#define EXPERTS(_)                                                                                                \
  _(router), _(in), _(out), _(correction), _(scales), _(router_norm), _(norm), _(post_norm), _(post_dense_norm),   \
      _(num_experts), _(per_token), _(is_sigmoid), _(is_normalised),                                              \
      _(has_shared), _(has_shared_gate), _(share_scale), _(gate_alpha), _(gate_limit)
#define LAYER(_)                                                                                                  \
  _(qkv), _(attention_out), _(gate_up), _(down), _(input_gate), _(input_out), _(experts), _(sinks),                \
      _(attention_norm), _(query_norm), _(key_norm), _(value_norm), _(mlp_norm), _(attention_norm_bias),          \
      _(mlp_norm_bias), _(query_norm_bias), _(key_norm_bias), _(post_attention_norm), _(post_mlp_norm), _(post_input_norm), _(cos_sin),                 \
      _(num_kv_heads), _(head_dim), _(rotary_dim), _(sliding_window), _(interleaved), _(only_queries), _(scale),  \
      _(output_scale), _(xielu_positive), _(xielu_negative), _(xielu_slope), _(xielu_largest)
#define LAYER_INPUTS(_)                                                                                           \
  _(embedding), _(projection), _(norm), _(size), _(embedding_format), _(embedding_scale), _(projection_scale),     \
      _(scale)
#define MODEL(_)                                                                                                  \
  _(layers), _(embedding), _(learned_positions), _(query_factors), _(final_norm), _(final_norm_bias), _(head),     \
      _(argmax_filter), _(layer_inputs), _(num_layers), _(hidden), _(num_heads), _(dtype), _(activation),               \
      _(embedding_format), _(norms_rows), _(norms_heads), _(norms_turned), _(parallel), _(few_rows), _(eps), _(attention_soft_cap), _(logit_soft_cap), _(embedding_scale), _(residual_scale), _(logit_scale)
#define CACHE_GROUP(_) _(slots), _(block_tables)
#define STEP(_)                                                                                                   \
  _(token_ids), _(positions), _(logits_indices), _(cu_query_lens), _(seq_lens), _(groups), _(group_of_layer),      \
      _(keys), _(values), _(embeddings), _(hidden), _(logits), _(max_logits), _(argmax), _(adapter_slots),         \
      _(adapters), _(block_tables_stride), _(num_groups), _(num_tokens), _(num_seqs), _(num_logits),               \
      _(block_size), _(num_threads)
#define ADAPTER_PIECE(_) _(b), _(first_half), _(step), _(num_halves), _(first_rank), _(rank)
#define ADAPTER_LINEAR(_) _(a), _(pieces), _(bias), _(magnitude), _(num_pieces), _(rank)
#define ADAPTER(_) _(layers), _(embedding), _(head), _(dtype), _(max_rank)
#define MULTI_STEP_RUN(_) _(elapsed_s), _(num_steps), _(is_halted), _(lacks_memory), _(num_done)
#define ATTENTION_CALL(_)                                                                                         \
  _(query), _(keys), _(values), _(sinks), _(out), _(cu_query_lens), _(seq_lens), _(block_tables), _(query_stride_t),        \
      _(query_stride_h), _(block_tables_stride), _(num_seqs), _(num_heads), _(num_kv_heads), _(head_dim),         \
      _(block_size), _(sliding_window), _(dtype), _(num_threads), _(scale), _(soft_cap)
#define DRAW(_) _(top_p), _(answer), _(position), _(temperature), _(max_logit), _(log_min_p), _(top_k)

struct FieldLayout {
  const char* name;
  size_t offset, size;
};

void add_layout(std::string& text, const std::string& name, size_t size, std::initializer_list<FieldLayout> fields) {
  text += name + " " + std::to_string(size) + "\n";
  for (const FieldLayout& field : fields)
    text += name + "." + field.name + " " + std::to_string(field.offset) + " " + std::to_string(field.size) + "\n";
}

#define NAME(field) field
#define LAYOUT(field) FieldLayout{#field, offsetof(Struct, field), sizeof(Struct::field)}
#define ADD(type, FIELDS)                                      \
  do {                                                         \
    using Struct = type;                                       \
    const Struct whole{};                                      \
    [[maybe_unused]] const auto& [FIELDS(NAME)] = whole;       \
    add_layout(text, #type, sizeof(Struct), {FIELDS(LAYOUT)}); \
  } while (false)

std::string all_layouts() {
  std::string text;
  ADD(BlockPanel, BLOCK_PANEL);
  ADD(Linear, LINEAR);
  ADD(ArgmaxFilter, ARGMAX_FILTER);
  ADD(Experts, EXPERTS);
  ADD(Layer, LAYER);
  ADD(LayerInputs, LAYER_INPUTS);
  ADD(Model, MODEL);
  ADD(CacheGroup, CACHE_GROUP);
  ADD(Step, STEP);
  ADD(AdapterPiece, ADAPTER_PIECE);
  ADD(AdapterLinear, ADAPTER_LINEAR);
  ADD(Adapter, ADAPTER);
  ADD(MultiStepRun, MULTI_STEP_RUN);
  ADD(AttentionCall, ATTENTION_CALL);
  ADD(Draw, DRAW);
  return text;
}

}  // namespace

// Lines: "Struct size", then "Struct.field offset size" for each of its fields in their order; numbers of bytes.
EXPORT const char* triolet_struct_layouts() {
  static const std::string text = all_layouts();
  return text.c_str();
}
