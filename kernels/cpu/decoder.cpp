// One step of a decoder in one call: token ids to logits, with the keys and values written to the cache.
//
// All threads run the same stages: projection, rotary and KV write, attention, projection, ... (see
// threading/thread_pool.h). One thread computes an item, in a fixed order, so the result has the same bits for any
// number of threads and any assignment of items. The residual stream is float32; GEMM inputs are in the model's dtype.
//
// Every stage ends with a barrier. For few tokens, as in a decode, cheap work is therefore repeated by every thread
// (norms), or done inside the item that needs it (rotary and KV write, before the attention).

#include <numeric>

#include "attention/work_items.h"
#include "experts.h"
#include "gemm/bf16x3.h"
#include "gemm/block_dots.h"
#include "gemm/int4.h"
#include "gemm/prepared_rows.h"
#include "row.h"
#include "sampling/argmax.h"
#include "step.h"
#include "threading/thread_pool.h"

// Instantiated in paged_attention.cpp.
extern template void attend(const AttentionRows<float>*, int, int, int, const AttentionRows<float>*, Scratch&);
extern template void attend(const AttentionRows<BFloat16>*, int, int, int, const AttentionRows<BFloat16>*, Scratch&);

namespace {

constexpr int STAGES = 14, STAGES_PER_LAYER = 32;  // at most
constexpr int MANY_TOKENS = 384;        // from here on threads are assigned rows instead of panels
constexpr int NOT_ADAPTED = -2;         // beside HEAD_LAYER: a layer that no adapter changes
constexpr int PART_BYTES = 768 * 1024;  // of input rows: they stay in the L2 cache, beside weights and results

struct Norm {
  const float *weight, *bias;  // without a bias a root-mean-square norm, with one a layer norm
};

// Attention of the layers that have heads of one shape.
struct HeadShape {
  AttentionCall call;           // the fields that are equal in these layers
  WorkItems items;              // of all cache groups: a prefix that is common in one has equal tokens in all
  bool only_decodes = true;     // one token and one item for each sequence
};

inline bool is_ascending(const int64_t* begin, const int64_t* end) {
  return std::adjacent_find(begin, end, [](int64_t one, int64_t next) { return one >= next; }) == end;
}

// State that is shared by the threads of a step.
template <class T>
struct Workspace {
  const Model& model;
  const Step& step;
  ListMemory memory;  // of all lists here
  std::pmr::vector<HeadShape> head_shapes;
  std::pmr::vector<int> shape_of_layer;  // places in `head_shapes`
  Stages stages;
  std::pmr::vector<Argmax> argmaxes;              // [threads, num_logits]
  std::pmr::vector<ArgmaxCandidates> candidates;  // [threads, num_logits], with an argmax filter
  AdaptedRows adapted_tokens, adapted_logits;     // rows of num_tokens, of num_logits
  const bool keeps_few;                           // rows of the last layer, see Worker::keep_rows_of_logits
  int shrunk_width = 0;                        // numbers of a row of `shrunk`
  int qkv_width = 0, query_width = 0, intermediate = 0;  // at most, of all layers
  float *residual, *projected;                // [tokens, hidden], [tokens, qkv_width]
  float* unnormed;                            // [tokens, hidden]: before a norm of what a block adds
  float* layer_inputs;                        // [tokens, num_layers * size of LayerInputs]
  T *normed, *queries, *attention_output, *activated;    // rows of hidden, qkv_width, query_width, intermediate
  Int8Rows int8_rows;                             // quantised inputs of int8 and int4 layers
  EstimationRows estimation_rows;             // of the head's inputs, with an argmax filter
  Bf16x3Rows bf16x3_rows;                           // split inputs of BF16x3 layers
  float* shrunk;                                    // [rows, shrunk_width]: A x of the rows that have adapters
  float* wide;                                // widened inputs, see widens_inputs
  float* router_logits;                       // [tokens, router_width]
  ExpertOrder order;                          // of the tokens, in the layer that is computed
  // of each layer: a late thread counts the items of earlier ones
  std::pmr::vector<std::pmr::vector<ExpertRows>> expert_rows;
  float* expert_sums;                                // [tokens, hidden]: of the experts beside a dense block
  // [tokens * experts_used, expert_width], in the order of experts; the rows of one expert are as wide as it is
  typename InputsOf<T>::Type* expert_activated;
  float* expert_prepared;                            // the same in another form, if an expert wants one; prepared_width
  int router_width = 0, expert_width = 0, used = 0;  // at most, of all layers
  size_t prepared_width = 0;                         // likewise

  Workspace(const Model& model, const Step& step)
      : model(model),
        step(step),
        head_shapes(memory.resource()),
        shape_of_layer(memory.resource()),
        stages(STAGES + STAGES_PER_LAYER * model.num_layers, step.num_threads, memory.resource()),
        argmaxes(memory.resource()),
        candidates(memory.resource()),
        adapted_tokens(memory.resource()),
        adapted_logits(memory.resource()),
        keeps_few(step.logits_indices && !step.hidden && step.num_logits < step.num_tokens &&
                  is_ascending(step.logits_indices, step.logits_indices + step.num_logits)),
        expert_rows(memory.resource()) {
    for (int index = 0; index < model.num_layers; ++index) measure(model.layers[index]);
    if (step.adapter_slots) group_adapters();
    if (finds_argmax()) argmaxes.resize(static_cast<size_t>(step.num_logits) * step.num_threads);
    if (uses_argmax_filter()) candidates.resize(argmaxes.size());
    measure_experts();
    reserve();
  }

  void measure(const Layer& layer) {
    qkv_width = std::max(qkv_width, layer.qkv.num_out);
    query_width = std::max(query_width, model.num_heads * layer.head_dim);
    intermediate = std::max({intermediate, layer.down.num_in, layer.input_out.num_in});
    const auto found = std::find_if(head_shapes.begin(), head_shapes.end(), [&](const HeadShape& shape) {
      return shape.call.num_kv_heads == layer.num_kv_heads && shape.call.head_dim == layer.head_dim;
    });
    shape_of_layer.push_back(static_cast<int>(found - head_shapes.begin()));
    if (found == head_shapes.end()) head_shapes.push_back(head_shape_of(layer));
  }

  HeadShape head_shape_of(const Layer& layer) {
    HeadShape shape{{}, WorkItems(memory.resource())};
    AttentionCall& call = shape.call;
    call.cu_query_lens = step.cu_query_lens;
    call.seq_lens = step.seq_lens;
    if (step.num_groups) call.block_tables = step.groups->block_tables;
    call.block_tables_stride = step.block_tables_stride;
    call.query_stride_h = layer.head_dim;
    call.num_seqs = step.num_seqs;
    call.num_heads = model.num_heads;
    call.num_kv_heads = layer.num_kv_heads;
    call.head_dim = layer.head_dim;
    call.block_size = step.block_size;
    call.dtype = model.dtype;
    call.num_threads = step.num_threads;
    call.soft_cap = model.attention_soft_cap;
    shape.items = work_items_of(call, memory.resource());
    shape.only_decodes = std::all_of(shape.items.begin(), shape.items.end(), [&](const WorkItem& item) {
      return item.num_rows == item.num_sequences * (model.num_heads / layer.num_kv_heads) &&
             std::all_of(item.sequences, item.sequences + item.num_sequences, [&](int sequence) {
               return step.cu_query_lens[sequence + 1] - step.cu_query_lens[sequence] == 1;
             });
    });
    return shape;
  }

  // Return whether the largest logits are asked for, and not all of them.
  bool finds_argmax() const { return !step.logits && step.max_logits; }

  // Return whether only the logits that can be the largest are computed.
  bool uses_argmax_filter() const {
    // the filter's bounds are those of the plain head
    const ArgmaxFilter& filter = model.argmax_filter;
    return finds_argmax() && filter.int8.weights && step.num_logits <= filter.max_rows &&
           !adapted_logits.max_rank(HEAD_LAYER);
  }

