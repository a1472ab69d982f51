// Products with packed matrices, the encoding of what they read, and single rows of them.
//
// Theory of operation.
// - A product is cut into register tiles of some rows and one panel. A tile walks the columns from first to
//   last and keeps its sums in registers; what is done for one output, and in which order, is the same in all
//   tiles.
// - Many rows are bound by arithmetic: a weight is unpacked once for all rows of a tile. Few rows are bound
//   by reading weights, which is fastest where planes are read as they lie, panel after panel, a page ahead.
// - Integers: per group of columns with a scale the products are summed exactly in 32 bits, offset included;
//   that sum, as float, times (weight scale * activation scale) is added to the float sum, and then, where
//   there are mins, min * (activation scale * sum of the group's activations). 16-bit activations take the
//   same steps with 256 * (sum over high parts) + (sum over low parts), which is still exact.
// - What bounds many rows is how many instructions want the multipliers: eight for a block of a row's products, one or
//   two for its sums. The product of the two scales is made without them (RecordTail), the rows of a pair take turns.
// - Floats: weights are widened and multiplied column by column; even and odd columns have a fused sum each.
// - Pairs: where activations may be rounded to bf16, and weights are, one instruction multiplies two columns and adds
//   both products to a sum in fp32: twice the rate of floats. Even and odd pairs of columns have a sum each.

#define UNROLL _Pragma("GCC unroll 16")

constexpr int kAhead = 4096;  // bytes of codes between what is asked for and what is used

// How rows are cut: 8, 6, 4, 3, 2, 1 from what the variant's registers hold. `Kernel` has run<rows>(row) for
// all of its panels, rows counted from the first of the call. Only the first and the last tile may have an odd
// number of rows, so that a tile of several begins with a pair (see Encoded).
constexpr int next_tile_rows(int rows) { return rows > 4 ? rows - 2 : rows - 1; }

template <int kRows, class Kernel>
inline void cut_even_rows(const Kernel& kernel, int row) {
  for (; row + kRows <= kernel.call.num_rows; row += kRows) kernel.template run<kRows>(row);
  if constexpr (kRows > 1) cut_even_rows<next_tile_rows(kRows)>(kernel, row);
}

template <int kRows, class Kernel>
inline void cut_rows(const Kernel& kernel) {
  const int row = kernel.call.first_row % kPair;
  if (row) kernel.template run<1>(0);
  cut_even_rows<kRows>(kernel, row);
}

// What a call of linear() covers.
struct Call {
  const Matrix& matrix;
  int first_row, num_rows, first_panel, num_panels;
  const Output& out;

  float* place(int row, int panel) const { return out.at + row * out.pitch + panel * kLanes; }

  // Sums go where others' results lie that were written long ago: asked for before they are computed.
  template <int kRows>
  void foresee(int row, int panel) const {
    UNROLL for (int r = 0; r < kRows; ++r) __builtin_prefetch(place(row + r, panel), 1);
  }

  template <int kRows>
  void keep(const F32 (&sums)[kRows], int row, int panel) const {
    const int num_lanes = matrix.rows - (first_panel + panel) * kLanes;
    if (num_lanes < kLanes) return keep_lanes(sums, row, panel, first_lanes(num_lanes));
    if (out.add) {
      UNROLL for (int r = 0; r < kRows; ++r) store(place(row + r, panel), load(place(row + r, panel)) + sums[r]);
    } else {
      UNROLL for (int r = 0; r < kRows; ++r) store(place(row + r, panel), sums[r]);
    }
  }

 private:
  template <int kRows>
  void keep_lanes(const F32 (&sums)[kRows], int row, int panel, Mask lanes) const {
    for (int r = 0; r < kRows; ++r) {
      float* at = place(row + r, panel);
      store_masked(lanes, at, out.add ? load_masked(lanes, at) + sums[r] : sums[r]);
    }
  }
};

// ---- integers --------------------------------------------------------------------------------------------

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

// kGroups: scales per block.
template <bool kFourBits, bool kMins, bool kWide, int kGroups>
struct QuantizedKernel {
  const Matrix& matrix;
  const Encoded& x;
  Call call;

  static constexpr int kCodesBytes = (kFourBits ? kBlock / 2 : kBlock) * kLanes;  // of a panel's block

  template <int kRows>
  void run(int row) const {
    for (int panel = 0; panel < call.num_panels; ++panel) run<kRows>(row, panel);
  }

