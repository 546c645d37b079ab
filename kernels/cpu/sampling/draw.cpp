// Argmax and random draws from rows of logits, on the threads of a step.

#include "sampling/argmax.h"
#include "sampling/draw.h"
#include "scratch.h"
#include "threading/thread_pool.h"

namespace {

template <class Work>
void for_each_row(int num_rows, int num_threads, Work row) {
  ListMemory memory;
  Stages stages(1, num_threads, memory.resource());
  auto work = [&](int thread) { stages.run(0, thread, num_rows, row); };
  ThreadPool::of_this_thread().run(num_threads, work);
  stages.check_memory();
}

template <class T>
void find_argmax(const T* logits, int64_t row_stride, int32_t num_rows, int64_t vocab_size, int32_t num_threads,
                  float* max_logits, int64_t* tokens) {
  for_each_row(num_rows, num_threads, [&](int row) {
    constexpr int64_t PART = 4096;  // elements: stays in the cache for the second pass of Argmax
    Argmax argmax;
    for (int64_t i = 0; i < vocab_size; i += PART)
      argmax.update(logits + row * row_stride + i, std::min(PART, vocab_size - i), i);
    max_logits[row] = argmax.value;
    tokens[row] = argmax.index;
  });
}

template <class T>
void draw_tokens(const Draw* draws, const T* logits, int64_t row_stride, int32_t num_rows, int64_t vocab_size,
                 int32_t num_threads, int64_t* tokens) {
  for_each_row(num_rows, num_threads, [&](int row) {
    tokens[row] = RowDraw<T>(draws[row], logits + row * row_stride, vocab_size).token();
  });
}

}  // namespace

// Compute each row's largest logit and the first token that has it; NaN is larger than everything. Return 0, or 1 if there
// is no memory for it.
EXPORT int32_t triolet_argmax(int32_t dtype, const void* logits, int64_t row_stride, int32_t num_rows,
                              int64_t vocab_size, int32_t num_threads, float* max_logits, int64_t* tokens) {
  return status_of([&] {
    if (dtype == 0)
      find_argmax(static_cast<const float*>(logits), row_stride, num_rows, vocab_size, num_threads, max_logits, tokens);
    else
      find_argmax(static_cast<const BFloat16*>(logits), row_stride, num_rows, vocab_size, num_threads, max_logits,
                  tokens);
  });
}

// Draw a token of each row. Return 0, or 1 if there is no memory for it.
EXPORT int32_t triolet_draw(const Draw* draws, int32_t dtype, const void* logits, int64_t row_stride, int32_t num_rows,
                            int64_t vocab_size, int32_t num_threads, int64_t* tokens) {
  return status_of([&] {
    if (dtype == 0)
      draw_tokens(draws, static_cast<const float*>(logits), row_stride, num_rows, vocab_size, num_threads, tokens);
    else
      draw_tokens(draws, static_cast<const BFloat16*>(logits), row_stride, num_rows, vocab_size, num_threads, tokens);
  });
}
