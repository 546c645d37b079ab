// Step after step in a thread of its own: each sequence goes on with the token that it has got.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cmath>

#include "step.h"
#include "threading/background.h"

namespace {

INLINE int32_t peek(const int32_t& number) { return __atomic_load_n(&number, __ATOMIC_ACQUIRE); }
INLINE void publish(int32_t value, int32_t& number) { __atomic_store_n(&number, value, __ATOMIC_RELEASE); }

// A token more for each of some sequences, again and again: the likeliest, from one step to the next. `peaks` and
// `best` have room for all steps; the other tensors that change are those of the first step at first.
struct MultiStepJob {
  const Model* model;
  Step* step;
  MultiStepRun* run;
  int32_t done;  // an eventfd, told of each step

  void operator()() const {
    for (int32_t num_done = 1;; ++num_done) {
      const auto began = std::chrono::steady_clock::now();
      triolet_step(model, step);
      run->elapsed_s[num_done - 1] = std::chrono::duration<float>(std::chrono::steady_clock::now() - began).count();
      const bool is_over = num_done == run->num_steps || peek(run->is_halted) || has_failed();
      if (!is_over) go_on();
      publish(is_over ? -num_done : num_done, run->num_done);
      tell();
      if (is_over) return;  // and nothing here is there any more
    }
  }

 private:
  bool has_failed() const {
    return !std::all_of(step->max_logits, step->max_logits + step->num_logits,
                        [](float max_logit) { return std::isfinite(max_logit); });
  }

  void go_on() const {
    for (int row = 0; row < step->num_seqs; ++row) {
      const int32_t position = step->seq_lens[row]++;
      const int64_t block = step->block_tables[row * step->block_tables_stride + position / step->block_size];
      step->token_ids[row] = step->argmax[row];
      step->positions[row] = position;
      step->slots[row] = block * step->block_size + position % step->block_size;
    }
    step->argmax += step->num_logits;
    step->max_logits += step->num_logits;
  }

  void tell() const {
    const uint64_t one = 1;
    while (write(done, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }
};

}  // namespace

// A thread for steps; to be closed.
EXPORT void* triolet_background_open() { return new BackgroundThread<MultiStepJob>(); }
EXPORT void triolet_background_close(void* thread) { delete static_cast<BackgroundThread<MultiStepJob>*>(thread); }
EXPORT void triolet_background_wake(void* thread) { static_cast<BackgroundThread<MultiStepJob>*>(thread)->wake(); }

// A run in that thread, one at a time; model, step, run and all they point at must last until it is over. `done`, an
// eventfd, can be read whenever a step has been computed.
EXPORT void triolet_background_run(void* background, const Model* model, Step* step, MultiStepRun* run, int32_t done) {
  static_cast<BackgroundThread<MultiStepJob>*>(background)->begin({model, step, run, done});
}