  template <int kRows>
  __attribute__((noinline)) void run(int row, int panel) const {
    const int num_blocks = matrix.columns / kBlock, x_row = call.first_row + row;
    const int64_t index = call.first_panel + panel, scales_at = index * num_blocks * kGroups * kLanes;
    const uint8_t* codes = matrix.codes + index * matrix.codes_stride;
    const uint16_t *scales = matrix.scales + scales_at, *mins = kMins ? matrix.mins + scales_at : nullptr;
    const uint8_t* records[(kRows + 1) / kPair];
    UNROLL for (int i = 0; i < (kRows + 1) / kPair; ++i) records[i] =
        x.records + (x_row / kPair + i) * int64_t{num_blocks} * kRecordBytes;

    call.foresee<kRows>(row, panel);
    Sums<kRows> sums;
    for (int b = 0; b < num_blocks; ++b) {
      Bytes block[kWords];
      load_codes<kFourBits>(codes, block);
      UNROLL for (int i = 0; i < kCodesBytes; i += 64) __builtin_prefetch(codes + kAhead + i);
      UNROLL for (int g = 0; g < kGroups; ++g) {
        Group group{block, g, load_half(scales + g * kLanes), {}};
        __builtin_prefetch(scales + (g + kScalesAhead) * kLanes);
        if constexpr (kMins) {
          group.min = load_half(mins + g * kLanes);
          __builtin_prefetch(mins + (g + kScalesAhead) * kLanes);
        }
        UNROLL for (int i = 0; i < kRows / kPair; ++i) add<kPair>(sums, i * kPair, group, records[i], 0);
        // A tile of more rows than one begins with a pair.
        if constexpr (kRows % kPair)
          add<1>(sums, kRows - 1, group, records[kRows / kPair], kRows == 1 ? x_row % kPair : 0);
      }
      codes += kCodesBytes;
      scales += kGroups * kLanes;
      if constexpr (kMins) mins += kGroups * kLanes;
      UNROLL for (int i = 0; i < (kRows + 1) / kPair; ++i) records[i] += kRecordBytes;
    }
    sums.spoil();
    call.keep(sums.at, row, panel);
  }

 private:
  static constexpr int kRecordBytes = record_bytes(kWide);
  static constexpr int kScalesAhead = kAhead / kCodesBytes * kGroups;
  // A NaN among the scales of activations reaches sums by way of the mins, or of the scales, or has to be brought.
  static constexpr bool kBringsNan = kScalesLoseNan && !kMins;

  // Weights of a panel that share a scale.
  struct Group {
    const Bytes* block;
    int number;  // in the block
    F32 scale, min;
  };

  template <int kRows>
  struct Sums {
    Sums() {
      UNROLL for (int r = 0; r < kRows; ++r) at[r] = splat(0.0f);
    }
    void spoil() {
      if constexpr (kBringsNan)
        UNROLL for (int r = 0; r < kRows; ++r) at[r] = fma(splat(scales[r]), splat(0.0f), at[r]);
    }
    F32 at[kRows];
    float scales[kBringsNan ? kRows : 1] = {};  // the sum of all
  };

  // To the sums from `r` on: a group times kSides rows of a record, from `side` on.
  template <int kSides, int kRows>
  inline __attribute__((always_inline)) void add(Sums<kRows>& sums, int r, const Group& group, const uint8_t* record,
                                                 int side) const {
    const auto* tail = reinterpret_cast<const RecordTail*>(record + codes_bytes(kWide));
    I32 totals[kSides];
    UNROLL for (int i = 0; i < kSides; ++i) totals[i] =
        splat(kMins ? 0 : -matrix.offset * sum_of_group(tail->half_sums[side + i], group.number));
    multiply(totals, group, reinterpret_cast<const int8_t*>(record) + side * kBlock);
    UNROLL for (int i = 0; i < kSides; ++i) {
      F32& sum = sums.at[r + i];
      sum = fma(to_float(totals[i]), times_scale(group.scale, tail->scales[side + i], tail->powers[side + i]), sum);
      if constexpr (kMins) sum = fma(group.min, splat(tail->sums[side + i]), sum);
      if constexpr (kBringsNan) sums.scales[r + i] += tail->scales[side + i];
    }
  }

