// Products with packed matrices, the encoding of what they read, and single rows of them.
//
// Theory of operation.
// - A product is cut into register tiles of R rows and P panels. A tile walks the columns from first to last and
//   keeps its R x P vectors of sums in registers; what it does for one output, and in which order, is the same for
//   all R and P.
// - Few rows are bound by reading weights: they take several panels in lockstep, which gives the memory several
//   streams and the arithmetic independent chains. Many rows are bound by arithmetic: a weight is unpacked once
//   for all rows of a tile.
// - Integers: per block of kBlock columns the products are summed exactly in 32 bits, offset included; that sum,
//   as float, times (weight scale * activation scale) is added to the float sum, and then, where there are mins,
//   min * (activation scale * sum of the block's activations). 16-bit activations take the same steps with
//   256 * (sum over high parts) + (sum over low parts), which is still exact.
// - Floats: weights are widened and multiplied column by column, one fused sum per output.

#define UNROLL _Pragma("GCC unroll 16")

// How rows are cut: 8, 6, 4, 2, 1 from the variant's kTileRows on.
constexpr int next_tile_rows(int rows) { return rows > 2 ? rows - 2 : 1; }

// Cover all rows and panels with tiles that `Kernel` has. Kernel: panels_of(rows), and run<rows, panels>(row, panel),
// both counted from the first of the call.
template <int kRows, int kPanels, class Kernel>
inline void cut_panels(const Kernel& kernel, int row, int panel) {
  for (; panel + kPanels <= kernel.num_panels; panel += kPanels) kernel.template run<kRows, kPanels>(row, panel);
  if constexpr (kPanels > 1) cut_panels<kRows, kPanels / 2>(kernel, row, panel);
}
template <int kRows, class Kernel>
inline void cut_rows(const Kernel& kernel, int row) {
  for (; row + kRows <= kernel.num_rows; row += kRows)
    cut_panels<kRows, Kernel::panels_of(kRows)>(kernel, row, 0);
  if constexpr (kRows > 1) cut_rows<next_tile_rows(kRows)>(kernel, row);
}

// ---- integers ---------------------------------------------------------------------------------------------

constexpr int kWords = kBlock / 4;  // of a block: four codes, or four activations, each

template <bool kFourBits>
inline void load_codes(const uint8_t* block, Bytes (&codes)[kWords]) {
  UNROLL for (int j = 0; j < kWords / 2; ++j) {
    if constexpr (kFourBits) {
      const Bytes both = load_bytes(block + 64 * j);
      codes[j] = low_nibbles(both);
      codes[j + kWords / 2] = high_nibbles(both);
    } else {
      codes[j] = load_bytes(block + 64 * j);
      codes[j + kWords / 2] = load_bytes(block + 64 * (j + kWords / 2));
    }
  }
}

template <bool kFourBits>
inline I32 dot_block(I32 sum, const Bytes (&codes)[kWords], const int8_t* activations) {
  return kFourBits ? dot_nibbles(sum, codes, activations) : dot_bytes(sum, codes, activations);
}

template <bool kFourBits, bool kMins, bool kWide>
struct QuantizedKernel {
  const Matrix& matrix;
  const Encoded& x;
  int first_row, num_rows, first_panel, num_panels;
  float* tile;

  static constexpr int panels_of(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

  template <int kRows, int kPanels>
  __attribute__((noinline)) void run(int row, int panel) const {
    const int num_blocks = matrix.columns / kBlock;
    const int64_t codes_bytes = kFourBits ? 16 * kLanes : 32 * kLanes;
    const uint8_t* codes[kPanels];
    const uint16_t *scales[kPanels], *mins[kPanels];
    for (int p = 0; p < kPanels; ++p) {
      const int64_t index = first_panel + panel + p;
      codes[p] = matrix.codes + index * matrix.codes_stride;
      scales[p] = matrix.scales + index * num_blocks * kLanes;
      if constexpr (kMins) mins[p] = matrix.mins + index * num_blocks * kLanes;
    }
    const int64_t x_row = first_row + row;
    const int8_t* high = x.high + x_row * x.columns;
    const int8_t* low = kWide ? x.low + x_row * x.columns : nullptr;
    const float* x_scales = x.scales + x_row * num_blocks;
    const int32_t* x_sums = x.code_sums + x_row * num_blocks;

    F32 sums[kRows][kPanels];
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int p = 0; p < kPanels; ++p) sums[r][p] = splat(0.0f);

    for (int begin = 0; begin < num_blocks; begin += kLanes) {
      // What an output's min, or its offset, is multiplied with: for several blocks at a time, that is cheaper.
      const int count = num_blocks - begin < kLanes ? num_blocks - begin : kLanes;
      alignas(64) float of_mins[kRows][kLanes];
      alignas(64) int32_t of_offset[kRows][kLanes];
      for (int r = 0; r < kRows; ++r)
        for (int i = 0; i < count; ++i) {
          const int64_t at = int64_t{r} * num_blocks + begin + i;
          if constexpr (kMins) of_mins[r][i] = x_scales[at] * static_cast<float>(x_sums[at]);
          if constexpr (!kMins) of_offset[r][i] = -matrix.offset * x_sums[at];
        }

      for (int i = 0; i < count; ++i) {
        const int64_t b = begin + i;
        UNROLL for (int p = 0; p < kPanels; ++p) {
          Bytes block[kWords];
          load_codes<kFourBits>(codes[p] + b * codes_bytes, block);
          const F32 scale = load_half(scales[p] + b * kLanes);
          F32 min;
          if constexpr (kMins) min = load_half(mins[p] + b * kLanes);
          UNROLL for (int r = 0; r < kRows; ++r) {
            const int64_t at = int64_t{r} * x.columns + b * kBlock;
            I32 total = splat(kMins ? 0 : of_offset[r][i]);
            if constexpr (kWide) {
              total = dot_block<kFourBits>(total, block, low + at);
              total = total + shift_left<8>(dot_block<kFourBits>(splat(0), block, high + at));
            } else {
              total = dot_block<kFourBits>(total, block, high + at);
            }
            const F32 both = scale * splat(x_scales[int64_t{r} * num_blocks + b]);
            sums[r][p] = fma(to_float(total), both, sums[r][p]);
            if constexpr (kMins) sums[r][p] = fma(min, splat(of_mins[r][i]), sums[r][p]);
          }
        }
      }
    }
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int p = 0; p < kPanels; ++p)
        store(tile + (int64_t{row + r} * num_panels + panel + p) * kLanes, sums[r][p]);
  }
};

