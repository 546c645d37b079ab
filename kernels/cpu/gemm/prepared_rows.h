// Rows of inputs in the form in which the weights of a linear layer take them, in memory of their own: for the experts
// of a mixture, of which each has its own tokens, and may be stored in another way than its neighbours.
//
// T is the model's dtype. Products are those of gemm/linear.h, gemm/blocks.h and gemm/block_dots.h.

#pragma once

#include "gemm/block_dots.h"

enum class RowForm {
  PLAIN,  // of InputsOf<T>
  WIDE,   // float32, for blocks in a model of another dtype
  INT8,   // Int8Rows
  BF16,   // Bf16Rows
};

template <class T>
INLINE RowForm row_form(const Linear& linear) {
  if (!linear.panels) return RowForm::PLAIN;
  if (linear.bits == 8) return RowForm::INT8;
  if (linear.bits == 16) return RowForm::BF16;
  return std::is_same_v<typename InputsOf<T>::Type, float> ? RowForm::PLAIN : RowForm::WIDE;
}

// Return how many numbers of float32 `count` prepared rows take: `count` times those of one row.
template <class T>
INLINE size_t prepared_floats(const Linear& linear, size_t count) {
  const RowForm form = row_form<T>(linear);
  if (form == RowForm::INT8) return Int8Rows::num_floats(count, linear.num_in);
  if (form == RowForm::BF16) return Bf16Rows::num_floats(count, linear.num_in);
  return count * linear.num_in;
}

// Prepare `count` rows in `memory`; row(i) points to the i-th, of T or InputsOf<T>.
template <class T, class Row>
INLINE void prepare_rows(const Linear& linear, int count, Row row, float* memory) {
  using From = std::remove_cv_t<std::remove_pointer_t<decltype(row(0))>>;
  const ptrdiff_t num_in = linear.num_in;
  auto copy = [&](auto* to) {
    for (int i = 0; i < count; ++i) {
      const From* from = row(i);
      if constexpr (std::is_same_v<decltype(to), From*>)
        std::copy(from, from + num_in, to + i * num_in);
      else
        for (int j = 0; j < num_in; ++j) to[i * num_in + j] = widen(from[j]);
    }
  };
  switch (row_form<T>(linear)) {
    case RowForm::PLAIN: return copy(reinterpret_cast<typename InputsOf<T>::Type*>(memory));
    case RowForm::WIDE: return copy(memory);
    case RowForm::INT8: {
      const Int8Rows rows = Int8Rows::in(memory, count, linear.num_in);
      for (int i = 0; i < count; ++i) quantise_row(linear, row(i), i, rows);
      return;
    }
    case RowForm::BF16:
      if constexpr (std::is_same_v<From, BFloat16>) {
        const Bf16Rows rows = Bf16Rows::in(memory, count, linear.num_in);
        for (int i = 0; i < count; ++i) rows.put(row(i), i, linear.num_in);
      }
  }
}

// Compute `panels` panels from `first` on for all of `count` prepared rows; see multiply_panel in gemm/linear.h.
// use(panel, row, sums).
template <class T, class Use>
INLINE void multiply_prepared(const Linear& linear, int first, int panels, const void* rows, int count, Use use) {
  const int num_in = linear.num_in, end = first + panels;
  auto each = [&](auto multiply) {
    for (int panel = first; panel < end; ++panel)
      multiply(panel, [&](int row, const float* sums) { use(panel, row, sums); });
  };
  if (!linear.panels) {
    const auto* x = static_cast<const typename InputsOf<T>::Type*>(rows);
    return each([&](int panel, auto use_here) { multiply_panel<T>(linear, panel, x, num_in, count, use_here); });
  }
  float* memory = static_cast<float*>(const_cast<void*>(rows));  // Int8Rows and Bf16Rows are for writing, too
  if (linear.bits == 8) {
    const Int8Rows x = Int8Rows::in(memory, count, num_in);
    return each([&](int panel, auto use_here) { dot_block_panel(linear, panel, x, count, use_here); });
  }
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<T, BFloat16>)
    if (linear.bits == 16) {
      const Bf16Rows x = Bf16Rows::in(memory, count, num_in);
      return each([&](int panel, auto use_here) { dot_block_panel(linear, panel, x, count, use_here); });
    }
#endif
  for (int panel = first; panel < end; panel += 2)
    multiply_block_panels(linear, panel, std::min(2, end - panel), memory, count, use);
}