  // To the totals: the products with rows whose high parts begin at `high`.
  template <int kSides>
  static void multiply(I32 (&totals)[kSides], const Group& group, const int8_t* high) {
    const int8_t* x = high + group.number * (kBlock / kGroups);
    if constexpr (kWide) {
      I32 sums[kSides];
      UNROLL for (int i = 0; i < kSides; ++i) sums[i] = splat(0);
      dot(sums, group, x);
      dot(totals, group, x + kPair * kBlock);
      UNROLL for (int i = 0; i < kSides; ++i) totals[i] = totals[i] + shift_left<8>(sums[i]);
    } else {
      dot(totals, group, x);
    }
  }

  template <int kSides>
  static void dot(I32 (&sums)[kSides], const Group& group, const int8_t* x) {
    constexpr int kGroupWords = kWords / kGroups;
    const Bytes* codes = group.block + group.number * kGroupWords;
    if constexpr (kFourBits) {
      dot_nibbles<kGroupWords>(sums, codes, x, kBlock);
    } else {
      dot_bytes<kGroupWords>(sums, codes, x, kBlock);
    }
  }

  static int32_t sum_of_group(const int32_t (&half_sums)[kBlock / kGroup], int group) {
    return kGroups == 2 ? half_sums[group] : half_sums[0] + half_sums[1];
  }
};

template <bool kFourBits, bool kMins, int kGroups = 1>
inline void multiply_quantized(const Matrix& m, const Encoded& x, const Call& call) {
  if (x.wide) return cut_rows<kTileRows>(QuantizedKernel<kFourBits, kMins, true, kGroups>{m, x, call});
  cut_rows<kTileRows>(QuantizedKernel<kFourBits, kMins, false, kGroups>{m, x, call});
}

// ---- floats ----------------------------------------------------------------------------------------------

// Even and odd columns, or pairs of them, are summed apart, so that one row alone keeps two sums in the works.
constexpr int kChains = 2;

template <Form kForm>
constexpr int kColumnBytes = kLanes * (kForm == Form::F32 ? 4 : 2);

// The weights of column c + i of a panel, for an even c and an i below kChains.
template <Form kForm>
inline F32 load_weights(const uint8_t* panel, int64_t c, int i) {
  if constexpr (kForm == Form::BF16) return load_bf16(panel + c * kColumnBytes<kForm>, i);
  const uint8_t* p = panel + (c + i) * kColumnBytes<kForm>;
  if constexpr (kForm == Form::F32) return load(reinterpret_cast<const float*>(p));
  return load_half(reinterpret_cast<const uint16_t*>(p));
}

template <Form kForm>
struct FloatKernel {
  const Matrix& matrix;
  const float* x;
  Call call;

  template <int kRows>
  void run(int row) const {
    for (int panel = 0; panel < call.num_panels; ++panel) run<kRows>(row, panel);
  }

  template <int kRows>
  __attribute__((noinline)) void run(int row, int panel) const {
    const int64_t columns = matrix.columns, even_columns = columns / kChains * kChains;
    const uint8_t* weights = matrix.codes + int64_t{call.first_panel + panel} * matrix.codes_stride;
    const float* rows = x + int64_t{call.first_row + row} * columns;
    call.foresee<kRows>(row, panel);
    F32 sums[kRows][kChains];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int i = 0; i < kChains; ++i) sums[r][i] = splat(0.0f);
    for (int64_t c = 0; c < even_columns; c += kChains) {
      for (int i = 0; i < kChains * kColumnBytes<kForm>; i += 64)
        __builtin_prefetch(weights + c * kColumnBytes<kForm> + i + kAhead);
      UNROLL for (int i = 0; i < kChains; ++i) {
        const F32 w = load_weights<kForm>(weights, c, i);
        UNROLL for (int r = 0; r < kRows; ++r) sums[r][i] =
            fma(splat(rows[r * columns + c + i]), w, sums[r][i]);
      }
    }
    if (even_columns < columns) {
      const F32 w = load_weights<kForm>(weights, even_columns, 0);
      UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] =
          fma(splat(rows[r * columns + even_columns]), w, sums[r][0]);
    }
    F32 both[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) both[r] = sums[r][0] + sums[r][1];
    call.keep(both, row, panel);
  }
};

template <Form kForm>
inline void multiply_floats(const Matrix& m, const float* x, const Call& call) {
  cut_rows<kTileSums / kChains>(FloatKernel<kForm>{m, x, call});
}

// ---- pairs -----------------------------------------------------------------------------------------------

