// Scratch memory, and what becomes of a call for which there is none.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory_resource>
#include <new>

// Scratch memory of one thread, kept between calls. Growing does not keep the contents.
class Scratch {
 public:
  // Return room for so many numbers; throw std::bad_alloc if there is none. What there was before stays then: a call that
  // needs no more than an earlier one never fails, however short memory is.
  float* floats(size_t count) {
    if (count > capacity_) {
      const size_t capacity = count + count / 4;
      void* memory = std::aligned_alloc(64, (capacity * sizeof(float) + 63) / 64 * 64);
      if (!memory) throw std::bad_alloc();
      std::free(memory_);
      memory_ = static_cast<float*>(memory);
      capacity_ = capacity;
    }
    return memory_;
  }
  ~Scratch() { std::free(memory_); }

 private:
  float* memory_ = nullptr;
  size_t capacity_ = 0;
};

// Memory for the lists that a call makes, from its thread's, which is kept between calls: like `Scratch`, a call that needs
// no more than an earlier one takes nothing from the system. One at a time in a thread.
class ListMemory {
 public:
  ListMemory() : lists_{kept().bytes(), kept().size, &further_} {}  // in this order: the first may change the second
  ~ListMemory() { kept().wanted = kept().size + further_.size; }
  ListMemory(const ListMemory&) = delete;
  ListMemory& operator=(const ListMemory&) = delete;

  std::pmr::memory_resource* resource() { return &lists_; }

 private:
  struct Kept {
    Scratch scratch;
    size_t size = 0, wanted = 0;  // bytes: what there is, and what the last call needed

    void* bytes() {
      const size_t floats = (std::max(size, wanted) + sizeof(float) - 1) / sizeof(float);
      void* memory = nullptr;
      try {
        memory = scratch.floats(floats);
        size = floats * sizeof(float);
      } catch (const std::bad_alloc&) {  // there may be enough in smaller pieces
        memory = scratch.floats(size / sizeof(float));
      }
      return memory;
    }
  };

  // What a call takes beyond what is kept.
  struct Further : std::pmr::memory_resource {
    size_t size = 0;

    void* do_allocate(size_t bytes, size_t alignment) override {
      void* memory = std::pmr::new_delete_resource()->allocate(bytes, alignment);
      size += bytes;
      return memory;
    }
    void do_deallocate(void* memory, size_t bytes, size_t alignment) override {
      std::pmr::new_delete_resource()->deallocate(memory, bytes, alignment);
    }
    bool do_is_equal(const std::pmr::memory_resource& other) const noexcept override { return this == &other; }
  };

  static Kept& kept() {
    static thread_local Kept kept;
    return kept;
  }

  Further further_;
  std::pmr::monotonic_buffer_resource lists_;
};

// Call work(); return 0, or 1 if there was no memory for it. No exception may leave an exported function.
template <class Work>
int32_t status_of(Work work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}