  // Return whether a layer has experts beside a dense block.
  bool has_both() const {
    return std::any_of(model.layers, model.layers + model.num_layers,
                       [](const Layer& layer) { return layer.experts && layer.experts->post_norm; });
  }

  bool has_post_norms() const {
    return std::any_of(model.layers, model.layers + model.num_layers, [](const Layer& layer) {
      return layer.post_attention_norm || layer.post_mlp_norm || layer.post_input_norm;
    });
  }

  // Return whether inputs of a layer are widened to float32.
  bool widens_inputs() const {
    if constexpr (std::is_same_v<T, float>) return false;
    if constexpr (!std::is_same_v<typename InputsOf<T>::Type, T>) return true;
    return any_linear([](const Linear& linear) { return linear.panels != nullptr; });
  }

  // Return whether inputs of a layer are split into three bfloat16 parts. Layers of one model may be stored in different
  // ways, such as blocks of a file beside plain weights.
  bool splits_inputs() const {
    return any_linear([](const Linear& linear) { return linear.bits == 32; });
  }

  // Return whether something holds for a linear layer of the model; experts are not asked, for which rows are prepared
  // elsewhere.
  template <class Predicate>
  bool any_linear(Predicate holds) const {
    auto of_layer = [&](const Layer& layer) {
      const Experts* experts = layer.experts;
      return holds(layer.qkv) || holds(layer.attention_out) || holds(layer.gate_up) || holds(layer.down) ||
             holds(layer.input_gate) || holds(layer.input_out) ||
             (experts && holds(experts->router));
    };
    return holds(model.head) || holds(model.layer_inputs.projection) ||
           std::any_of(model.layers, model.layers + model.num_layers, of_layer);
  }

  void measure_experts() {
    for (int index = 0; index < model.num_layers; ++index) {
      const Experts* experts = model.layers[index].experts;
      if (!experts) continue;
      expert_rows.resize(model.num_layers);
      router_width = std::max(router_width, experts->router.num_out);
      used = std::max(used, experts_used(*experts));
      for (int expert = 0; expert < experts_in_all(*experts); ++expert) {
        const Linear& out = experts->out[expert];
        expert_width = std::max(expert_width, out.num_in);
        if (row_form<T>(out) != RowForm::PLAIN) prepared_width = std::max(prepared_width, prepared_floats<T>(out, 1));
      }
    }
  }

  void group_adapters() {
    auto adapter_of = [&](int64_t row) {
      const int64_t slot = step.adapter_slots[row];
      return slot < 0 ? nullptr : step.adapters[slot];
    };
    adapted_tokens = AdaptedRows(step.num_tokens, adapter_of, memory.resource());
    auto adapter_of_logits = [&](int row) {
      return adapter_of(step.logits_indices ? step.logits_indices[row] : row);
    };
    adapted_logits = AdaptedRows(step.num_logits, adapter_of_logits, memory.resource());
    shrunk_width = std::max(adapted_tokens.max_rank(), adapted_logits.max_rank());
  }

  // Allocate the tensors between the stages. The memory is kept between calls; each tensor begins on a cache line.
  void reserve() {
    static thread_local Scratch scratch;
    const size_t rows = std::max(step.num_tokens, step.num_logits);
    const size_t wide_numbers = model.hidden + qkv_width + model.layer_inputs.projection.num_out;
    const size_t narrow = model.hidden + qkv_width + query_width + intermediate;
    const size_t widest = std::max({model.hidden, query_width, intermediate});
    const size_t scales = Int8Rows::num_scales(static_cast<int>(widest));
    const size_t num_estimated = uses_argmax_filter() ? step.num_logits : 0;  // two int8 rows each
    const size_t split = splits_inputs() ? Bf16x3Rows::num_words(rows, static_cast<int>(widest)) : 0;
    const size_t widened = widens_inputs() ? rows * widest : 0;
    const size_t unnormed_numbers = has_post_norms() ? rows * model.hidden : 0;
    const size_t summed_numbers = has_both() ? rows * model.hidden : 0;
    const size_t places = static_cast<size_t>(step.num_tokens) * used;
    const size_t activated_bytes = places * expert_width * sizeof(typename InputsOf<T>::Type);
    const size_t prepared = places * prepared_width;
    const size_t routed = static_cast<size_t>(step.num_tokens) * router_width + 4 * places +
                          activated_bytes / sizeof(float) + prepared;
    float* next = scratch.floats(rows * (wide_numbers + (narrow * sizeof(T) + widest + 6) / sizeof(float) + Int8Rows::PARTS * scales) +
                                num_estimated * (model.hidden / 2 + 4) + split + widened + unnormed_numbers + summed_numbers + rows * shrunk_width + routed + 24 * 16);
    auto take = [&](size_t bytes) {
      float* taken = next;
      next += (bytes + 63) / 64 * 16;
      return taken;
    };
    residual = take(rows * model.hidden * sizeof(float));
    projected = take(rows * qkv_width * sizeof(float));
    layer_inputs = take(rows * model.layer_inputs.projection.num_out * sizeof(float));
    normed = reinterpret_cast<T*>(take(rows * model.hidden * sizeof(T)));
    queries = reinterpret_cast<T*>(take(rows * qkv_width * sizeof(T)));
    attention_output = reinterpret_cast<T*>(take(rows * query_width * sizeof(T)));
    activated = reinterpret_cast<T*>(take(rows * intermediate * sizeof(T)));
    float* int8_numbers = take(std::max(rows * widest, 2 * num_estimated * model.hidden));
    float* int8_scales = take(Int8Rows::PARTS * rows * scales * sizeof(float));
    uint8_t* numbers = reinterpret_cast<uint8_t*>(int8_numbers);
    int8_rows = Int8Rows::in(int8_scales, rows * scales, numbers);
    // Not beside the scales: late threads read the lengths outside of stages.
    float* estimated = take(4 * num_estimated * sizeof(float));
    estimation_rows = EstimationRows::in(estimated, numbers, num_estimated, model.hidden);
    bf16x3_rows.tiles = reinterpret_cast<uint32_t*>(take(split * sizeof(uint32_t)));
    wide = take(widened * sizeof(float));
    shrunk = take(rows * shrunk_width * sizeof(float));
    unnormed = take(unnormed_numbers * sizeof(float));
    expert_sums = take(summed_numbers * sizeof(float));
    router_logits = take(static_cast<size_t>(step.num_tokens) * router_width * sizeof(float));
    order.chosen = reinterpret_cast<int32_t*>(take(places * sizeof(int32_t)));
    order.token = reinterpret_cast<int32_t*>(take(places * sizeof(int32_t)));
    order.shares = take(places * sizeof(float));
    order.share = take(places * sizeof(float));
    expert_activated = reinterpret_cast<typename InputsOf<T>::Type*>(take(activated_bytes));
    expert_prepared = take(prepared * sizeof(float));
  }
};

// One thread of a step. A thread that wakes up late finds stages completed by the others. Outside of stages it must
// therefore write nothing shared, and must not rely on shared values, which later stages may be changing.
template <class T>
class Worker {
  using Input = typename InputsOf<T>::Type;

 public:
  Worker(Workspace<T>& shared, int thread)
      : shared_(shared),
        model_(shared.model),
        step_(shared.step),
        thread_(thread),
        hidden_(model_.hidden),
        num_rows_(step_.num_tokens),
        adapted_(&shared.adapted_tokens) {}

  void run() {
    stage(step_.num_tokens, [&](int token) { embed(token); });
    if (model_.layer_inputs.size) make_layer_inputs();
    for (int index = 0; index < model_.num_layers; ++index) layer(index);
    const Norm final_norm{model_.final_norm, model_.final_norm_bias};
    if (T* hidden = static_cast<T*>(step_.hidden))
      return stage(step_.num_tokens,
                   [&](int token) { normalise(token, final_norm, hidden + token * hidden_); });
    const T* x = shared_.keeps_few ? all_normed(final_norm) : normed(step_.num_logits, final_norm, [&](int i) {
      return step_.logits_indices[i];
    });
    score_all(x);
  }

