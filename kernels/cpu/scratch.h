// Scratch memory.

#pragma once

#include <cstddef>
#include <cstdlib>
#include <new>

// Scratch memory of one thread, kept between calls. Growing does not keep the contents.
class Scratch {
 public:
  // Return room for so many numbers; throw std::bad_alloc if there is none.
  float* floats(size_t count) {
    if (count > capacity_) {
      std::free(memory_);
      capacity_ = 0;
      const size_t capacity = count + count / 4;
      memory_ = static_cast<float*>(std::aligned_alloc(64, (capacity * sizeof(float) + 63) / 64 * 64));
      if (!memory_) throw std::bad_alloc();
      capacity_ = capacity;
    }
    return memory_;
  }
  ~Scratch() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};