template <bool kFourBits>
inline void multiply_quantized(const Matrix& m, const Encoded& x, int row, int num_rows, int panel, int num_panels,
                               float* tile) {
  auto with = [&](auto kernel) { cut_rows<kTileRows>(kernel, 0); };
  if (m.mins && x.low) with(QuantizedKernel<kFourBits, true, true>{m, x, row, num_rows, panel, num_panels, tile});
  if (m.mins && !x.low) with(QuantizedKernel<kFourBits, true, false>{m, x, row, num_rows, panel, num_panels, tile});
  if (!m.mins && x.low) with(QuantizedKernel<kFourBits, false, true>{m, x, row, num_rows, panel, num_panels, tile});
  if (!m.mins && !x.low) with(QuantizedKernel<kFourBits, false, false>{m, x, row, num_rows, panel, num_panels, tile});
}

// ---- floats -----------------------------------------------------------------------------------------------

template <Form kForm>
inline F32 load_weights(const uint8_t* panel, int64_t column) {
  if constexpr (kForm == Form::F32) return load(reinterpret_cast<const float*>(panel) + column * kLanes);
  const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel) + column * kLanes;
  if constexpr (kForm == Form::F16) return load_half(halves);
  return load_bf16(halves);
}

template <Form kForm>
struct FloatKernel {
  const Matrix& matrix;
  const float* x;
  int first_row, num_rows, first_panel, num_panels;
  float* tile;

  // Sums enough to keep the multipliers busy, and no more than the registers hold.
  static constexpr int panels_of(int rows) {
    return rows >= 6 ? 1 : 4 * rows <= kTileSums ? 4 : 2 * rows <= kTileSums ? 2 : 1;
  }

  template <int kRows, int kPanels>
  __attribute__((noinline)) void run(int row, int panel) const {
    const uint8_t* weights[kPanels];
    for (int p = 0; p < kPanels; ++p)
      weights[p] = matrix.codes + int64_t{first_panel + panel + p} * matrix.codes_stride;
    const int64_t columns = matrix.columns;
    const float* rows = x + int64_t{first_row + row} * columns;

    F32 sums[kRows][kPanels];
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int p = 0; p < kPanels; ++p) sums[r][p] = splat(0.0f);
    for (int64_t c = 0; c < columns; ++c) {
      F32 w[kPanels];
      UNROLL for (int p = 0; p < kPanels; ++p) w[p] = load_weights<kForm>(weights[p], c);
      UNROLL for (int r = 0; r < kRows; ++r) {
        const F32 value = splat(rows[r * columns + c]);
        UNROLL for (int p = 0; p < kPanels; ++p) sums[r][p] = fma(value, w[p], sums[r][p]);
      }
    }
    UNROLL for (int r = 0; r < kRows; ++r)
      UNROLL for (int p = 0; p < kPanels; ++p)
        store(tile + (int64_t{row + r} * num_panels + panel + p) * kLanes, sums[r][p]);
  }
};

