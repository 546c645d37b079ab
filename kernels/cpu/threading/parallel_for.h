// parallel_for over the threads of torch's OpenMP runtime, if library.py has found it, since they are awake already;
// else over our own thread pool.
//
// The library is not linked to an OpenMP runtime: two runtimes in one process would each keep threads that spin on the
// same cores, and the path of torch's runtime is known only when torch is loaded.

#pragma once

#include "threading/thread_pool.h"

// GOMP_parallel, which every OpenMP runtime exports: calls work(context) in num_threads threads.
using StartThreads = void (*)(void (*work)(void*), void* context, unsigned num_threads, unsigned flags);
inline StartThreads start_threads = nullptr;

// Throw std::bad_alloc here if an item does: no exception may pass through another runtime.
template <class Work>
static void parallel_for(int num_threads, int64_t count, Work work) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> lacks_memory{false};
  auto take = [&](int) {
    try {
      for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(item);
    } catch (const std::bad_alloc&) {
      lacks_memory.store(true);
      next.store(count);
    }
  };
  if (num_threads <= 1 || count <= 1)
    take(0);
  else if (!start_threads)
    ThreadPool::of_this_thread().run(num_threads, take);
  else
    start_threads([](void* context) { (*static_cast<decltype(take)*>(context))(0); }, &take, num_threads, 0);
  if (lacks_memory.load()) throw std::bad_alloc();
}
