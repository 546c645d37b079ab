// Paged attention over a whole step: see kernels/paged_attention.py for the contract.

#include "attention/work_items.h"
#include "threading/parallel_for.h"

namespace {

template <class T>
void run(const AttentionCall& call) {
  ListMemory memory;
  const WorkItems items = work_items_of(call, memory.resource());
  parallel_for(call.num_threads, static_cast<int64_t>(items.size()), [&](int64_t item) {
    static thread_local Scratch scratch;
    attend<T>(call, items, item, scratch);
  });
}

}  // namespace

// Explicit instantiations: decoder.cpp declares them extern, so that they are compiled once.
template void attend(const AttentionRows<float>*, int, int, int, const AttentionRows<float>*, Scratch&);
template void attend(const AttentionRows<BFloat16>*, int, int, int, const AttentionRows<BFloat16>*, Scratch&);
template void attend(const AttentionRows<Float16>*, int, int, int, const AttentionRows<Float16>*, Scratch&);

// Return 0, or 1 if there is no memory for it.
EXPORT int32_t triolet_paged_attention(const AttentionCall* call) {
  return status_of([&] {
    switch (call->dtype) {
      case 0: return run<float>(*call);
      case 1: return run<BFloat16>(*call);
      case 2: return run<Float16>(*call);
    }
  });
}

// Set the function that starts torch's OpenMP threads: see threading/parallel_for.h.
EXPORT void triolet_use_threads(StartThreads start) { start_threads = start; }
