// The threads of a step, and how they share its work.
//
// A step is a row of stages; a stage is a number of items, each computed by one thread alone. A stage is over when its
// items are done, by whichever thread: a thread that comes late, or whose core was taken away between two items, is not
// waited for. So a step needs no more than the thread that called it; the others join in when they wake up.
//
// Between steps the others sleep. They must not spin for long there, as OpenMP's do for milliseconds: on a machine of
// two cores the core that they spin on is the one that the program around the step needs, and the scheduler of the
// kernel lets a thread that wakes up wait for milliseconds behind one that spins.

#pragma once

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

INLINE void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

// Waits for `is_over` by looking again and again; gives its core away after a while, for whom it waits for may need it.
template <class Condition>
INLINE void spin_until(Condition is_over) {
  constexpr int MAX_SPINS = 400;  // some twenty microseconds
  for (int spins = 0; !is_over(); ++spins)
    if (spins < MAX_SPINS)
      pause_briefly();
    else
      std::this_thread::yield();
}

// The stages of one step: of each, how many items of every thread's share were taken, and how many are done.
class Stages {
 public:
  Stages(int count, int threads)
      : threads_(threads), counters_(new Counter[static_cast<size_t>(count) * (threads + 1)]) {}

  // A thread begins with its own run of neighbours, then helps the others with theirs; returns when all items are done.
  template <class Work>
  void run(int stage, int thread, int64_t count, Work work) {
    Counter* taken = counters_.get() + static_cast<ptrdiff_t>(stage) * (threads_ + 1);
    std::atomic<int64_t>& done = taken[threads_].value;
    int64_t mine = 0;
    for (int helped = 0; helped < threads_; ++helped) {
      const int owner = (thread + helped) % threads_;
      const int64_t begin = count * owner / threads_, end = count * (owner + 1) / threads_;
      for (int64_t i; (i = begin + taken[owner].value.fetch_add(1, std::memory_order_relaxed)) < end; ++mine)
        work(static_cast<int>(i));
    }
    if (mine) done.fetch_add(mine, std::memory_order_acq_rel);
    spin_until([&] { return done.load(std::memory_order_acquire) >= count; });
  }

 private:
  struct alignas(64) Counter {  // on a cache line of its own
    std::atomic<int64_t> value{0};
  };
  const int threads_;
  std::unique_ptr<Counter[]> counters_;
};

// Worker threads of one other thread; they end with it.
class ThreadPool {
 public:
  // The calling thread's own.
  static ThreadPool& of_this_thread() {
    static thread_local ThreadPool team;
    return team;
  }

  // Calls work(0) here, and work(1) ... work(threads - 1) in the helpers that come while it runs.
  template <class Work>
  void run(int threads, Work& work) {
    if (threads <= 1) return work(0);
    start_helpers(threads - 1);
    call_ = [](void* context, int thread) { (*static_cast<Work*>(context))(thread); };
    context_ = &work;
    threads_ = threads;
    job_.fetch_add(1);  // odd: open
    wake();
    work(0);
    job_.fetch_add(1);  // even: closed
    spin_until([&] { return inside_.load() == 0; });
  }

  // Something is about to be run: waking up takes a while.
  void wake() {
    move_helpers_off_this_core();
    wake_count_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> held(mutex_);
    woken_.notify_all();
  }

  ~ThreadPool() {
    if (getpid() != process_) {  // a forked child has no helpers, and must not wait for them
      for (std::thread& helper : helpers_) helper.detach();
      return;
    }
    stop_.store(true);
    wake();
    for (std::thread& helper : helpers_) helper.join();
  }

 private:
  void start_helpers(int count) {
    for (int number = static_cast<int>(helpers_.size()); number < count; ++number)
      helpers_.emplace_back([this, number] { help(number + 1); });
  }

  // Linux likes to wake a thread on the core of the one that wakes it. But that one has work to do, and a helper would
  // wait behind it until there is nothing left to help with.
  void move_helpers_off_this_core() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (core == core_ && helpers_.size() == num_moved_) return;
    cpu_set_t cores;
    if (core < 0 || pthread_getaffinity_np(pthread_self(), sizeof cores, &cores) != 0) return;
    CPU_CLR(core, &cores);
    if (CPU_COUNT(&cores) == 0) return;
    for (std::thread& helper : helpers_) pthread_setaffinity_np(helper.native_handle(), sizeof cores, &cores);
    core_ = core;
    num_moved_ = helpers_.size();
#endif
  }

  void help(int thread) {
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

  // Takes part in the job that is open, if it is a new one; whether it did.
  bool try_join(int thread, unsigned& last) {
    const unsigned job = job_.load(std::memory_order_acquire);
    if (job % 2 == 0 || job == last) return false;
    inside_.fetch_add(1);  // seen by the thread that closes the job, or else the job is seen to be closed
    const bool is_open = job_.load() == job;
    if (is_open && thread < threads_) call_(context_, thread);
    inside_.fetch_sub(1);
    last = job;
    return is_open;
  }

  // Until the bell rings, or has rung since.
  void sleep(unsigned wake_count) {
    if (wake_count_.load() != wake_count) return;
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(held, [&] { return wake_count_.load() != wake_count; });
    sleepers_.fetch_sub(1);
  }

  std::vector<std::thread> helpers_;
  size_t num_moved_ = 0;
  int core_ = -1;
  const pid_t process_ = getpid();
  void (*call_)(void*, int) = nullptr;
  void* context_ = nullptr;
  int threads_ = 0;
  alignas(64) std::atomic<unsigned> job_{0};
  alignas(64) std::atomic<int> inside_{0};
  alignas(64) std::atomic<unsigned> wake_count_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable woken_;
};
