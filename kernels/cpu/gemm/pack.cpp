// Packing of weights, called by packing.py.

#include "gemm/bf16x3.h"
#include "gemm/int4.h"

// Return the columns of a panel: num_out is rounded up to a multiple.
EXPORT int32_t triolet_panel_columns() { return TILE_COLUMNS; }

// dtype: 0 float32, 1 bfloat16, 3 int8
EXPORT void triolet_pack(int32_t dtype, const void* weight, int32_t num_out, int32_t num_in, int32_t gated,
                         int32_t num_threads, void* packed) {
  auto pack_as = [&](auto number) {
    using Number = decltype(number);
    pack(static_cast<const Number*>(weight), num_out, num_in, gated, num_threads, static_cast<Number*>(packed));
  };
  switch (dtype) {
    case 0: return pack_as(float{});
    case 1: return pack_as(BFloat16{});
    case 3: return pack_as(int8_t{});
  }
}

// Pack float32 weights for Linear::bits = 32.
EXPORT void triolet_pack_bf16x3_blocks(const float* weight, int32_t num_out, int32_t num_in, int32_t gated,
                                int32_t num_threads, float* packed) {
  pack_bf16x3_blocks(weight, num_out, num_in, gated, num_threads, packed);
}

// Return the inputs of a BF16x3 block; 0 = no AMX.
EXPORT int32_t triolet_block_inputs() { return amx_usable() ? BLOCK_INPUTS : 0; }

// weight: [num_out, num_in] of 0 to 15; scales: [num_out, num_in / triolet_group()] bfloat16
EXPORT void triolet_pack_int4(const void* weight, const void* scales, int32_t num_out, int32_t num_in, int32_t gated,
                                int32_t num_threads, void* packed) {
  pack_int4(static_cast<const uint8_t*>(weight), static_cast<const BFloat16*>(scales), num_out, num_in, gated,
              num_threads, static_cast<uint8_t*>(packed));
}

// Return the inputs per scale of int4 weights.
EXPORT int32_t triolet_group() { return GROUP; }