  // Compute the head of rows that are an input of the step.
  void only_head() { score_all(static_cast<const T*>(step_.hidden)); }

 private:
  // Compute the logits of normalised rows, or their argmax.
  void score_all(const T* x) {
    if (shared_.uses_argmax_filter() && find_argmax(x)) return;
    multiply_adapted(model_.head, HEAD_LAYER, x, step_.num_logits, shared_.adapted_logits,
                     [&](int row, int panel, const float* sums) { score(row, panel, sums); });
  }

  // Run the next stage: items [0, count).
  template <class Work>
  void stage(int64_t count, Work work) {
    shared_.stages.run(next_stage_++, thread_, count, work);
    shared_.stages.check_memory();  // what was computed without it must not be read
  }

  // Compute a linear layer. Few rows: the items are panels. Many rows: the items are (part of the rows, panel); a part
  // stays in a core's cache for all panels, and stays with the thread that normalised it.
  template <class Use>
  void multiply(const Linear& linear, const T* x, int num_rows, Use use) {
    if (linear.panels) return multiply_blocks(linear, x, num_rows, use);
    if (linear.bits == 32) return multiply_bf16x3(linear, x, num_rows, use);
    if (linear.bits == 0) return multiply_plain(linear, x, num_rows, use);
    const Int8Rows int8_rows = as_int8(linear, x, num_rows);
    panel_stage(linear, num_rows, [&](int panel, int first, int rows) {
      auto use_here = [&](int row, const float* sums) { use(first + row, panel, sums); };
      if (linear.bits == 4) return multiply_int4_panel(linear, panel, int8_rows.from(first, linear), rows, use_here);
      multiply_panel(linear, panel, int8_rows.from(first, linear), rows, use_here);
    });
  }

  // Compute a linear layer with weights in the model's dtype.
  template <class Use>
  void multiply_plain(const Linear& linear, const T* x, int num_rows, Use use) {
    using Input = typename InputsOf<T>::Type;
    const Input* inputs;
    if constexpr (std::is_same_v<Input, T>)
      inputs = x;
    else
      inputs = as_floats(linear, x, num_rows);
    panel_stage(linear, num_rows, [&](int panel, int first, int rows) {
      multiply_panel<T>(linear, panel, inputs + first * static_cast<ptrdiff_t>(linear.num_in), linear.num_in, rows,
                        [&](int row, const float* sums) { use(first + row, panel, sums); });
    });
  }

  // Compute a linear layer and what the adapters of the rows add to it. index: of Adapter::layers
  template <class Use>
  void multiply_adapted(const Linear& linear, int index, const T* x, int num_rows, const AdaptedRows& adapted, Use use) {
    shrink(x, linear.num_in, index, adapted);
    multiply(linear, x, num_rows, [&](int row, int panel, const float* sums) {
      alignas(64) float both[TILE_COLUMNS];
      const Adapter* adapter = adapted.of(row);
      if (adapter && adapter_layer(*adapter, index).rank) {
        expand_panel(*adapter, adapter_layer(*adapter, index), linear.bias, panel, shrunk_row(row), sums, both);
        sums = both;
      }
      use(row, panel, sums);
    });
  }

  float* shrunk_row(int row) { return shared_.shrunk + static_cast<ptrdiff_t>(row) * shared_.shrunk_width; }

  // Multiply the rows that have adapters by their A; no stage where there are none.
  void shrink(const T* x, int num_in, int index, const AdaptedRows& adapted) {
    const int parts = (adapted.max_rank(index) + SHRINK_RANKS - 1) / SHRINK_RANKS;
    if (!parts) return;
    stage(static_cast<int64_t>(adapted.blocks().size()) * parts, [&](int item) {
      const AdaptedRows::Block& block = adapted.blocks()[item / parts];
      const AdapterLinear& layer = adapter_layer(*block.adapter, index);
      const int first = item % parts * SHRINK_RANKS, ranks = std::min(SHRINK_RANKS, layer.rank - first);
      for (int place = 0; ranks > 0 && place < block.count; ++place) {
        const int row = adapted.at(block.first + place);
        shrink_row(*block.adapter, layer, x + static_cast<ptrdiff_t>(row) * num_in, num_in, first, ranks,
                   shrunk_row(row) + first);
      }
    });
  }

  template <class Use>
  void multiply_blocks(const Linear& linear, const T* x, int num_rows, Use use) {
    if (linear.bits == 8) return dot_blocks(linear, as_int8(linear, x, num_rows), num_rows, use);
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, BFloat16>)
      if (linear.bits == 16) return dot_blocks(linear, as_bf16(linear, x, num_rows), num_rows, use);
#endif
    const float* wide = as_floats(linear, x, num_rows);
    block_stage(linear, num_rows, [&](int panel, int panels, int first, int count) {
      multiply_block_panels(linear, panel, panels, wide + static_cast<ptrdiff_t>(first) * linear.num_in, count,
                            [&](int mine, int row, const float* sums) { use(first + row, mine, sums); });
    });
  }

  template <class Rows, class Use>
  void dot_blocks(const Linear& linear, const Rows& rows, int num_rows, Use use) {
    panel_stage(linear, num_rows, [&](int panel, int first, int count) {
      dot_block_panel(linear, panel, rows.from(first, linear), count,
                      [&](int row, const float* sums) { use(first + row, panel, sums); });
    });
  }

  // Run a stage of work(panel, panels, first row, rows): two panels at a time for one row.
  template <class Work>
  void block_stage(const Linear& linear, int num_rows, Work work) {
    if (num_rows > 1)
      return panel_stage(linear, num_rows, [&](int panel, int first, int rows) { work(panel, 1, first, rows); });
    const int panels = num_rows ? linear.num_panels() : 0;
    stage((panels + 1) / 2, [&](int item) { work(2 * item, std::min(2, panels - 2 * item), 0, 1); });
  }

  template <class Use>
  void multiply_bf16x3(const Linear& linear, const T* x, int num_rows, Use use) {
    const Bf16x3Rows bf16x3_rows = as_bf16x3(linear, x, num_rows);
    Bf16x3Product mine(num_rows);
    panel_stage(linear, num_rows, [&](int panel, int first, int rows) {
      mine.panel(linear, panel, bf16x3_rows.from(first), rows,
                 [&](int row, const float* sums) { use(first + row, panel, sums); });
    });
  }

  // Run a stage with an item for each panel of each part of the rows.
  template <class Work>
  void panel_stage(const Linear& linear, int num_rows, Work work) {
    const int panels = linear.num_panels(), part = rows_of_part(linear.num_in, num_rows);
    if (part >= num_rows) return cut_panel_stage(panels, num_rows, work);
    stage(static_cast<int64_t>(panels) * ((num_rows + part - 1) / part), [&](int item) {
      const int first = item / panels * part;
      work(item % panels, first, std::min(part, num_rows - first));
    });
  }

  // Run a stage with an item for each panel. The panels that are left over when each thread has as many as the others
  // are cut by their rows, if there are enough of them, so that no thread waits for the last panel of another.
  template <class Work>
  void cut_panel_stage(int panels, int num_rows, Work work) {
    const int threads = step_.num_threads, rest = panels % threads;
    const int cuts = threads / std::gcd(rest, threads);
    const int least = amx_usable() ? 2 * AMX_ROWS : TILE_ROWS;  // fewer rows wait for the weights
    if (num_rows < cuts * least) return stage(num_rows ? panels : 0, [&](int panel) { work(panel, 0, num_rows); });
    const int whole = panels / threads, each = rest * cuts / threads, unit = amx_usable() ? 2 * AMX_ROWS : 1;
    stage(static_cast<int64_t>(threads) * (whole + each), [&](int item) {
      const int thread = item / (whole + each), place = item % (whole + each);
      if (place < whole) return work(thread * whole + place, 0, num_rows);
      const int piece = thread * each + place - whole, cut = piece % cuts;
      const int first = num_rows / unit * cut / cuts * unit;
      const int last = cut + 1 < cuts ? num_rows / unit * (cut + 1) / cuts * unit : num_rows;
      work(threads * whole + piece / cuts, first, last - first);
    });
  }

