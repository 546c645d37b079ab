// One linear layer by itself, for models whose other parts torch computes: out = x @ weight.T + bias.

#include "gemm/bf16x3.h"
#include "simd.h"

namespace {

constexpr int PART_BYTES = 384 * 1024;  // of input rows: they stay in the L2 cache for all panels

template <class T>
class Product {
 public:
  Product(const Linear& linear, const T* x, int num_rows, int num_threads, T* out)
      : linear_(linear), x_(x), num_rows_(num_rows), num_threads_(num_threads), out_(out) {}

  void run() {
    Bf16x3Rows split{nullptr, num_blocks(linear_.num_in)};
    if (linear_.bits == 32) {
      static thread_local Scratch scratch;
      split.tiles = reinterpret_cast<uint32_t*>(scratch.floats(Bf16x3Rows::num_words(num_rows_, linear_.num_in)));
      parallel_for(num_threads_, num_rows_, [&](int64_t row) {
        split_row(x_ + row * linear_.num_in, linear_.num_in, static_cast<int>(row), split);
      });
    }
    const Input* inputs = widened();
    // An item is (part of the rows, panel). Consecutive items share their rows.
    const int panels = linear_.num_panels(), part = rows_of_part();
    parallel_for(num_threads_, static_cast<int64_t>(panels) * ((num_rows_ + part - 1) / part), [&](int64_t item) {
      const int panel = static_cast<int>(item % panels), first = static_cast<int>(item / panels) * part;
      const int rows = std::min(part, num_rows_ - first);
      auto use = [&](int row, const float* sums) { write(first + row, panel, sums); };
      if (linear_.bits == 32)
        Bf16x3Product(rows).panel(linear_, panel, split.from(first), rows, use);
      else
        multiply_panel<T>(linear_, panel, inputs + static_cast<ptrdiff_t>(first) * linear_.num_in, linear_.num_in, rows,
                          use);
    });
  }

 private:
  using Input = typename InputsOf<T>::Type;

  // Return the rows in the dtype that they are multiplied in.
  const Input* widened() const {
    if constexpr (std::is_same_v<Input, T>) {
      return x_;
    } else {
      static thread_local Scratch scratch;
      const ptrdiff_t width = linear_.num_in;
      float* wide = scratch.floats(num_rows_ * width);
      parallel_for(num_threads_, num_rows_, [&](int64_t row) {
        for (ptrdiff_t i = row * width; i < (row + 1) * width; ++i) wide[i] = widen(x_[i]);
      });
      return wide;
    }
  }

  int rows_of_part() const {
    const int fitting = std::max<int>(PART_BYTES / (linear_.num_in * sizeof(Input)), ROW_BLOCK);
    const int parts = (num_rows_ + fitting - 1) / fitting;
    return round_up((num_rows_ + parts - 1) / parts, 2 * AMX_ROWS);  // split rows begin with a whole tile
  }

  void write(int row, int panel, const float* sums) const {
    const int first = panel * TILE_COLUMNS, count = std::min(TILE_COLUMNS, linear_.num_out - first);
    narrow_row(sums, count, 1.0f, out_ + static_cast<ptrdiff_t>(row) * linear_.num_out + first);
  }

  const Linear& linear_;
  const T* x_;
  const int num_rows_, num_threads_;
  T* out_;
};

}  // namespace

// Multiply rows x [num_rows, num_in] into out [num_rows, num_out], both contiguous. The weights are not quantised.
// dtype: 0 float32, 1 bfloat16
// Return 0, or 1 if there is no memory for it.
EXPORT int32_t triolet_linear(const Linear* linear, int32_t dtype, const void* x, int32_t num_rows, int32_t num_threads,
                              void* out) {
  return status_of([&] {
    if (dtype == 0)
      Product<float>(*linear, static_cast<const float*>(x), num_rows, num_threads, static_cast<float*>(out)).run();
    else
      Product<BFloat16>(*linear, static_cast<const BFloat16*>(x), num_rows, num_threads, static_cast<BFloat16*>(out))
          .run();
  });
}