#ifdef BF16_TARGET
struct PairsKernel {
  const Matrix& matrix;
  const Rounded& x;
  Call call;

  template <int kRows>
  void run(int row) const {
    for (int panel = 0; panel < call.num_panels; ++panel) run<kRows>(row, panel);
  }

  template <int kRows>
  BF16_TARGET __attribute__((noinline)) void run(int row, int panel) const {
    const int64_t pairs = x.pitch() / 2, even_pairs = pairs / kChains * kChains;
    const uint8_t* weights = matrix.codes + int64_t{call.first_panel + panel} * matrix.codes_stride;
    const float* rows = reinterpret_cast<const float*>(x.rows) + int64_t{call.first_row + row} * pairs;
    call.foresee<kRows>(row, panel);
    F32 sums[kRows][kChains];
    UNROLL for (int r = 0; r < kRows; ++r) UNROLL for (int i = 0; i < kChains; ++i) sums[r][i] = splat(0.0f);
    for (int64_t p = 0; p < even_pairs; p += kChains) {
      UNROLL for (int i = 0; i < kChains; ++i) {
        __builtin_prefetch(weights + (p + i) * kPairBytes + kAhead);
        const Pairs w = load_pairs(weights + (p + i) * kPairBytes);
        UNROLL for (int r = 0; r < kRows; ++r) sums[r][i] =
            dot_pairs(sums[r][i], w, splat_pair(rows + r * pairs + p + i));
      }
    }
    if (even_pairs < pairs) {
      const Pairs w = load_pairs(weights + even_pairs * kPairBytes);
      UNROLL for (int r = 0; r < kRows; ++r) sums[r][0] =
          dot_pairs(sums[r][0], w, splat_pair(rows + r * pairs + even_pairs));
    }
    F32 both[kRows];
    UNROLL for (int r = 0; r < kRows; ++r) both[r] = sums[r][0] + sums[r][1];
    call.keep(both, row, panel);
  }

 private:
  static constexpr int kPairBytes = 2 * kColumnBytes<Form::BF16>;  // of a panel
};

inline void multiply_pairs(const Matrix& m, const Rounded& x, const Call& call) {
  cut_rows<kPairsTileRows>(PairsKernel{m, x, call});
}
#else
inline void multiply_pairs(const Matrix&, const Rounded&, const Call&) {}  // nothing is rounded: see has_bf16
#endif

void linear(const Matrix& m, const Input& in, int row, int num_rows, int panel, int num_panels, const Output& out) {
  const Call call{m, row, num_rows, panel, num_panels, out};
  const Encoded& x = in.encoded;
  switch (m.form) {
    case Form::F32:
      return multiply_floats<Form::F32>(m, in.rows, call);
    case Form::F16:
      return multiply_floats<Form::F16>(m, in.rows, call);
    case Form::BF16:
      return in.rounded.rows ? multiply_pairs(m, in.rounded, call) : multiply_floats<Form::BF16>(m, in.rows, call);
    case Form::Q8:
      if (m.group == kGroup) return multiply_quantized<false, false, 2>(m, x, call);
      return m.mins ? multiply_quantized<false, true>(m, x, call)
                    : multiply_quantized<false, false>(m, x, call);
    case Form::Q4:
      return m.mins ? multiply_quantized<true, true>(m, x, call)
                    : multiply_quantized<true, false>(m, x, call);
  }
}

// ---- activations as integers -----------------------------------------------------------------------------

// A block's scale is the least by which no code is beyond 127, or 127 * 256, of those between two powers of two that
// differ from one of them by one of a few others: 32, 33, 34, 36, 40, 48, 56, 60, 62 or 63 32nds of a power. What codes
// are rounded by is 6 % more in the mean than with the largest one always 127.
//
// Blocks below kTiny count as zeros; one with a number beyond kHuge, or none, gets the scale NaN, and so does every
// output that reads it. Between the two all products of a weight's scale and a power are normal numbers.
constexpr float kTiny = 0x1p-80f, kHuge = 0x1p+116f;
constexpr int kSteps = 32, kStepBits = 5, kMantissaBits = 23;

struct Scale {
  float scale, inverse;
  uint32_t powers[2];
};

struct ScaleSteps {
  // From 1 up to 2: the i-th is the least scale not less than 1 + i / 32.
  Scale of[kSteps];

