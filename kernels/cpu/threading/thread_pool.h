// Thread pool and work distribution of a step.
//
// A step is a sequence of stages; a stage is a number of items, each computed by one thread. A stage is over when all
// its items are done. The barrier waits for items, not for threads: a worker that wakes up late, or is preempted
// between two items, delays nothing. A step can complete on the calling thread alone; workers join when they wake up.
//
// Between steps the workers sleep. They must not spin for milliseconds, as OpenMP's threads do: on two cores they would
// occupy the core that the rest of the process needs, and Linux can delay a woken thread by milliseconds behind a
// spinning one.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory_resource>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "simd.h"

INLINE void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");  // "yield" takes no time on most cores
#else
  std::this_thread::yield();
#endif
}

// Spin until `is_over()`; after MAX_SPINS yield the core, which the awaited thread may need.
template <class Condition>
INLINE void spin_until(Condition is_over) {
  constexpr int MAX_SPINS = 400;  // about 20 microseconds
  for (int spins = 0; !is_over(); ++spins)
    if (spins < MAX_SPINS)
      pause_briefly();
    else
      std::this_thread::yield();
}

// Counters of the stages of one step: items taken from each thread's range, and items done. Once an item finds no memory,
// no further one is computed: they only count as done, so that no thread waits for ever.
class Stages {
 public:
  Stages(int count, int threads, std::pmr::memory_resource* memory)
      : threads_(threads), counters_(static_cast<size_t>(count) * (threads + 1), memory) {}

  // Compute items of the thread's own range, then of the others' (work stealing); return when all items are done.
  template <class Work>
  void run(int stage, int thread, int64_t count, Work work) {
    Counter* taken = counters_.data() + static_cast<ptrdiff_t>(stage) * (threads_ + 1);
    std::atomic<int64_t>& done = taken[threads_].value;
    int64_t num_computed = 0;
    for (int offset = 0; offset < threads_; ++offset) {
      const int owner = (thread + offset) % threads_;
      const int64_t begin = count * owner / threads_, end = count * (owner + 1) / threads_;
      for (int64_t i; (i = begin + taken[owner].value.fetch_add(1, std::memory_order_relaxed)) < end; ++num_computed)
        compute(work, static_cast<int>(i));
    }
    if (num_computed) done.fetch_add(num_computed, std::memory_order_acq_rel);
    spin_until([&] { return done.load(std::memory_order_acquire) >= count; });
  }

  // Note that a thread has found no memory.
  void set_lacks_memory() { lacks_memory_.store(true, std::memory_order_release); }

  // Throw std::bad_alloc if a thread has found no memory.
  void check_memory() const {
    if (lacks_memory_.load(std::memory_order_acquire)) throw std::bad_alloc();
  }

 private:
  template <class Work>
  void compute(Work& work, int item) {
    if (lacks_memory_.load(std::memory_order_relaxed)) return;
    try {
      work(item);
    } catch (const std::bad_alloc&) {
      set_lacks_memory();
    }
  }

  struct alignas(64) Counter {  // own cache line: no false sharing
    std::atomic<int64_t> value{0};
  };
  const int threads_;
  std::pmr::vector<Counter> counters_;
  std::atomic<bool> lacks_memory_{false};
};

// Worker threads of one calling thread; they end with it.
class ThreadPool {
 public:
  // Return the pool of the calling thread.
  static ThreadPool& of_this_thread() {
    static thread_local ThreadPool pool;
    return pool;
  }

  // Call work(0) here, and work(1) to work(threads - 1) in the workers that wake up while it runs.
  template <class Work>
  void run(int threads, Work& work) {
    if (threads <= 1) return work(0);
    start_workers(threads - 1);
    call_ = [](void* context, int thread) { (*static_cast<Work*>(context))(thread); };
    context_ = &work;
    threads_ = threads;
    job_.fetch_add(1);  // odd: open
    wake();
    work(0);
    job_.fetch_add(1);  // even: closed
    spin_until([&] { return num_active_.load() == 0; });
  }

  // Wake the workers before a run: waking up takes a while.
  void wake() {
    move_workers_off_this_core();
    wake_count_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> held(mutex_);
    woken_.notify_all();
  }

  ~ThreadPool() {
    if (getpid() != process_) {  // a forked child has no workers: joining them would block for ever
      for (std::thread& worker : workers_) worker.detach();
      return;
    }
    stop_.store(true);
    wake();
    for (std::thread& worker : workers_) worker.join();
  }

 private:
  // Start the workers that there are not yet. Those that cannot be started now are done without: the others take what
  // would have been theirs.
  void start_workers(int count) {
    try {
      for (int number = static_cast<int>(workers_.size()); number < count; ++number)
        workers_.emplace_back([this, number] { worker_loop(number + 1); });
    } catch (const std::system_error&) {
    }
  }

  // Exclude this core from the workers' affinity. Linux tends to wake a thread on the core of its waker, which is busy
  // with the step: the worker would wait until no items are left.
  void move_workers_off_this_core() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (core == core_ && workers_.size() == num_moved_) return;
    cpu_set_t cores;
    if (core < 0 || pthread_getaffinity_np(pthread_self(), sizeof cores, &cores) != 0) return;
    CPU_CLR(core, &cores);
    if (CPU_COUNT(&cores) == 0) return;
    for (std::thread& worker : workers_) pthread_setaffinity_np(worker.native_handle(), sizeof cores, &cores);
    core_ = core;
    num_moved_ = workers_.size();
#endif
  }

  void worker_loop(int thread) {
    constexpr auto SPIN_TIME = std::chrono::microseconds(60);
    unsigned last = 0;
    while (!stop_.load()) {
      const unsigned wake_count = wake_count_.load();
      const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
      do {
        for (int spins = 0; spins < 16 && !try_join(thread, last); ++spins) pause_briefly();
      } while (wake_count_.load() == wake_count && std::chrono::steady_clock::now() < until);
      sleep(wake_count);
    }
  }

  // Take part in the open job if it is a new one; return whether it was.
  bool try_join(int thread, unsigned& last) {
    const unsigned job = job_.load(std::memory_order_acquire);
    if (job % 2 == 0 || job == last) return false;
    // Sequentially consistent: either the closing thread sees this, or the next load sees the job closed.
    num_active_.fetch_add(1);
    const bool is_open = job_.load() == job;
    if (is_open && thread < threads_) call_(context_, thread);
    num_active_.fetch_sub(1);
    last = job;
    return is_open;
  }

  // Sleep until wake() is called, or return if it was called since `wake_count` was read.
  void sleep(unsigned wake_count) {
    if (wake_count_.load() != wake_count) return;
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(held, [&] { return wake_count_.load() != wake_count; });
    sleepers_.fetch_sub(1);
  }

  std::vector<std::thread> workers_;
  size_t num_moved_ = 0;
  int core_ = -1;
  const pid_t process_ = getpid();
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  alignas(64) std::atomic<unsigned> job_{0};
  alignas(64) std::atomic<int> num_active_{0};
  alignas(64) std::atomic<unsigned> wake_count_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
};