  // Return the number of rows of a part; all parts have nearly the same size.
  int rows_of_part(int num_in, int num_rows) const {
    const int fitting = std::max<int>(PART_BYTES / (num_in * sizeof(typename InputsOf<T>::Type)), 2 * ROW_BLOCK);
    if (num_rows <= fitting && num_rows < MANY_TOKENS) return std::max(num_rows, 1);
    const int parts = round_up((num_rows + fitting - 1) / fitting, step_.num_threads);
    return round_up((num_rows + parts - 1) / parts, 2 * AMX_ROWS);
  }

  // Return whether rows are prepared in a stage of their own, which waits for all threads; few are in every thread.
  bool are_many(int num_rows) const { return num_rows > model_.few_rows; }

  // Quantise rows to int8; few rows in every thread, which saves a stage.
  Int8Rows as_int8(const Linear& linear, const T* x, int num_rows) {
    const ptrdiff_t width = linear.num_in;
    if (are_many(num_rows)) {
      stage(num_rows, [&](int row) { quantise_row(linear, x + row * width, row, shared_.int8_rows); });
      return shared_.int8_rows;
    }
    static thread_local Scratch scratch;
    float* own = scratch.floats(Int8Rows::num_floats(num_rows, linear.num_in));
    const Int8Rows rows = Int8Rows::in(own, num_rows, linear.num_in);
    for (int row = 0; row < num_rows; ++row) quantise_row(linear, x + row * width, row, rows);
    return rows;
  }

#if defined(__AVX512BF16__)
  // Copy rows in the order in which blocks are multiplied with them; few rows in every thread, which saves a stage.
  Bf16Rows as_bf16(const Linear& linear, const T* x, int num_rows) {
    static thread_local Scratch scratch;
    const ptrdiff_t width = linear.num_in;
    float* memory = are_many(num_rows) ? shared_.wide : scratch.floats(Bf16Rows::num_floats(num_rows, linear.num_in));
    const Bf16Rows rows = Bf16Rows::in(memory, num_rows, linear.num_in);
    auto put = [&](int row) { rows.put(x + row * width, row, linear.num_in); };
    if (are_many(num_rows)) {
      stage(num_rows, put);
      return rows;
    }
    for (int row = 0; row < num_rows; ++row) put(row);
    return rows;
  }
#endif

  // Widen rows to float32; few rows in every thread, which saves a stage.
  const float* as_floats(const Linear&, const float* x, int) { return x; }

  const float* as_floats(const Linear& linear, const BFloat16* x, int num_rows) {
    static thread_local Scratch scratch;
    const ptrdiff_t width = linear.num_in;
    if (are_many(num_rows)) {
      stage(num_rows, [&](int row) {
        for (int i = 0; i < width; ++i) shared_.wide[row * width + i] = widen(x[row * width + i]);
      });
      return shared_.wide;
    }
    float* own = scratch.floats(num_rows * width);
    for (int i = 0; i < num_rows * width; ++i) own[i] = widen(x[i]);
    return own;
  }

  // Split rows into three bfloat16 parts; few rows in every thread, which saves a stage.
  Bf16x3Rows as_bf16x3(const Linear& linear, const T* x, int num_rows) {
    static thread_local Scratch scratch;
    const int width = linear.num_in;
    Bf16x3Rows rows{shared_.bf16x3_rows.tiles, num_blocks(width)};
    auto split = [&](int row) { split_row(x + row * static_cast<ptrdiff_t>(width), width, row, rows); };
    if (are_many(num_rows)) {
      stage(num_rows, split);
      return rows;
    }
    rows.tiles = reinterpret_cast<uint32_t*>(scratch.floats(Bf16x3Rows::num_words(num_rows, width)));
    for (int row = 0; row < num_rows; ++row) split(row);
    return rows;
  }

  // Normalise rows of the residual stream; few rows in every thread, which saves a stage.
  template <class Row>
  const T* normed(int count, const Norm& norm, Row row) {
    if (are_many(count)) {
      stage(count, [&](int i) { normalise(row(i), norm, shared_.normed + i * hidden_); });
      return shared_.normed;
    }
    static thread_local Scratch scratch;
    T* own = reinterpret_cast<T*>(scratch.floats(static_cast<size_t>(count) * hidden_));
    for (int i = 0; i < count; ++i) normalise(row(i), norm, own + i * hidden_);
    return own;
  }

  const T* all_normed(const Norm& norm) {
    return normed(num_rows_, norm, [](int row) { return row; });
  }

  // Store a panel of logits, or update the argmax with it.
  void score(int row, int panel, const float* sums) {
    const int first = panel * TILE_COLUMNS, vocab_size = model_.head.num_out;
    const int count = std::min(TILE_COLUMNS, vocab_size - first);
    alignas(64) float squeezed[TILE_COLUMNS];
    if (model_.logit_soft_cap > 0.0f || model_.logit_scale != 1.0f) {
      for (int j = 0; j < TILE_COLUMNS; j += LANES)
        store(squeezed + j, capped(load(sums + j) * model_.logit_scale, model_.logit_soft_cap));
      sums = squeezed;
    }
    if (T* all = static_cast<T*>(step_.logits))
      return narrow_row(sums, count, 1.0f, all + static_cast<ptrdiff_t>(row) * vocab_size + first);
    alignas(64) T logits[TILE_COLUMNS];
    narrow_row(sums, count, 1.0f, logits);
    shared_.argmaxes[static_cast<ptrdiff_t>(thread_) * step_.num_logits + row].update(logits, count, first);
  }

  // Find the argmax through the filter; return false if it leaves too many candidates.
  bool find_argmax(const T* x) {
    const int num_rows = step_.num_logits, threads = step_.num_threads;
    const EstimationRows rows = estimation_rows(x);
    if (!rows.all_have_bounds(num_rows)) return false;
    ArgmaxCandidates* lists = shared_.candidates.data();
    stage(model_.argmax_filter.int8.num_panels(), [&](int panel) {
      estimate_panel<T>(model_.argmax_filter, panel, rows, num_rows,
                        lists + static_cast<ptrdiff_t>(thread_) * num_rows);
    });
    auto has_overflowed = [](const ArgmaxCandidates& list) { return list.has_overflowed(); };
    if (std::any_of(lists, lists + shared_.candidates.size(), has_overflowed)) return false;
    // Of a row's candidates: few rows are split, so that no thread is idle.
    const int num_parts = num_rows < 4 * threads ? 2 * threads : 1;
    stage(static_cast<int64_t>(num_rows) * num_parts,
          [&](int item) { score_candidates(x, item / num_parts, item % num_parts, num_parts); });
    return true;
  }

  // Compute the logits of part `part` of `num_parts` of a row's candidates.
  void score_candidates(const T* x, int row, int part, int num_parts) {
    const int num_rows = step_.num_logits, lists = step_.num_threads;
    const ArgmaxCandidates* list = shared_.candidates.data() + row;
    float floor = list->floor();
    for (int i = 1; i < lists; ++i) floor = std::max(floor, list[static_cast<ptrdiff_t>(i) * num_rows].floor());
    int place = 0;
    for (int i = 0; i < lists; ++i)
      list[static_cast<ptrdiff_t>(i) * num_rows].for_each(floor, [&](int first) {
        if (place++ % num_parts != part) return;
        alignas(64) T logits[LANES];
        store(logits, multiply_lanes(model_.head, x + row * hidden_, first) * model_.logit_scale);
        const int count = std::min(LANES, model_.head.num_out - first);
        shared_.argmaxes[static_cast<ptrdiff_t>(thread_) * num_rows + row].update(logits, count, first);
      });
  }