  constexpr ScaleSteps() : of{} {
    for (int i = 0; i < kSteps; ++i) of[i] = i > kSteps / 2 ? below_two(i) : above_one(i);
  }

 private:
  static constexpr uint32_t exponent(int power) { return static_cast<uint32_t>(power) << kMantissaBits; }
  static constexpr int round_up_to_power(int i) {
    int power = 0;
    while (1 << power < i) ++power;
    return power;
  }
  static constexpr Scale above_one(int i) {  // 1 + 2^k / 32, or 1/2 + 1/2
    if (i == 0) return {1.0f, 1.0f, {exponent(-1), exponent(-1)}};
    const int k = round_up_to_power(i);
    const float scale = 1.0f + static_cast<float>(1 << k) / kSteps;
    return {scale, 1.0f / scale, {0, exponent(k - kStepBits)}};
  }
  static constexpr Scale below_two(int i) {  // 2 - 2^k / 32: the other power's sign is turned
    int k = kStepBits - 1;
    while (1 << k > kSteps - i) --k;
    const float scale = 2.0f - static_cast<float>(1 << k) / kSteps;
    return {scale, 1.0f / scale, {exponent(1), exponent(k - kStepBits) ^ 1u << 31}};
  }
};

// The least scale that is not less than x, or by one rounding less. For positive normal numbers.
inline Scale scale_of(float x) {
  static constexpr ScaleSteps kScaleSteps;
  constexpr int kBelowSteps = kMantissaBits - kStepBits;
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  bits += (1 << kBelowSteps) - 1;
  const Scale& step = kScaleSteps.of[bits >> kBelowSteps & (kSteps - 1)];
  const uint32_t exponent = (bits >> kMantissaBits << kMantissaBits) - (127 << kMantissaBits);
  const auto times_power = [](float y, uint32_t power) {
    uint32_t product;
    __builtin_memcpy(&product, &y, 4);
    product += power;
    __builtin_memcpy(&y, &product, 4);
    return y;
  };
  return {times_power(step.scale, exponent), times_power(step.inverse, -exponent),
          {step.powers[0] + exponent, step.powers[1] + exponent}};
}

// `amax`: the largest magnitude of the block.
template <bool kWide>
inline void encode_block(const float* x, float amax, uint8_t* record, int side) {
  constexpr float kLargestCode = kWide ? 127.0f * 256.0f : 127.0f;
  auto* high = reinterpret_cast<int8_t*>(record) + side * kBlock;
  auto* tail = reinterpret_cast<RecordTail*>(record + codes_bytes(kWide));
  const F32 x0 = load(x), x1 = load(x + kLanes);
  const bool finite = amax <= kHuge, usable = finite && amax >= kTiny;
  Scale scale{finite ? 0.0f : __builtin_nanf(""), 0.0f, {0, 0}};
  I32 c0 = splat(0), c1 = splat(0);
  if (usable) {
    scale = scale_of(amax * (1.0f / kLargestCode));
    c0 = round_to_int(x0 * splat(scale.inverse));
    c1 = round_to_int(x1 * splat(scale.inverse));
  }
  int32_t(&sums)[2] = tail->half_sums[side];
  float total;
  if constexpr (kWide) {  // c = 256 * h + l with l in [-128, 127]
    int8_t* low = high + kPair * kBlock;
    store_low_bytes(high, shift_right<8>(c0 + splat(128)));
    store_low_bytes(high + kLanes, shift_right<8>(c1 + splat(128)));
    store_low_bytes(low, c0);
    store_low_bytes(low + kLanes, c1);
    sums[0] = sum(c0);
    sums[1] = sum(c1);
    total = static_cast<float>(sums[0] + sums[1]);
  } else {
    total = store_summed_bytes(high, c0, c1, sums);
  }
  tail->scales[side] = scale.scale;
  tail->sums[side] = scale.scale * total;
  tail->powers[side][0] = scale.powers[0];
  tail->powers[side][1] = scale.powers[1];
}

// Where the blocks of some rows are read and written, one after the other.
template <bool kWide>
class Blocks {
 public:
  Blocks(const Rows& rows, const Encoded& out, int row, int column)
      : rows_(rows), out_(out), row_(row), column_(column), x(rows.at) {
    begin_row();
  }
  void next() {
    x += kBlock;
    record += record_bytes(kWide);
    if (x < end_) return;
    x += rows_.pitch - rows_.columns;
    ++row_;
    begin_row();
  }

