// Scratch memory.

#pragma once

#include <cstddef>
#include <cstdlib>

// Scratch memory of one thread, kept between calls. Growing does not keep the contents.
class Scratch {
 public:
  float* floats(size_t count) {
    if (count > capacity_) {
      std::free(memory_);
      capacity_ = count + count / 4;
      memory_ = static_cast<float*>(std::aligned_alloc(64, (capacity_ * sizeof(float) + 63) / 64 * 64));
      if (!memory_) std::abort();
    }
    return memory_;
  }
  ~Scratch() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};
