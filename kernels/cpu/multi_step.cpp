// Several decode steps in a background thread: the argmax of a step is the input of the next one.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>

#include "step.h"
#include "threading/background.h"

namespace {

INLINE int32_t load_acquire(const int32_t& number) { return __atomic_load_n(&number, __ATOMIC_ACQUIRE); }
INLINE void store_release(int32_t value, int32_t& number) { __atomic_store_n(&number, value, __ATOMIC_RELEASE); }

// Greedy decoding of several steps. `max_logits` and `argmax` have room for all steps; the other inputs are those of
// the first step and are updated in place.
struct MultiStepJob {
  const Model* model;
  Step* step;
  MultiStepRun* run;
  int32_t event_fd;  // written after each step

  void operator()() const {
    for (int32_t num_done = 1;; ++num_done) {
      const auto began = std::chrono::steady_clock::now();
      run->lacks_memory = triolet_step(model, step);
      run->elapsed_s[num_done - 1] = std::chrono::duration<float>(std::chrono::steady_clock::now() - began).count();
      const bool is_over = num_done == run->num_steps || load_acquire(run->is_halted) || run->lacks_memory || has_failed();
      if (!is_over) advance_inputs();
      store_release(is_over ? -num_done : num_done, run->num_done);
      notify();
      if (is_over) return;  // the caller may have freed everything that this job points at
    }
  }

 private:
  bool has_failed() const {
    return !std::all_of(step->max_logits, step->max_logits + step->num_logits,
                        [](float max_logit) { return std::isfinite(max_logit); });
  }

  void advance_inputs() const {
    for (int row = 0; row < step->num_seqs; ++row) {
      const int32_t position = step->seq_lens[row]++;
      step->token_ids[row] = step->argmax[row];
      step->positions[row] = position;
      for (const CacheGroup* group = step->groups; group < step->groups + step->num_groups; ++group) {
        const int64_t block = group->block_tables[row * step->block_tables_stride + position / step->block_size];
        group->slots[row] = block * step->block_size + position % step->block_size;
      }
    }
    step->argmax += step->num_logits;
    step->max_logits += step->num_logits;
  }

  void notify() const {
    const uint64_t one = 1;
    while (write(event_fd, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
};

}  // namespace

// Open a background thread; close it with triolet_background_close.
EXPORT void* triolet_background_open() { return new BackgroundThread<MultiStepJob>(); }
EXPORT void triolet_background_close(void* thread) { delete static_cast<BackgroundThread<MultiStepJob>*>(thread); }
EXPORT void triolet_background_wake(void* thread) { static_cast<BackgroundThread<MultiStepJob>*>(thread)->wake(); }

// Begin a run in the background thread, one at a time. model, step, run and everything that they point at must stay
// valid until the run is over. `event_fd` becomes readable after each step.
EXPORT void triolet_background_run(void* background, const Model* model, Step* step, MultiStepRun* run,
                                    int32_t event_fd) {
  static_cast<BackgroundThread<MultiStepJob>*>(background)->begin({model, step, run, event_fd});
}
