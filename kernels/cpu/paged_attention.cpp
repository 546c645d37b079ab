// Paged attention over a whole step: see kernels/paged_attention.py for the contract.

#include <atomic>

#include "attention_step.h"

namespace {

template <class T>
void run(const AttentionCall& call) {
  const std::vector<Piece> pieces = pieces_of(call);
  const int num_items = static_cast<int>(pieces.size()) * call.num_kv_heads;
  const int num_threads = std::max(1, std::min(call.num_threads, num_items));
  std::atomic<int> next{0};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    static thread_local Scratch scratch;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < num_items;)
      attend(rows_of<T>(call, pieces[item / call.num_kv_heads], item % call.num_kv_heads), scratch);
  }
}

}  // namespace

EXPORT void triolet_paged_attention(const AttentionCall* call) {
  switch (call->dtype) {
    case 0: return run<float>(*call);
    case 1: return run<BFloat16>(*call);
    case 2: return run<Float16>(*call);
  }
}
