// A thread that computes steps while the one that asked for them goes on.
//
// The asking thread is one that holds the interpreter's lock or runs an event loop: it must not wait, and what it does
// next need not wait for the step either. The job itself says, as the last thing that it does, that it is over.

#pragma once

#include "threading/thread_pool.h"

template <class Job>
class Background {
 public:
  Background() : thread_([this] { work(); }) {}

  ~Background() {
    if (getpid() != process_) {  // see Team
      thread_.detach();
      return;
    }
    stop_.store(true);
    wake();
    thread_.join();
  }

  // A job will come soon: waking up takes a while.
  void wake() {
    bell_.fetch_add(1);
    if (sleepers_.load() == 0) return;
    std::lock_guard<std::mutex> held(mutex_);
    rung_.notify_all();
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
      const unsigned bell = bell_.load();
      if (is_rung(bell)) wait_awhile();
      sleep(bell);
    }
  }

  bool is_rung(unsigned bell) {
    const bool is_new = bell != last_;
    last_ = bell;
    return is_new;
  }

  // Computes the job that was announced, unless it takes too long to come: the core may be needed until then.
  void wait_awhile() {
    constexpr auto PATIENCE = std::chrono::microseconds(100);
    Team::mine().wake();  // they are all needed
    const auto until = std::chrono::steady_clock::now() + PATIENCE;
    do {
      for (int looks = 0; looks < 16; ++looks, pause_briefly())
        if (is_open_.exchange(false)) return Job(job_)();  // its place is free for the next one as soon as it is over
    } while (!stop_.load() && std::chrono::steady_clock::now() < until);
  }

  // Until the bell rings, or has rung since.
  void sleep(unsigned bell) {
    std::unique_lock<std::mutex> held(mutex_);
    sleepers_.fetch_add(1);
    rung_.wait(held, [&] { return bell_.load() != bell; });
    sleepers_.fetch_sub(1);
  }

  Job job_{};
  unsigned last_ = 0;
  const pid_t process_ = getpid();
  std::atomic<bool> is_open_{false}, stop_{false};
  std::atomic<unsigned> bell_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable rung_;
  std::thread thread_;  // last: it uses the others
};
