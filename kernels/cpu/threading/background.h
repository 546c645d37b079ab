// Background thread that runs one job at a time while its caller continues.
//
// The caller holds the GIL or runs an event loop, so it must not block. The job itself reports its end, as its last
// action.

#pragma once

#include "threading/thread_pool.h"

template <class Job>
class BackgroundThread {
 public:
  BackgroundThread() : thread_([this] { worker_loop(); }) {}

  ~BackgroundThread() {
    if (getpid() != process_) {  // see ~ThreadPool
      thread_.detach();
      return;
    }
    stop_.store(true);
    wake();
    thread_.join();
  }

  // Wake the thread: a job will begin soon, and waking up takes a while.
  void wake() {
    wake_count_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> held(mutex_);
    woken_.notify_all();
  }

  // Begin a job; the one before must have reported its end.
  void begin(const Job& job) {
    job_ = job;
    is_open_.store(true);
    wake();
  }

 private:
  void worker_loop() {
    while (!stop_.load()) {
      const unsigned wake_count = wake_count_.load();
      if (is_woken(wake_count)) spin_for_job();
      sleep(wake_count);
    }
  }

  bool is_woken(unsigned wake_count) {
    const bool is_new = wake_count != last_;
    last_ = wake_count;
    return is_new;
  }

  // Spin for the announced job, but only for SPIN_TIME: another thread may need the core.
  void spin_for_job() {
    constexpr auto SPIN_TIME = std::chrono::microseconds(100);
    ThreadPool::of_this_thread().wake();  // the step will need all workers
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
      for (int spins = 0; spins < 16; ++spins, pause_briefly())
        // A copy: the caller may set the next job_ as soon as this one reports its end.
        if (is_open_.exchange(false)) return Job(job_)();
    } while (!stop_.load() && std::chrono::steady_clock::now() < until);
  }

  // Sleep until wake() is called, or return if it was called since `wake_count` was read.
  void sleep(unsigned wake_count) {
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    woken_.wait(held, [&] { return wake_count_.load() != wake_count; });
    sleepers_.fetch_sub(1);
  }

  Job job_{};
  unsigned last_ = 0;
  const pid_t process_ = getpid();
  std::atomic<bool> is_open_{false}, stop_{false};
  std::atomic<unsigned> wake_count_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable woken_;
  std::thread thread_;  // last member: the thread uses the others
};
