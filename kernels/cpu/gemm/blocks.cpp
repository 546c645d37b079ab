// The formats of gemm/blocks.h: packing, and products by decoding within them.

#include "gemm/block_format.h"

namespace {

// Nibbles of the inputs [first, first + 4) of a block: two bytes of each column, from `bytes` on.
INLINE void load_nibbles(const uint8_t* bytes, int first, Ints* four) {
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Ints both = load_unsigned(bytes + (first / 2 + i) * TILE_COLUMNS);
    four[2 * i] = both & 15;
    four[2 * i + 1] = both >> 4;
  }
}

// Add the fifth bits of the inputs [first, first + 4) of a block: a byte of each column for eight inputs.
INLINE void add_fifth_bits(const uint8_t* bytes, int first, Ints* four) {
  const Ints bits = load_unsigned(bytes + first / 8 * TILE_COLUMNS) >> first % 8;
  four[0] |= bits << 4 & 16;
  four[1] |= bits << 3 & 16;
  four[2] |= bits << 2 & 16;
  four[3] |= bits << 1 & 16;
}

// Each format below has
//   inputs(), columns of a file's block; file_bytes(), its size; panel_bytes(), the size of a panel's block;
//   RUN: inputs that share what `scales` gives;
//   put: copy a file's block into column `column` of a panel's block;
//   scales: those of a run of LANES columns from a panel's block, `at` columns on;
//   decode: weights of four inputs of these columns.

struct Q8Blocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale;
  };
  explicit Q8Blocks(int) {}
  int inputs() const { return 32; }
  int file_bytes() const { return 34; }
  int panel_bytes() const { return 34 * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    for (int k = 0; k < 32; ++k) to[(2 + k) * TILE_COLUMNS + column] = from[2 + k];
  }
  MEMBER Scales scales(const uint8_t* block, int, int at) const { return {load_halves(block + 2 * at)}; }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    const uint8_t* from = block + (2 + first) * TILE_COLUMNS + at;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(load_signed(from + i * TILE_COLUMNS)) * run.scale;
  }
};

struct Q4Blocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale, eight;
  };
  explicit Q4Blocks(int) {}
  int inputs() const { return 32; }
  int file_bytes() const { return 18; }
  int panel_bytes() const { return 18 * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    auto nibble = [&](int k) { return from[2 + k % 16] >> (k / 16 * 4) & 15; };
    for (int k = 0; k < 32; k += 2)
      to[(2 + k / 2) * TILE_COLUMNS + column] = static_cast<uint8_t>(nibble(k) | nibble(k + 1) << 4);
  }
  MEMBER Scales scales(const uint8_t* block, int, int at) const {
    const Floats scale = load_halves(block + 2 * at);
    return {scale, scale * 8.0f};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    Ints four[4];
    load_nibbles(block + 2 * TILE_COLUMNS + at, first, four);
    // Exact: scales have 11 bits, so products and their difference fit into float32.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i]) * run.scale - run.eight;
  }
};

struct Q5Blocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale, sixteen;
  };
  explicit Q5Blocks(int) {}
  int inputs() const { return 32; }
  int file_bytes() const { return 22; }
  int panel_bytes() const { return 22 * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    for (int byte = 0; byte < 4; ++byte) to[(2 + byte) * TILE_COLUMNS + column] = from[2 + byte];
    auto nibble = [&](int k) { return from[6 + k % 16] >> (k / 16 * 4) & 15; };
    for (int k = 0; k < 32; k += 2)
      to[(6 + k / 2) * TILE_COLUMNS + column] = static_cast<uint8_t>(nibble(k) | nibble(k + 1) << 4);
  }
  MEMBER Scales scales(const uint8_t* block, int, int at) const {
    const Floats scale = load_halves(block + 2 * at);
    return {scale, scale * 16.0f};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    Ints four[4];
    load_nibbles(block + 6 * TILE_COLUMNS + at, first, four);
    add_fifth_bits(block + 2 * TILE_COLUMNS + at, first, four);
    // Exact, as Q4_0's.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i]) * run.scale - run.sixteen;
  }
};

