// A thread that computes steps while the one that asked for them goes on.
//
// The asking thread is one that holds the interpreter's lock or runs an event loop: it must not wait, and what it does
// next need not wait for the step either. The job itself says, as the last thing that it does, that it is over.

#pragma once

#include "threading/thread_pool.h"

template <class Job>
class BackgroundThread {
 public:
  BackgroundThread() : thread_([this] { work(); }) {}

  ~BackgroundThread() {
    if (getpid() != process_) {  // see ThreadPool
      thread_.detach();
      return;
    }
    stop_.store(true);
    wake();
    thread_.join();
  }

  // A job will come soon: waking up takes a while.
  void wake() {
    wake_count_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> held(mutex_);
    woken_.notify_all();
  }

  // The job before must have said that it is over.
  void begin(const Job& job) {
    job_ = job;
    is_open_.store(true);
    wake();
  }

 private:
  void work() {
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

  // Computes the job that was announced, unless it takes too long to come: the core may be needed until then.
  void spin_for_job() {
    constexpr auto SPIN_TIME = std::chrono::microseconds(100);
    ThreadPool::of_this_thread().wake();  // they are all needed
    const auto until = std::chrono::steady_clock::now() + SPIN_TIME;
    do {
      for (int spins = 0; spins < 16; ++spins, pause_briefly())
        if (is_open_.exchange(false)) return Job(job_)();  // its place is free for the next one as soon as it is over
    } while (!stop_.load() && std::chrono::steady_clock::now() < until);
  }

  // Until the bell rings, or has rung since.
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
  std::thread thread_;  // last: it uses the others
};