  // Quantise the head's inputs for the filter; few rows in every thread, which saves a stage.
  EstimationRows estimation_rows(const T* x) {
    const int num_rows = step_.num_logits;
    if (are_many(num_rows)) {
      const EstimationRows rows = shared_.estimation_rows;
      stage(num_rows, [&](int row) { quantise_twice(x + row * hidden_, model_.hidden, row, rows); });
      return rows;
    }
    static thread_local Scratch scratch;
    const size_t count = num_rows;
    float* own = scratch.floats(4 * count + (2 * count * hidden_ + 3) / 4);
    const EstimationRows rows =
        EstimationRows::in(own, reinterpret_cast<uint8_t*>(own + 4 * count), count, hidden_);
    for (int row = 0; row < num_rows; ++row) quantise_twice(x + row * hidden_, model_.hidden, row, rows);
    return rows;
  }

  // Add x @ weight.T + bias to the residual stream, normalised if there is a norm, and multiply the stream by `scale`.
  void add_linear(const Linear& linear, int index, const T* x, const float* norm, float scale = 1.0f) {
    const AdaptedRows& adapted = index == NOT_ADAPTED ? no_rows_ : *adapted_;
    auto place = [&](float* rows, int row, int panel) { return rows + row * hidden_ + panel * TILE_COLUMNS; };
    auto count = [&](int panel) { return std::min<int>(TILE_COLUMNS, model_.hidden - panel * TILE_COLUMNS); };
    if (!norm)
      return multiply_adapted(linear, index, x, num_rows_, adapted, [&](int row, int panel, const float* sums) {
        float* to = place(shared_.residual, row, panel);
        for (int j = 0; j < count(panel); ++j) to[j] = (to[j] + sums[j] * model_.residual_scale) * scale;
      });
    multiply_adapted(linear, index, x, num_rows_, adapted, [&](int row, int panel, const float* sums) {
      std::copy(sums, sums + count(panel), place(shared_.unnormed, row, panel));
    });
    stage(num_rows_, [&](int row) {
      float *from = shared_.unnormed + row * hidden_, *to = shared_.residual + row * hidden_;
      scale_row(from, norm, norm_factor(from), model_.hidden, from);
      for (int i = 0; i < model_.hidden; ++i) to[i] = (to[i] + from[i] * model_.residual_scale) * scale;
    });
  }

  void layer(int index) {
    const Layer& layer = model_.layers[index];
    const Norm attention_norm{layer.attention_norm, layer.attention_norm_bias};
    const Norm mlp_norm{layer.mlp_norm, layer.mlp_norm_bias};
    const T* x = all_normed(attention_norm);
    multiply_adapted(layer.qkv, 4 * index, x, num_rows_, *adapted_, [&](int row, int panel, const float* sums) {
      put_panel(layer.qkv, row, panel, sums, shared_.projected);
    });
    const bool keeps_few = shared_.keeps_few && index + 1 == model_.num_layers;
    attention(layer, index, keeps_few);
    if (keeps_few) keep_rows_of_logits(model_.num_heads * layer.head_dim);
    // Of a parallel block before the residual stream changes: few rows of it are normalised outside of stages.
    if (model_.parallel)
      gate_up(layer, index, mlp_norm.weight ? all_normed(mlp_norm) : keeps_few ? all_normed(attention_norm) : x);
    add_linear(layer.attention_out, 4 * index + 1, shared_.attention_output, layer.post_attention_norm);
    if (layer.experts && layer.experts->post_norm) return dense_and_mixture(layer, index);
    if (layer.experts) {
      const T* input = all_normed(mlp_norm);
      route_tokens(*layer.experts, index, input);
      return mixture(*layer.experts, index, input, shared_.residual);
    }
    if (!model_.parallel) gate_up(layer, index, all_normed(mlp_norm));
    const bool has_input = layer.input_gate.num_out > 0;
    add_linear(layer.down, 4 * index + 3, shared_.activated, layer.post_mlp_norm, has_input ? 1.0f : layer.output_scale);
    if (has_input) add_layer_input(layer, index);
  }

  // Go on with the rows of the logits alone, which are moved to the front: of all others the last layer's keys and values
  // are all that is wanted, and they are in the cache. width: of a row of the attention's output.
  void keep_rows_of_logits(ptrdiff_t width) {
    stage(1, [&](int) {
      for (int row = 0; row < step_.num_logits; ++row) {  // no earlier row has overwritten it, since they ascend
        const int64_t token = step_.logits_indices[row];
        if (token == row) continue;
        std::copy_n(shared_.residual + token * hidden_, hidden_, shared_.residual + row * hidden_);
        std::copy_n(shared_.attention_output + token * width, width, shared_.attention_output + row * width);
      }
    });
    num_rows_ = step_.num_logits;
    adapted_ = &shared_.adapted_logits;
  }

  // Return the token that a row of the residual stream belongs to.
  int64_t token_of(int row) const { return num_rows_ < step_.num_tokens ? step_.logits_indices[row] : row; }

  // Copy a panel of a row of a product to its place in `to`, [rows, num_out].
  static void put_panel(const Linear& linear, int row, int panel, const float* sums, float* to) {
    const int first = panel * TILE_COLUMNS, count = std::min(TILE_COLUMNS, linear.num_out - first);
    std::copy(sums, sums + count, to + static_cast<ptrdiff_t>(row) * linear.num_out + first);
  }

  // Compute the inputs of all layers beside the residual stream, which holds the embeddings.
  void make_layer_inputs() {
    const LayerInputs& inputs = model_.layer_inputs;
    const ptrdiff_t width = inputs.projection.num_out;
    multiply(inputs.projection, all_normed({nullptr, nullptr}), step_.num_tokens,
             [&](int row, int panel, const float* sums) {
               put_panel(inputs.projection, row, panel, sums, shared_.layer_inputs);
             });
    stage(step_.num_tokens, [&](int token) {
      static thread_local Scratch scratch;
      float *to = shared_.layer_inputs + token * width, *rows = scratch.floats(width);
      read_layer_rows(inputs, static_cast<int>(step_.token_ids[token]), rows);
      for (int i = 0; i < width; ++i) to[i] *= inputs.projection_scale;
      for (float* part = to; part < to + width; part += inputs.size) {
        const float mean_square = sum_of_squares(part, inputs.size) / inputs.size;
        scale_row(part, inputs.norm, 1.0f / std::sqrt(mean_square + model_.eps), inputs.size, part);
      }
      for (int i = 0; i < width; ++i) to[i] = (to[i] + rows[i] * inputs.embedding_scale) * inputs.scale;
    });
  }

  // Read a token's rows of all layers.
  static void read_layer_rows(const LayerInputs& inputs, int id, float* to) {
    const int width = inputs.projection.num_out;
    if (inputs.embedding_format)
      return decode_file_row(inputs.embedding_format, static_cast<const uint8_t*>(inputs.embedding), id, width, to);
    const T* from = static_cast<const T*>(inputs.embedding) + static_cast<ptrdiff_t>(id) * width;
    for (int i = 0; i < width; ++i) to[i] = widen(from[i]);
  }

  void add_layer_input(const Layer& layer, int index) {
    const ptrdiff_t size = model_.layer_inputs.size, width = model_.layer_inputs.projection.num_out;
    multiply(layer.input_gate, all_normed({nullptr, nullptr}), num_rows_,
             [&](int row, int panel, const float* sums) {
               const int first = panel * TILE_COLUMNS, count = std::min<int>(TILE_COLUMNS, size - first);
               const float* input = shared_.layer_inputs + token_of(row) * width + index * size + first;
               alignas(64) float product[TILE_COLUMNS];
               for (int j = 0; j < TILE_COLUMNS; j += LANES) store(product + j, activated(load(sums + j)));
               for (int j = 0; j < count; ++j) product[j] *= input[j];
               narrow_row(product, count, 1.0f, shared_.activated + row * size + first);
             });
    add_linear(layer.input_out, NOT_ADAPTED, shared_.activated, layer.post_input_norm, layer.output_scale);
  }