struct Q4KBlocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale, minimum;
  };
  explicit Q4KBlocks(int) {}
  int inputs() const { return 256; }
  int file_bytes() const { return 144; }
  int panel_bytes() const { return (4 + 16 + 128) * TILE_COLUMNS; }  // six-bit scales take a byte each

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from, 2);
    std::memcpy(to + 2 * (TILE_COLUMNS + column), from + 2, 2);
    for (int run = 0; run < 8; ++run) {
      to[(4 + run) * TILE_COLUMNS + column] = six_bits(from + 4, run, false);
      to[(12 + run) * TILE_COLUMNS + column] = six_bits(from + 4, run, true);
    }
    auto nibble = [&](int k) { return from[16 + k / 64 * 32 + k % 32] >> (k / 32 % 2 * 4) & 15; };
    for (int k = 0; k < 256; k += 2)
      to[(20 + k / 2) * TILE_COLUMNS + column] = static_cast<uint8_t>(nibble(k) | nibble(k + 1) << 4);
  }
  MEMBER Scales scales(const uint8_t* block, int run, int at) const {
    return {load_halves(block + 2 * at) * to_floats(load_unsigned(block + (4 + run) * TILE_COLUMNS + at)),
            load_halves(block + 2 * (TILE_COLUMNS + at)) *
                to_floats(load_unsigned(block + (12 + run) * TILE_COLUMNS + at))};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    Ints four[4];
    load_nibbles(block + 20 * TILE_COLUMNS + at, first, four);
    // The products are exact (17 and 4 bits), so that the difference is rounded once, fused or not.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i]) * run.scale - run.minimum;
  }
};

struct Q5KBlocks {
  static constexpr int RUN = 32;
  using Scales = Q4KBlocks::Scales;
  explicit Q5KBlocks(int inputs) : lower_(inputs) {}
  int inputs() const { return 256; }
  int file_bytes() const { return 176; }
  int panel_bytes() const { return lower_.panel_bytes() + 32 * TILE_COLUMNS; }  // then the fifth bits

  void put(const uint8_t* from, int column, uint8_t* to) const {
    uint8_t lower[144];
    std::memcpy(lower, from, 16);
    std::memcpy(lower + 16, from + 48, 128);
    lower_.put(lower, column, to);
    for (int byte = 0; byte < 32; ++byte) {
      int bits = 0;
      for (int i = 0; i < 8; ++i) bits |= (from[16 + (8 * byte + i) % 32] >> (8 * byte + i) / 32 & 1) << i;
      to[lower_.panel_bytes() + byte * TILE_COLUMNS + column] = static_cast<uint8_t>(bits);
    }
  }
  MEMBER Scales scales(const uint8_t* block, int run, int at) const { return lower_.scales(block, run, at); }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    Ints four[4];
    load_nibbles(block + 20 * TILE_COLUMNS + at, first, four);
    add_fifth_bits(block + lower_.panel_bytes() + at, first, four);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i]) * run.scale - run.minimum;
  }

 private:
  Q4KBlocks lower_;
};

struct Q6KBlocks {
  static constexpr int RUN = 16;
  struct Scales {
    Floats scale, thirty_two;
  };
  explicit Q6KBlocks(int) {}
  int inputs() const { return 256; }
  int file_bytes() const { return 210; }
  int panel_bytes() const { return 210 * TILE_COLUMNS; }

  // Four inputs: two bytes of nibbles, and one of their upper two bits.
  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 2 * column, from + 208, 2);
    for (int run = 0; run < 16; ++run) to[(2 + run) * TILE_COLUMNS + column] = from[192 + run];
    auto nibble = [&](int k) { return from[k / 128 * 64 + k % 64] >> (k / 64 % 2 * 4) & 15; };
    auto upper = [&](int k) { return from[128 + k / 128 * 32 + k % 32] >> (k / 32 % 4 * 2) & 3; };
    for (int k = 0; k < 256; k += 4) {
      uint8_t* three = to + (18 + k / 4 * 3) * TILE_COLUMNS + column;
      for (int i = 0; i < 4; i += 2)
        three[i / 2 * TILE_COLUMNS] = static_cast<uint8_t>(nibble(k + i) | nibble(k + i + 1) << 4);
      three[2 * TILE_COLUMNS] = static_cast<uint8_t>(upper(k) | upper(k + 1) << 2 | upper(k + 2) << 4 | upper(k + 3) << 6);
    }
  }
  MEMBER Scales scales(const uint8_t* block, int run, int at) const {
    const Floats scale = load_halves(block + 2 * at) * to_floats(load_signed(block + (2 + run) * TILE_COLUMNS + at));
    return {scale, scale * 32.0f};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    const uint8_t* three = block + (18 + first / 4 * 3) * TILE_COLUMNS + at;
    Ints four[4];
    load_nibbles(three, 0, four);
    const Ints upper = load_unsigned(three + 2 * TILE_COLUMNS);
    four[0] |= upper << 4 & 48;
    four[1] |= upper << 2 & 48;
    four[2] |= upper & 48;
    four[3] |= upper >> 2 & 48;
    // Exact: scales have 18 bits, and the integers 6.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i]) * run.scale - run.thirty_two;
  }
};