void linear(const Matrix& m, const Input& in, int row, int num_rows, int panel, int num_panels, float* tile) {
  auto floats = [&](auto kernel) { cut_rows<kTileRows>(kernel, 0); };
  switch (m.form) {
    case Form::F32: return floats(FloatKernel<Form::F32>{m, in.rows, row, num_rows, panel, num_panels, tile});
    case Form::F16: return floats(FloatKernel<Form::F16>{m, in.rows, row, num_rows, panel, num_panels, tile});
    case Form::BF16: return floats(FloatKernel<Form::BF16>{m, in.rows, row, num_rows, panel, num_panels, tile});
    case Form::Q8: return multiply_quantized<false>(m, in.encoded, row, num_rows, panel, num_panels, tile);
    case Form::Q4: return multiply_quantized<true>(m, in.encoded, row, num_rows, panel, num_panels, tile);
  }
}

// ---- activations as integers --------------------------------------------------------------------------------

// A block is scaled so that its largest magnitude becomes 127, or 127 * 256. Blocks below kTiny, where the inverse
// of a scale would overflow, count as zeros; one with a NaN or an infinity gets the scale NaN, and so does every
// output that reads it.
constexpr float kTiny = 0x1p-110f, kHuge = 0x1.fffffep+127f;

inline void encode_block(const float* x, int8_t* high, int8_t* low, float* scale, int32_t* code_sum) {
  const float largest_code = low ? 127.0f * 256.0f : 127.0f;
  const F32 x0 = load(x), x1 = load(x + kLanes);
  const F32 a0 = abs(x0), a1 = abs(x1);
  const bool finite = (not_less(splat(kHuge), a0) & not_less(splat(kHuge), a1)) == 0xffff;
  const float amax = largest(max(a0, a1));
  const bool usable = finite && amax >= kTiny;
  const F32 inverse = splat(usable ? largest_code / amax : 0.0f);
  *scale = usable ? amax / largest_code : finite ? 0.0f : __builtin_nanf("");
  I32 c0 = splat(0), c1 = splat(0);
  if (usable) {
    c0 = round_to_int(x0 * inverse);
    c1 = round_to_int(x1 * inverse);
  }
  *code_sum = sum(c0 + c1);
  if (low) {  // c = 256 * h + l with l in [-128, 127]
    const I32 h0 = shift_right<8>(c0 + splat(128)), h1 = shift_right<8>(c1 + splat(128));
    store_low_bytes(high, h0);
    store_low_bytes(high + kLanes, h1);
    store_low_bytes(low, c0);
    store_low_bytes(low + kLanes, c1);
  } else {
    store_low_bytes(high, c0);
    store_low_bytes(high + kLanes, c1);
  }
}

void encode(const float* x, int count, const Encoded& out, int row, int column) {
  const int64_t num_blocks = out.columns / kBlock;
  for (int i = 0; i < count; i += kBlock) {
    const int64_t at = int64_t{row} * out.columns + column + i;
    const int64_t block = row * num_blocks + (column + i) / kBlock;
    encode_block(x + i, out.high + at, out.low ? out.low + at : nullptr, out.scales + block, out.code_sums + block);
  }
}

// ---- one row -------------------------------------------------------------------------------------------------

// A lane of 16 half floats.
inline float lane_of_half(const uint16_t* halves, int lane) {
  alignas(64) float values[kLanes];
  store(values, load_half(halves));
  return values[lane];
}

void embed(const Matrix& m, int row, float* out) {
  const int64_t panel = row / kLanes;
  const int lane = row % kLanes;
  const uint8_t* codes = m.codes + panel * m.codes_stride;
  if (m.form == Form::F32) {
    const float* weights = reinterpret_cast<const float*>(codes);
    for (int64_t c = 0; c < m.columns; ++c) out[c] = weights[c * kLanes + lane];
    return;
  }
  if (m.form == Form::F16) {
    for (int64_t c = 0; c < m.columns; ++c)
      out[c] = lane_of_half(reinterpret_cast<const uint16_t*>(codes) + c * kLanes, lane);
    return;
  }
  if (m.form == Form::BF16) {
    for (int64_t c = 0; c < m.columns; ++c) {
      const uint32_t bits = uint32_t{reinterpret_cast<const uint16_t*>(codes)[c * kLanes + lane]} << 16;
      __builtin_memcpy(out + c, &bits, 4);
    }
    return;
  }
  const bool four_bits = m.form == Form::Q4;
  const int64_t num_blocks = m.columns / kBlock;
  for (int64_t b = 0; b < num_blocks; ++b) {
    const uint8_t* block = codes + b * (four_bits ? 16 : 32) * kLanes + 4 * lane;
    const int64_t at = (panel * num_blocks + b) * kLanes;
    const float scale = lane_of_half(m.scales + at, lane);
    const float min = m.mins ? lane_of_half(m.mins + at, lane) : 0.0f;
    for (int i = 0; i < kBlock; ++i) {
      const int k = four_bits ? i % 16 : i;
      const uint8_t byte = block[k / 4 * 64 + k % 4];
      const int code = four_bits ? (i < 16 ? byte & 15 : byte >> 4) : byte;
      out[b * kBlock + i] = m.mins ? scale * static_cast<float>(code) + min
                                   : scale * static_cast<float>(code - m.offset);
    }
  }
}

#undef UNROLL