 private:
  void begin_row() {
    end_ = x + rows_.columns;
    side = row_ % kPair;
    record = out_.records +
             (int64_t{row_ / kPair} * (out_.columns / kBlock) + column_ / kBlock) * record_bytes(kWide);
  }
  const Rows& rows_;
  const Encoded& out_;
  int row_, column_;
  const float* end_;

 public:
  const float* x;
  uint8_t* record;
  int side;
};

// From the largest magnitude to the codes is a long way. It is gone for many blocks at a time, or the processor, which
// sees four blocks ahead, would wait for most of it.
template <bool kWide>
inline void encode_blocks(const Rows& rows, const Encoded& out, int row, int column) {
  constexpr int kBatch = 24;
  float largest[kBatch];
  Blocks<kWide> ahead(rows, out, row, column), block = ahead;
  for (int rest = rows.count * (rows.columns / kBlock); rest > 0; rest -= kBatch) {
    const int count = rest < kBatch ? rest : kBatch;
    for (int i = 0; i < count; ++i, ahead.next())
      largest[i] = largest_magnitude(load(ahead.x), load(ahead.x + kLanes));
    for (int i = 0; i < count; ++i, block.next()) encode_block<kWide>(block.x, largest[i], block.record, block.side);
  }
}

void encode(const Rows& rows, const Encoded& out, int row, int column) {
  const auto blocks = out.wide ? encode_blocks<true> : encode_blocks<false>;
  blocks(rows, out, row, column);
}

// ---- activations rounded ---------------------------------------------------------------------------------

inline void round_row(const float* x, int count, uint16_t* to) {
  for (; count >= kLanes; count -= kLanes, x += kLanes, to += kLanes) store_bf16(to, load(x));
  if (count == 0) return;
  uint16_t last[kLanes];
  store_bf16(last, load_masked(first_lanes(count), x));
  __builtin_memcpy(to, last, sizeof(uint16_t) * count);
}

void round_to_bf16(const Rows& rows, const Rounded& out, int row, int column) {
  for (int r = 0; r < rows.count; ++r)
    round_row(rows.at + r * rows.pitch, rows.columns, out.rows + (row + r) * out.pitch() + column);
}

// ---- one row ---------------------------------------------------------------------------------------------

inline float lane_of(F32 vector, int lane) {
  alignas(64) float values[kLanes];
  store(values, vector);
  return values[lane];
}

template <Form kForm>
inline void embed_floats(const Matrix& m, const uint8_t* weights, int lane, float* out) {
  for (int64_t c = 0; c < m.columns; ++c)
    out[c] = lane_of(load_weights<kForm>(weights, c / kChains * kChains, c % kChains), lane);
}

template <bool kFourBits>
inline void embed_codes(const Matrix& m, const uint8_t* codes, int64_t panel, int lane, float* out) {
  for (int64_t begin = 0; begin < m.columns; begin += m.group) {
    const int64_t at = (panel * m.columns + begin) / m.group * kLanes;
    const float scale = lane_of(load_half(m.scales + at), lane);
    const float min = m.mins ? lane_of(load_half(m.mins + at), lane) : 0.0f;
    const uint8_t* block = codes + begin / kBlock * (kFourBits ? kBlock / 2 : kBlock) * kLanes + 4 * lane;
    for (int64_t c = begin; c < begin + m.group; ++c) {
      const int64_t i = c % kBlock, k = kFourBits ? i % 16 : i;
      const uint8_t byte = block[k / 4 * 4 * kLanes + k % 4];
      const int code = !kFourBits ? byte : i < 16 ? byte & 15 : byte >> 4;
      out[c] = scale * static_cast<float>(m.mins ? code : code - m.offset) + min;
    }
  }
}

void embed(const Matrix& m, int row, float* out) {
  const int64_t panel = row / kLanes;
  const int lane = row % kLanes;
  const uint8_t* codes = m.codes + panel * m.codes_stride;
  switch (m.form) {
    case Form::F32:
      return embed_floats<Form::F32>(m, codes, lane, out);
    case Form::F16:
      return embed_floats<Form::F16>(m, codes, lane, out);
    case Form::BF16:
      return embed_floats<Form::BF16>(m, codes, lane, out);
    case Form::Q8:
      return embed_codes<false>(m, codes, panel, lane, out);
    case Form::Q4:
      return embed_codes<true>(m, codes, panel, lane, out);
  }
}

#undef UNROLL