// A file's block, as blocks.py makes it: float32 scale, zero point (a byte), nibbles in pairs of adjacent inputs.
struct U4Blocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale;
    Ints zero;
  };
  explicit U4Blocks(int inputs) : inputs_(inputs) {}
  int inputs() const { return inputs_; }
  int file_bytes() const { return 5 + inputs_ / 2; }
  int panel_bytes() const { return (5 + inputs_ / 2) * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 4 * column, from, 4);
    for (int byte = 4; byte < file_bytes(); ++byte) to[byte * TILE_COLUMNS + column] = from[byte];
  }
  MEMBER Scales scales(const uint8_t* block, int, int at) const {
    return {load(reinterpret_cast<const float*>(block + 4 * at)), load_unsigned(block + 4 * TILE_COLUMNS + at)};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    Ints four[4];
    load_nibbles(block + 5 * TILE_COLUMNS + at, first, four);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(four[i] - run.zero) * run.scale;
  }

 private:
  int inputs_;
};

// A file's block, as blocks.py makes it: float32 scale, then bytes.
struct I8Blocks {
  static constexpr int RUN = 32;
  struct Scales {
    Floats scale;
  };
  explicit I8Blocks(int inputs) : inputs_(inputs) {}
  int inputs() const { return inputs_; }
  int file_bytes() const { return 4 + inputs_; }
  int panel_bytes() const { return (4 + inputs_) * TILE_COLUMNS; }

  void put(const uint8_t* from, int column, uint8_t* to) const {
    std::memcpy(to + 4 * column, from, 4);
    for (int byte = 4; byte < file_bytes(); ++byte) to[byte * TILE_COLUMNS + column] = from[byte];
  }
  MEMBER Scales scales(const uint8_t* block, int, int at) const {
    return {load(reinterpret_cast<const float*>(block + 4 * at))};
  }
  MEMBER void decode(const uint8_t* block, int first, int at, const Scales& run, Floats* weights) const {
    const uint8_t* from = block + (4 + first) * TILE_COLUMNS + at;
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = to_floats(load_signed(from + i * TILE_COLUMNS)) * run.scale;
  }

 private:
  int inputs_;
};

// Call use(format) with the format's struct; `inputs` matters to U4 and I8 only.
template <class Use>
INLINE void with_format(int32_t format, int inputs, Use use) {
  switch (format) {
    case Q4_0: return use(Q4Blocks(inputs));
    case Q8_0: return use(Q8Blocks(inputs));
    case Q5_0: return use(Q5Blocks(inputs));
    case Q5_K: return use(Q5KBlocks(inputs));
    case Q4_K: return use(Q4KBlocks(inputs));
    case Q6_K: return use(Q6KBlocks(inputs));
    case U4: return use(U4Blocks(inputs));
    case I8: return use(I8Blocks(inputs));
  }
}

// ---------------------------------------------------------------------------------------- the product

// Decode inputs [first, first + count) of a panel: [count, TILE_COLUMNS]. Both are multiples of a run.
template <class Format>
__attribute__((noinline)) void decode_inputs(const Format& format, const uint8_t* panel, int first, int count, float* to) {
  constexpr int RUN = Format::RUN;
  for (int k = first; k < first + count; k += RUN) {
    const uint8_t* block = panel + static_cast<ptrdiff_t>(k / format.inputs()) * format.panel_bytes();
    const int in_block = k % format.inputs();
#pragma GCC unroll 4
    for (int j = 0; j < TILE_COLUMNS; j += LANES) {
      const auto scales = format.scales(block, in_block / RUN, j);
      for (int four = 0; four < RUN; four += 4) {
        Floats weights[4];
        format.decode(block, in_block + four, j, scales, weights);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) store(to + (k - first + four + i) * TILE_COLUMNS + j, weights[i]);
      }
    }
  }
}

constexpr int BLOCKS_AHEAD_BYTES = 2048;  // prefetch distance in a panel