  void gate_up(const Layer& layer, int index, const T* x) {
    multiply_adapted(layer.gate_up, 4 * index + 2, x, num_rows_, *adapted_,
                     [&](int row, int panel, const float* sums) {
                       layer.gate_up.gated ? activate_gates(layer, row, panel, sums) : activate(layer, row, panel, sums);
                     });
  }

  // Add what the dense block and the experts beside it make of each token to the residual stream.
  void dense_and_mixture(const Layer& layer, int index) {
    const Experts& experts = *layer.experts;
    gate_up(layer, index, all_normed({layer.mlp_norm, nullptr}));
    multiply_adapted(layer.down, 4 * index + 3, shared_.activated, num_rows_, *adapted_,
                     [&](int row, int panel, const float* sums) {
                       put_panel(layer.down, row, panel, sums, shared_.unnormed);
                     });
    route_tokens(experts, index, all_normed({experts.router_norm, nullptr}));
    const T* x = all_normed({experts.norm, nullptr});
    stage(num_rows_, [&](int row) { std::fill_n(shared_.expert_sums + row * hidden_, hidden_, 0.0f); });
    mixture(experts, index, x, shared_.expert_sums);
    stage(num_rows_, [&](int row) {
      float *dense = shared_.unnormed + row * hidden_, *mixed = shared_.expert_sums + row * hidden_;
      float* to = shared_.residual + row * hidden_;
      scale_row(dense, experts.post_dense_norm, norm_factor(dense), model_.hidden, dense);
      scale_row(mixed, experts.post_norm, norm_factor(mixed), model_.hidden, mixed);
      for (int i = 0; i < hidden_; ++i) dense[i] += mixed[i];
      if (layer.post_mlp_norm) scale_row(dense, layer.post_mlp_norm, norm_factor(dense), model_.hidden, dense);
      for (int i = 0; i < hidden_; ++i) to[i] = (to[i] + dense[i] * model_.residual_scale) * layer.output_scale;
    });
  }

