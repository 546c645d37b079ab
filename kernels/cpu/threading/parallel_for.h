// parallel_for over the threads that the rest of the process computes with: those of torch's OpenMP, which are awake
// already, once library.py has found them; else those of a thread pool of our own.
//
// So the library is linked to no OpenMP runtime. Two of them in one process would each keep threads that spin for work,
// on the same cores; and where torch's lies is known only where torch is.

#pragma once

#include "threading/thread_pool.h"

// GOMP_parallel, which every OpenMP runtime has: calls work(context) in so many threads.
using StartThreads = void (*)(void (*work)(void*), void* context, unsigned num_threads, unsigned flags);
inline StartThreads start_threads = nullptr;

template <class Work>
static void parallel_for(int num_threads, int64_t count, Work work) {
  std::atomic<int64_t> next{0};
  auto take = [&](int) {
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(item);
  };
  if (num_threads <= 1 || count <= 1) return take(0);
  if (!start_threads) return ThreadPool::of_this_thread().run(num_threads, take);
  start_threads([](void* context) { (*static_cast<decltype(take)*>(context))(0); }, &take, num_threads, 0);
}