// sums[PANELS][TILE_COLUMNS] = one row times some panels of the same format.
template <int PANELS, class Format>
__attribute__((noinline)) void multiply_row(const Format& format, const uint8_t* const* panels, const float* x, int num_in, float* sums) {
  constexpr int RUN = Format::RUN, VECTORS = PANELS * TILE_VECTORS;
  Floats sum[VECTORS] = {};
  const int runs = format.inputs() / RUN;
  ptrdiff_t place = 0;  // of the block in its panel
  for (int k = 0; k < num_in; place += format.panel_bytes()) {
    for (int run = 0; run < runs; ++run, k += RUN) {
#pragma GCC unroll 2
      for (int panel = 0; panel < PANELS; ++panel) {
        const uint8_t* next = panels[panel] + place + run * (format.panel_bytes() / runs) + BLOCKS_AHEAD_BYTES;
        for (int line = 0; line < format.panel_bytes() / runs; line += 64) __builtin_prefetch(next + line);
      }
      typename Format::Scales scales[VECTORS];
#pragma GCC unroll 8
      for (int v = 0; v < VECTORS; ++v)
        scales[v] = format.scales(panels[v / TILE_VECTORS] + place, run, v % TILE_VECTORS * LANES);
      for (int four = 0; four < RUN; four += 4)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; ++v) {
          Floats weights[4];
          format.decode(panels[v / TILE_VECTORS] + place, run * RUN + four, v % TILE_VECTORS * LANES, scales[v],
                        weights);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) sum[v] += weights[i] * x[k + four + i];
        }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < VECTORS; ++v) store(sums + v * LANES, sum[v]);
}

}  // namespace

void multiply_block_row(const BlockPanel* panels, bool is_pair, const float* x, int num_in, float* sums) {
  const uint8_t* blocks[] = {panels[0].blocks, is_pair ? panels[1].blocks : nullptr};
  with_format(panels->format, panels->inputs, [&](auto format) {
    if (is_pair) return multiply_row<2>(format, blocks, x, num_in, sums);
    multiply_row<1>(format, blocks, x, num_in, sums);
  });
}

void multiply_block_rows(const BlockPanel& panel, const float* x, int num_in, int rows, float* sums) {
  constexpr int CHUNK = 4096 / TILE_COLUMNS;  // inputs whose weights take 16 KiB: half of the L1 cache
  alignas(64) float weights[CHUNK * TILE_COLUMNS];
  for (int k = 0; k < num_in; k += CHUNK) {
    const int depth = std::min(CHUNK, num_in - k);
    with_format(panel.format, panel.inputs,
                [&](auto format) { decode_inputs(format, panel.blocks, k, depth, weights); });
    in_groups(rows, [&](auto size, int first) {
      panel_tile<size.value, 0>(x + static_cast<ptrdiff_t>(first) * num_in + k, num_in, weights, 0, weights, depth,
                                sums + first * TILE_COLUMNS, k > 0);
    });
  }
}

void unpack_block_row(const Linear& linear, int row, float* to) {
  const BlockPanel& panel = linear.panels[row / TILE_COLUMNS];
  alignas(64) float weights[32 * TILE_COLUMNS];
  with_format(panel.format, panel.inputs, [&](auto format) {
    for (int k = 0; k < linear.num_in; k += 32) {
      decode_inputs(format, panel.blocks, k, 32, weights);
      for (int i = 0; i < 32; ++i) to[k + i] = weights[i * TILE_COLUMNS + row % TILE_COLUMNS];
    }
  });
}

void decode_file_row(int32_t format_number, const uint8_t* rows, ptrdiff_t row, int num_in, float* to) {
  with_format(format_number, 0, [&](auto format) {
    const uint8_t* blocks = rows + row * (num_in / format.inputs()) * format.file_bytes();
    // A panel's block of which one column is used.
    alignas(64) uint8_t panel[(4 + 16 + 192) * TILE_COLUMNS] = {};
    alignas(64) float weights[32 * TILE_COLUMNS];
    for (int k = 0; k < num_in; k += 32) {
      if (k % format.inputs() == 0) format.put(blocks + k / format.inputs() * format.file_bytes(), 0, panel);
      decode_inputs(format, panel, k % format.inputs(), 32, weights);
      for (int i = 0; i < 32; ++i) to[k + i] = weights[i * TILE_COLUMNS];
    }
  });
}

// Return the bytes of a panel for each block of `inputs` inputs; format: a BlockFormat.
EXPORT int32_t triolet_block_panel_bytes(int32_t format, int32_t inputs) {
  int32_t bytes = 0;
  with_format(format, inputs, [&](auto blocks) { bytes = blocks.panel_bytes(); });
  return bytes;
}

// rows: [num_out, num_in / inputs] blocks as a file has them
EXPORT void triolet_pack_blocks(int32_t format, int32_t inputs, const uint8_t* rows, int32_t num_out, int32_t num_in,
                                int32_t gated, int32_t num_threads, uint8_t* packed) {
  with_format(format, inputs, [&](auto blocks) {
    pack_blocks(blocks, rows, num_out, num_in, gated, num_threads, packed);
  });
}