  // Add what each token's experts make of it to `sums_of_tokens`, [tokens, hidden].
  void mixture(const Experts& experts, int index, const T* x, float* sums_of_tokens) {
    const std::pmr::vector<ExpertRows>& groups = shared_.expert_rows[index];
    const int num_groups = static_cast<int>(groups.size()), in_width = panels_at_once(experts.in[0]);
    const auto items_of = [&](const Linear& linear) { return (linear.num_panels() + in_width - 1) / in_width; };
    const auto is_routed = [&](const ExpertRows& rows) { return rows.expert < experts.num_experts; };
    const int num_routed = static_cast<int>(std::count_if(groups.begin(), groups.end(), is_routed));
    // The shared expert comes last, and its width is its own.
    const int items = items_of(experts.in[0]);
    const int wide_items = experts.has_shared ? items_of(experts.in[experts.num_experts]) : 1;
    stage(static_cast<int64_t>(num_routed) * items + static_cast<int64_t>(num_groups - num_routed) * wide_items,
          [&](int item) {
            const int beyond = item - num_routed * items;
            const ExpertRows& rows = groups[beyond < 0 ? item / items : num_routed + beyond / wide_items];
            const int first = (beyond < 0 ? item % items : beyond % wide_items) * in_width;
            const Linear& linear = experts.in[rows.expert];
            multiply_prepared<T>(linear, first, std::min(in_width, linear.num_panels() - first),
                                 inputs_of(linear, x, rows), rows.count, [&](int panel, int row, const float* sums) {
                                   gate_expert(experts, rows, row, panel, sums);
                                 });
          });
    const auto is_prepared = [&](const ExpertRows& rows) {
      return row_form<T>(experts.out[rows.expert]) != RowForm::PLAIN;
    };
    if (std::any_of(groups.begin(), groups.end(), is_prepared))
      stage(num_groups, [&](int group) {
        if (is_prepared(groups[group])) prepare_activated(experts.out[groups[group].expert], groups[group]);
      });
    // Every item adds up the experts in their order, so that it is the same for any number of threads.
    const int out_panels = (model_.hidden + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int at_once = are_many(num_rows_) ? std::max(1, out_panels / (4 * step_.num_threads))
                                            : panels_at_once(experts.out[0]);
    stage(num_groups ? (out_panels + at_once - 1) / at_once : 0, [&](int item) {
      const int first = item * at_once, count = std::min(at_once, out_panels - first);
      for (const ExpertRows& rows : groups)
        multiply_prepared<T>(experts.out[rows.expert], first, count,
                             is_prepared(rows) ? prepared_of(rows) : static_cast<const void*>(activated_of(rows)),
                             rows.count, [&](int panel, int row, const float* sums) {
                               add_expert(rows.first + row, panel, sums, sums_of_tokens);
                             });
    });
  }

  // Return how many panels of an expert an item computes: two of a single row's, as `block_stage` does.
  int panels_at_once(const Linear& linear) const {
    return num_rows_ == 1 && linear.panels && linear.bits == 0 ? 2 : 1;
  }

  // Choose the experts of all tokens, and put the tokens in their order.
  void route_tokens(const Experts& experts, int index, const T* x) {
    const int tokens = num_rows_, width = shared_.router_width, used = experts_used(experts);
    multiply(experts.router, x, tokens, [&](int row, int panel, const float* sums) {
      const int first = panel * TILE_COLUMNS, count = std::min(TILE_COLUMNS, experts.router.num_out - first);
      std::copy(sums, sums + count, shared_.router_logits + static_cast<ptrdiff_t>(row) * width + first);
    });
    const ExpertOrder& order = shared_.order;
    auto route_token = [&](int token) {
      route(experts, shared_.router_logits + static_cast<ptrdiff_t>(token) * width, order.chosen + token * used,
            order.shares + token * used);
    };
    if (are_many(tokens)) stage(tokens, route_token);
    stage(1, [&](int) {
      for (int token = 0; !are_many(tokens) && token < tokens; ++token) route_token(token);
      const int most = std::max<int>(PART_BYTES / (hidden_ * sizeof(Input)), 2 * ROW_BLOCK);
      shared_.expert_rows[index] = order.group(experts, tokens, most, shared_.memory.resource());
    });
  }

  // Return the inputs of an expert's tokens, one after the other, in the form that its weights take; they are gathered
  // once for all panels of a thread, and for all experts of the same tokens.
  const void* inputs_of(const Linear& linear, const T* x, const ExpertRows& rows) {
    static thread_local Scratch scratch;
    const ExpertOrder& order = shared_.order;
    const RowForm form = row_form<T>(linear);
    auto row = [&](int i) { return x + order.token[rows.first + i] * hidden_; };
    if constexpr (std::is_same_v<Input, T>)
      if (form == RowForm::PLAIN && order.are_adjacent(rows)) return row(0);
    if (gathered_.stage == next_stage_ && gathered_.form == form && order.have_same_tokens(gathered_.rows, rows))
      return gathered_.inputs;
    float* to = scratch.floats(prepared_floats<T>(linear, rows.count));
    prepare_rows<T>(linear, rows.count, row, to);
    gathered_ = {next_stage_, form, rows, to};
    return to;
  }

  // Return where the inputs of an expert's second matrix are, one row after the other.
  Input* activated_of(const ExpertRows& rows) const {
    return shared_.expert_activated + static_cast<ptrdiff_t>(rows.first) * shared_.expert_width;
  }
  float* prepared_of(const ExpertRows& rows) const {
    return shared_.expert_prepared + rows.first * shared_.prepared_width;
  }

  void prepare_activated(const Linear& linear, const ExpertRows& rows) {
    const Input* from = activated_of(rows);
    auto row = [&](int i) { return from + static_cast<ptrdiff_t>(i) * linear.num_in; };
    prepare_rows<T>(linear, rows.count, row, prepared_of(rows));
  }

  void gate_expert(const Experts& experts, const ExpertRows& rows, int row, int panel, const float* sums) {
    constexpr int HALF = TILE_COLUMNS / 2;
    const float limit = experts.gate_limit;
    alignas(64) float product[HALF];
    for (int j = 0; j < HALF; j += LANES) {
      Floats gate = load(sums + j), up = load(sums + HALF + j);
      if (limit > 0.0f) {
        gate = gate > limit ? splat(limit) : gate;
        up = up > limit ? splat(limit) : up < -limit ? splat(-limit) : up;
        store(product + j, (up + 1.0f) * (gate * sigmoid(gate * experts.gate_alpha)));
      } else {
        store(product + j, activated(gate) * up);
      }
    }
    const ptrdiff_t width = experts.out[rows.expert].num_in;
    const int first = panel * HALF, count = std::min<int>(HALF, width - first);
    Input* to = activated_of(rows) + row * width + first;
    if constexpr (std::is_same_v<Input, T>) {
      narrow_row(product, count, 1.0f, to);
    } else {
      alignas(64) T rounded[HALF];  // as the inputs of all other products are
      narrow_row(product, count, 1.0f, rounded);
      for (int i = 0; i < count; ++i) to[i] = widen(rounded[i]);
    }
  }

  void add_expert(int place, int panel, const float* sums, float* sums_of_tokens) {
    const int first = panel * TILE_COLUMNS, count = std::min<int>(TILE_COLUMNS, model_.hidden - first);
    const float scale = sums_of_tokens == shared_.residual ? model_.residual_scale : 1.0f;
    const float share = shared_.order.share[place] * scale;
    float* to = sums_of_tokens + shared_.order.token[place] * hidden_ + first;
    for (int j = 0; j < count; ++j) to[j] += sums[j] * share;
  }

  void embed(int token) {
    const int id = static_cast<int>(step_.token_ids[token]);
    float* to = shared_.residual + token * hidden_;
    if (step_.embeddings && step_.embeddings[token]) {
      const T* from = static_cast<const T*>(step_.embeddings[token]);
      for (int i = 0; i < hidden_; ++i) to[i] = widen(from[i]);
    } else {
      embed_plain(id, to);
      const Adapter* adapter = shared_.adapted_tokens.of(token);
      if (adapter && adapter->embedding.rank) add_to_embedding(*adapter, id, to);
      if (model_.embedding_scale != 1.0f)
        for (int i = 0; i < hidden_; ++i) to[i] *= model_.embedding_scale;
    }
    if (model_.learned_positions) {
      const T* from = static_cast<const T*>(model_.learned_positions) + step_.positions[token] * hidden_;
      for (int i = 0; i < hidden_; ++i) to[i] += widen(from[i]);
    }
  }

  void add_to_embedding(const Adapter& adapter, int id, float* to) {
    const AdapterLinear& layer = adapter.embedding;
    const float* shrunk = static_cast<const float*>(layer.a) + static_cast<ptrdiff_t>(id) * layer.rank;
    for (int first = 0; first < model_.hidden; first += TILE_COLUMNS) {
      const int count = std::min(TILE_COLUMNS, model_.hidden - first);
      alignas(64) float plain[TILE_COLUMNS] = {}, both[TILE_COLUMNS];
      std::copy(to + first, to + first + count, plain);
      expand_panel(adapter, layer, nullptr, first / TILE_COLUMNS, shrunk, plain, both);
      std::copy(both, both + count, to + first);
    }
  }

  void embed_plain(int id, float* to) {
    if (!model_.embedding && model_.head.panels) return unpack_block_row(model_.head, id, to);
    if (model_.embedding_format)
      return decode_file_row(model_.embedding_format, static_cast<const uint8_t*>(model_.embedding), id, model_.hidden,
                             to);
    if (!model_.embedding && model_.head.bits) return unpack_int8_row(model_.head, id, to);
    if (!model_.embedding) return unpack_row(static_cast<const T*>(model_.head.weights), model_.hidden, id, to);
    const T* from = static_cast<const T*>(model_.embedding) + id * hidden_;
    for (int i = 0; i < model_.hidden; ++i) to[i] = widen(from[i]);
  }

  void normalise(int token, const Norm& norm, T* to) {
    const float* from = shared_.residual + token * hidden_;
    if (!norm.weight) return narrow_row(from, model_.hidden, 1.0f, to);
    if (norm.bias) return center_row(from, norm.weight, norm.bias, model_.eps, model_.hidden, to);
    scale_row(from, norm.weight, norm_factor(from), model_.hidden, to);
  }

  // Return the factor that makes the root mean square of a row of the residual stream's width 1.
  float norm_factor(const float* row) const {
    return 1.0f / std::sqrt(sum_of_squares(row, model_.hidden) / model_.hidden + model_.eps);
  }

  // Factors that bring the queries and the keys of a token to a root mean square of 1, over all heads.
  struct RowFactors {
    float queries, keys;
  };

  RowFactors row_factors(const Layer& layer, int token) const {
    if (!model_.norms_rows || !layer.query_norm) return {};
    const int queries = model_.num_heads * layer.head_dim, keys = layer.num_kv_heads * layer.head_dim;
    const float* x = shared_.projected + static_cast<ptrdiff_t>(token) * layer.qkv.num_out;
    auto factor = [&](const float* row, int count) {
      return 1.0f / std::sqrt(sum_of_squares(row, count) / count + model_.eps);
    };
    return {factor(x, queries), factor(x + queries, keys)};
  }

  // Apply its norm to a projected head, if it has one, in place or in memory of this thread; return where it is.
  float* normed_head(const Layer& layer, float* x, int head, const RowFactors& factors) {
    static thread_local Scratch scratch;
    const int dim = layer.head_dim, num_heads = model_.num_heads;
    const bool is_query = head < num_heads, is_value = head >= num_heads + layer.num_kv_heads;
    const float* norm = is_query ? layer.query_norm : is_value ? layer.value_norm : layer.key_norm;
    if (!norm) return x;
    if (model_.norms_rows || model_.norms_heads) norm += (is_query ? head : head - num_heads) * static_cast<ptrdiff_t>(dim);
    if (model_.norms_rows) {
      // not in place: the factors of this token's other heads may yet be computed from it
      float* own = scratch.floats(dim);
      scale_row(x, norm, is_query ? factors.queries : factors.keys, dim, own);
      return own;
    }
    const float* bias = is_query ? layer.query_norm_bias : is_value ? nullptr : layer.key_norm_bias;
    if (bias)
      center_row(x, norm, bias, model_.eps, dim, x);
    else
      scale_row(x, norm, 1.0f / std::sqrt(sum_of_squares(x, dim) / dim + model_.eps), dim, x);
    return x;
  }

  // Apply norm and rotary embedding to one projected head; write keys and values to the cache.
  void write_head(const Layer& layer, int index, int token, int head, const RowFactors& factors) {
    const int dim = layer.head_dim, num_heads = model_.num_heads, num_kv_heads = layer.num_kv_heads;
    const ptrdiff_t place = static_cast<ptrdiff_t>(token) * layer.qkv.num_out + head * dim;
    float* x = shared_.projected + place;
    const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
    if (!model_.norms_turned) x = normed_head(layer, x, head, factors);
    if (layer.cos_sin && !is_value) {
      const float* cos = layer.cos_sin + step_.positions[token] * layer.rotary_dim;
      const int half = layer.rotary_dim / 2;
      layer.interleaved ? rotate_pairs(x, cos, cos + half, half) : rotate(x, cos, cos + half, half);
    }
    if (model_.norms_turned) x = normed_head(layer, x, head, factors);
    const float factor = is_query && model_.query_factors ? model_.query_factors[step_.positions[token]] : 1.0f;
    if (is_query) return narrow_row(x, dim, factor, shared_.queries + place);
    const int64_t slot = step_.groups[step_.group_of_layer[index]].slots[token];
    if (slot < 0) return;
    T* cache = static_cast<T*>(is_value ? step_.values[index] : step_.keys[index]);
    const int kv_head = (head - num_heads) % num_kv_heads;
    narrow_row(x, dim, 1.0f, cache + (slot * num_kv_heads + kv_head) * dim);
  }

  // Compute attention, with the keys and values of all tokens; for_logits: its output only where logits are wanted.
  void attention(const Layer& layer, int index, bool for_logits) {
    const int kv_heads = layer.num_kv_heads, group = model_.num_heads / kv_heads;
    const int all_heads = model_.num_heads + (layer.only_queries ? 0 : 2 * kv_heads);
    const HeadShape& shape = shared_.head_shapes[shared_.shape_of_layer[index]];
    AttentionCall call = shape.call;
    call.query_stride_t = layer.qkv.num_out;
    call.block_tables = step_.groups[step_.group_of_layer[index]].block_tables;
    call.query = shared_.queries;
    call.keys = step_.keys[index];
    call.values = step_.values[index];
    call.out = shared_.attention_output;
    call.sliding_window = layer.sliding_window;
    call.scale = layer.scale;
    call.sinks = layer.sinks;
    if (!shape.only_decodes)
      stage(step_.num_tokens, [&](int token) {
        const RowFactors factors = row_factors(layer, token);
        for (int head = 0; head < all_heads; ++head) write_head(layer, index, token, head, factors);
      });
    stage(static_cast<int64_t>(shape.items.size()), [&](int number) {
      static thread_local Scratch scratch;
      const WorkItem& item = shape.items[number];
      if (for_logits && !shape.only_decodes && !has_logits(item, group)) return;
      for (int place = 0; shape.only_decodes && place < item.num_sequences; ++place) {
        const int token = step_.cu_query_lens[item.sequences[place]];
        const RowFactors factors = row_factors(layer, token);
        for (int head = item.first_head; head < item.first_head + item.num_heads; ++head) {
          for (int i = 0; i < group; ++i) write_head(layer, index, token, head * group + i, factors);
          if (layer.only_queries) continue;
          write_head(layer, index, token, model_.num_heads + head, factors);
          write_head(layer, index, token, model_.num_heads + kv_heads + head, factors);
        }
      }
      attend<T>(call, shape.items, number, scratch);
    });
  }

  // Return whether logits of a row of the item are wanted, or may be; group: query heads of a KV head.
  bool has_logits(const WorkItem& item, int group) const {
    if (item.num_sequences > 1) return true;  // short ones, of which most give a token
    const int64_t *begin = step_.logits_indices, *end = begin + step_.num_logits;
    const int64_t token = step_.cu_query_lens[item.sequences[0]];
    const int64_t* found = std::lower_bound(begin, end, token + item.first_row / group);
    return found != end && *found <= token + (item.first_row + item.num_rows - 1) / group;
  }

  Floats activated(Floats x) const {
    if (model_.activation == RELU || model_.activation == RELU_SQUARED) {
      const Floats positive = larger(Floats{}, x);  // in this order a NaN stays one
      return model_.activation == RELU ? positive : positive * positive;
    }
    if (model_.activation == GELU) {
      const Floats tail = half_erfc(magnitude(x) * 0.70710678f);
      return x * (x < 0.0f ? tail : 1.0f - tail);
    }
    // GELU in its tanh form: 0.5 * (1 + tanh(z)) is sigmoid(2 * z), z = sqrt(2 / pi) * (x + 0.044715 * x**3)
    const Floats z = model_.activation == GELU_TANH ? 1.5957691216057308f * (x + 0.044715f * x * x * x) : x;
    return x * sigmoid(z);
  }

  // Source: arXiv 2411.13010.
  static Floats xielu(const Layer& layer, Floats x) {
    const Floats top = splat(layer.xielu_largest), low = x < top ? x : top;
    // Between the largest number and 0 exp(x) - 1 stays what it is there.
    const Floats below = (exp_beyond_line(low) + (low - x)) * layer.xielu_negative;
    return (x > 0.0f ? x * x * layer.xielu_positive : below) + x * layer.xielu_slope;
  }

  void activate_gates(const Layer& layer, int row, int panel, const float* sums) {
    constexpr int HALF = TILE_COLUMNS / 2;
    alignas(64) float product[HALF];
    for (int j = 0; j < HALF; j += LANES) store(product + j, activated(load(sums + j)) * load(sums + HALF + j));
    put_activated(layer, row, panel * HALF, HALF, product);
  }

  void activate(const Layer& layer, int row, int panel, const float* sums) {
    alignas(64) float activations[TILE_COLUMNS];
    if (model_.activation == XIELU)
      for (int j = 0; j < TILE_COLUMNS; j += LANES) store(activations + j, xielu(layer, load(sums + j)));
    else
      for (int j = 0; j < TILE_COLUMNS; j += LANES) store(activations + j, activated(load(sums + j)));
    put_activated(layer, row, panel * TILE_COLUMNS, TILE_COLUMNS, activations);
  }

  void put_activated(const Layer& layer, int row, int first, int count, const float* values) {
    const int width = layer.down.num_in;
    narrow_row(values, std::min(count, width - first), 1.0f,
               shared_.activated + static_cast<ptrdiff_t>(row) * width + first);
  }

  Workspace<T>& shared_;
  const Model& model_;
  const Step& step_;
  const int thread_;
  const ptrdiff_t hidden_;
  int num_rows_;  // of the residual stream: tokens, and in the end those with logits
  const AdaptedRows* adapted_;  // theirs
  const AdaptedRows no_rows_{std::pmr::null_memory_resource()};
  int next_stage_ = 0;
  // What `inputs_of` has gathered last, and in which stage.
  struct Gathered {
    int stage = -1;
    RowForm form{};
    ExpertRows rows{};
    const float* inputs = nullptr;
  } gathered_;
};

// Run `work` of a Worker in every thread; without logits, merge what the threads have found. Throw std::bad_alloc if a
// thread has found no memory.
template <class T, class Work>
void run_threads(const Model& model, const Step& step, Work work) {
  Workspace<T> shared(model, step);
  auto run_worker = [&](int thread) {
    try {
      Worker<T> worker(shared, thread);
      work(worker);
    } catch (const std::bad_alloc&) {
      shared.stages.set_lacks_memory();  // the others compute what this thread leaves, or leave too
    }
  };
  ThreadPool::of_this_thread().run(step.num_threads, run_worker);
  shared.stages.check_memory();
  if (!shared.finds_argmax()) return;
  for (int row = 0; row < step.num_logits; ++row) {
    Argmax argmax;
    for (int thread = 0; thread < step.num_threads; ++thread)
      argmax.merge(shared.argmaxes[static_cast<ptrdiff_t>(thread) * step.num_logits + row]);
    step.max_logits[row] = argmax.value;
    step.argmax[row] = argmax.index;
  }
}

template <class Work>
int32_t status_of_step(const Model& model, const Step& step, Work work) {
  return status_of([&] {
    if (model.dtype == 0)
      run_threads<float>(model, step, work);
    else
      run_threads<BFloat16>(model, step, work);
  });
}

}  // namespace

// Enable AMX for the process and return whether it can be used. wanted: the CPU has AMX; Linux may still refuse it.
EXPORT int32_t triolet_use_amx(int32_t wanted) { return request_amx(wanted); }

EXPORT int32_t triolet_step(const Model* model, const Step* step) {
  return status_of_step(*model, *step, [](auto& worker) { worker.run(); });
}

EXPORT int32_t triolet_head(const Model* model, const Step* step) {
  return status_of_step(*model, *step, [](auto& worker) { worker.only_head(); });
}

// Wake the worker threads: a step will be run soon.
EXPORT void triolet_wake() { ThreadPool::of_this_thread().wake(); }
