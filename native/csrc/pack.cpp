#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>

namespace mainspring {

// ---- numbers of 16 bits ----------------------------------------------------------------------------------

namespace {

float from_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = 0x7f800000 | (rest & 0x3ff) << 13;  // infinite or NaN
  } else if (rest >= 0x400) {
    bits = (rest << 13) + ((127 - 15) << 23);
  } else {
    const float value = std::ldexp(static_cast<float>(rest), -24);
    std::memcpy(&bits, &value, 4);
  }
  bits |= sign;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// To nearest, ties to even.
uint16_t to_half(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x47800000) return sign | 0x7c00;  // 65536 and above
  if (bits < 0x38800000) {                       // below the smallest normal half: multiples of 2^-24
    const float magnitude = std::fabs(value);
    return sign | static_cast<uint16_t>(std::nearbyint(magnitude * 0x1p24f));
  }
  const uint32_t odd = bits >> 13 & 1;
  return sign | static_cast<uint16_t>((bits + 0xfff + odd - ((127 - 15) << 23)) >> 13);  // perhaps infinity
}

float from_bf16(uint16_t b) {
  const uint32_t bits = static_cast<uint32_t>(b) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

uint16_t load16(const uint8_t* p) {
  uint16_t value;
  std::memcpy(&value, p, 2);
  return value;
}
uint32_t load32(const uint8_t* p) {
  uint32_t value;
  std::memcpy(&value, p, 4);
  return value;
}

}  // namespace

// ---- source types ----------------------------------------------------------------------------------------

// kBlock weights in the kernels' terms: 32 codes of 8 bits, or 16 bytes of two codes as Form::Q4 has them.
struct Block {
  alignas(16) uint8_t codes[kBlock];
  uint16_t scales[kBlock / kGroup];  // the first alone, where a block has one
  uint16_t min;
};

struct SourceType {
  const char* name;
  Form form;
  int block_size;   // weights in a block of the source
  int block_bytes;  // of it; 0: there is no source of bytes, floats are quantised
  bool has_mins;
  int offset;
  int group;
  void (*decode)(const uint8_t* raw, int part, Block&);  // the part-th kBlock weights of a source block
};

namespace {

constexpr int kOffset8 = 128;  // of signed bytes, and of smaller codes kept as such

void decode_q4_0(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  std::memcpy(out.codes, raw + 2, 16);
}

void decode_q4_1(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  out.min = load16(raw + 2);
  std::memcpy(out.codes, raw + 4, 16);
}

// Codes of 5 bits: the low nibbles, then the high ones, and a word of fifth bits.
void decode_5_bits(const uint8_t* nibbles, uint32_t fifth, int add, Block& out) {
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = static_cast<uint8_t>((nibbles[i] & 15) + (fifth >> i & 1) * 16 + add);
    out.codes[i + 16] = static_cast<uint8_t>((nibbles[i] >> 4) + (fifth >> (i + 16) & 1) * 16 + add);
  }
}

void decode_q5_0(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  decode_5_bits(raw + 6, load32(raw + 2), kOffset8 - 16, out);
}

void decode_q5_1(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  out.min = load16(raw + 2);
  decode_5_bits(raw + 8, load32(raw + 4), 0, out);
}

void decode_q8_0(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  for (int i = 0; i < kBlock; ++i) out.codes[i] = raw[2 + i] ^ 0x80;
}

// Codes that stand for uneven steps.
void decode_uneven(const uint8_t* nibbles, Block& out) {
  static constexpr int8_t kValues[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};
  for (int i = 0; i < 16; ++i) {
    out.codes[i] = static_cast<uint8_t>(kValues[nibbles[i] & 15] + kOffset8);
    out.codes[i + 16] = static_cast<uint8_t>(kValues[nibbles[i] >> 4] + kOffset8);
  }
}

void decode_iq4_nl(const uint8_t* raw, int, Block& out) {
  out.scales[0] = load16(raw);
  decode_uneven(raw + 2, out);
}

uint16_t scaled_half(const uint8_t* half, int factor) {
  return to_half(from_half(load16(half)) * static_cast<float>(factor));
}

// Eight scales of 6 bits less 32: a word with the upper two of each, then nibbles.
void decode_iq4_xs(const uint8_t* raw, int part, Block& out) {
  const int low = raw[4 + part / 2] >> (4 * (part % 2)) & 15, upper = load16(raw + 2) >> (2 * part) & 3;
  out.scales[0] = scaled_half(raw, (low | upper << 4) - 32);
  decode_uneven(raw + 8 + 16 * part, out);
}

// Q4_K and Q5_K: fp16 scale of scales and scale of mins, then 8 scales and 8 mins of 6 bits in 12 bytes: the
// first four of each are the low six bits of a byte; of the others the low four bits share a byte, and the
// upper two are in the first ones' upper bits.
void decode_k_scales(const uint8_t* raw, int part, Block& out) {
  const uint8_t* packed = raw + 4;
  int scale, min;
  if (part < 4) {
    scale = packed[part] & 63;
    min = packed[part + 4] & 63;
  } else {
    scale = (packed[part + 4] & 15) | (packed[part - 4] >> 6) << 4;
    min = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
  }
  out.scales[0] = scaled_half(raw, scale);
  out.min = scaled_half(raw + 2, min) ^ 0x8000;  // what is taken away in the file is added here
}

// Code i of part `part`: a nibble of byte i of every 32, low ones for even parts.
int k_nibble(const uint8_t* nibbles, int part, int i) {
  const uint8_t byte = nibbles[part / 2 * 32 + i];
  return part % 2 ? byte >> 4 : byte & 15;
}

void decode_q4_k(const uint8_t* raw, int part, Block& out) {
  decode_k_scales(raw, part, out);
  const uint8_t* nibbles = raw + 16;
  for (int i = 0; i < 16; ++i)
    out.codes[i] = static_cast<uint8_t>(k_nibble(nibbles, part, i) | k_nibble(nibbles, part, i + 16) << 4);
}

void decode_q5_k(const uint8_t* raw, int part, Block& out) {
  decode_k_scales(raw, part, out);
  const uint8_t *fifth = raw + 16, *nibbles = raw + 48;
  for (int i = 0; i < kBlock; ++i)
    out.codes[i] = static_cast<uint8_t>(k_nibble(nibbles, part, i) | (fifth[i] >> part & 1) << 4);
}

// Two halves of 128 weights; in each, byte i of 64 has the low nibbles of weights i and i + 64, byte i of 32
// two upper bits of weights i, i + 32, i + 64 and i + 96; a signed scale for every 16, and their fp16 scale.
void decode_q6_k(const uint8_t* raw, int part, Block& out) {
  const int half = part / 4, quarter = part % 4;
  const uint8_t* nibbles = raw + 64 * half + 32 * (quarter % 2);
  const uint8_t* upper = raw + 128 + 32 * half;
  for (int i = 0; i < kBlock; ++i) {
    const int low = quarter < 2 ? nibbles[i] & 15 : nibbles[i] >> 4;
    out.codes[i] = static_cast<uint8_t>(low | (upper[i] >> (2 * quarter) & 3) << 4);
  }
  for (int g = 0; g < 2; ++g)
    out.scales[g] = scaled_half(raw + 208, static_cast<int8_t>(raw[192 + 2 * part + g]));
}

// Two halves as in Q6_K, of byte i of 32 two low bits of four weights; bit `part` of byte i of 32 is the third
// one. A scale for every 16, of 6 bits less 32: nibbles of 8 bytes, low ones first, then two upper bits in 4
// bytes, the lowest first.
void decode_q3_k(const uint8_t* raw, int part, Block& out) {
  const uint8_t *third = raw, *low = raw + 32 + part / 4 * 32, *packed = raw + 96;
  for (int i = 0; i < kBlock; ++i)
    out.codes[i] = static_cast<uint8_t>((low[i] >> (2 * (part % 4)) & 3) | (third[i] >> part & 1) << 2);
  for (int g = 0; g < 2; ++g) {
    const int at = 2 * part + g;
    const int nibble = packed[at % 8] >> (4 * (at / 8)) & 15, upper = packed[8 + at % 4] >> (2 * (at / 4)) & 3;
    out.scales[g] = scaled_half(raw + 108, (nibble | upper << 4) - 32);
  }
}

constexpr SourceType kSourceTypes[] = {
    {"F32", Form::F32, 1, 4, false, 0, kBlock, nullptr},
    {"F16", Form::F16, 1, 2, false, 0, kBlock, nullptr},
    {"BF16", Form::BF16, 1, 2, false, 0, kBlock, nullptr},
    {"Q4_0", Form::Q4, 32, 18, false, 8, kBlock, decode_q4_0},
    {"Q4_1", Form::Q4, 32, 20, true, 0, kBlock, decode_q4_1},
    {"Q5_0", Form::Q8, 32, 22, false, kOffset8, kBlock, decode_q5_0},
    {"Q5_1", Form::Q8, 32, 24, true, 0, kBlock, decode_q5_1},
    {"Q8_0", Form::Q8, 32, 34, false, kOffset8, kBlock, decode_q8_0},
    {"IQ4_NL", Form::Q8, 32, 18, false, kOffset8, kBlock, decode_iq4_nl},
    {"IQ4_XS", Form::Q8, 256, 136, false, kOffset8, kBlock, decode_iq4_xs},
    {"Q3_K", Form::Q8, 256, 110, false, 4, kGroup, decode_q3_k},
    {"Q4_K", Form::Q4, 256, 144, true, 0, kBlock, decode_q4_k},
    {"Q5_K", Form::Q8, 256, 176, true, 0, kBlock, decode_q5_k},
    {"Q6_K", Form::Q8, 256, 210, false, 32, kGroup, decode_q6_k},
    {"q8", Form::Q8, 32, 0, false, kOffset8, kBlock, nullptr},
    {"q4", Form::Q4, 32, 0, true, 0, kBlock, nullptr},
};

const SourceType& find_source(const std::string& name) {
  for (const SourceType& type : kSourceTypes)
    if (name == type.name) return type;
  std::string known;
  for (const SourceType& type : kSourceTypes) known += (known.empty() ? "" : ", ") + std::string(type.name);
  throw std::invalid_argument("no packed form of tensor type '" + name + "'; there are: " + known);
}

bool is_quantized(Form form) { return form == Form::Q8 || form == Form::Q4; }
int element_bytes(Form form) { return form == Form::F32 ? 4 : 2; }
int run_length(Form form) { return form == Form::BF16 ? 2 : 1; }  // columns whose weights of a row are neighbours
int64_t padded_columns(const Matrix& m) {
  const int64_t run = run_length(m.form);
  return (m.columns + run - 1) / run * run;
}
int64_t plain_place(const Matrix& m, int64_t lane, int64_t column) {  // in a panel of plain numbers
  const int64_t run = run_length(m.form);
  return (column / run * kLanes + lane) * run + column % run;
}
int block_code_bytes(Form form) { return form == Form::Q4 ? kBlock / 2 : kBlock; }  // of one row
int64_t num_panels(const Matrix& m) { return (int64_t{m.rows} + kLanes - 1) / kLanes; }
int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Codes whose scale is 0 come to stand for nothing, so that the scale may be another (kernels.h).
void replace_zero_scales(const Matrix& m, Block& block) {
  for (int g = 0; g < kBlock / m.group; ++g) {
    if (block.scales[g] & 0x7fff) continue;
    block.scales[g] = 1;  // 2^-24
    const int num_bytes = block_code_bytes(m.form) * m.group / kBlock;
    std::memset(block.codes + g * num_bytes, m.form == Form::Q4 ? m.offset * 0x11 : m.offset, num_bytes);
  }
}

// The planes of a matrix, to be written.
struct Planes {
  // Give a lane its block: 32-bit words of it lie kLanes words apart.
  void put(int64_t row, int64_t block, Block from) const {
    replace_zero_scales(m, from);
    const int64_t panel = row / kLanes, lane = row % kLanes;
    const int num_bytes = block_code_bytes(m.form);
    uint8_t* to = codes + panel * m.codes_stride + block * num_bytes * kLanes + 4 * lane;
    for (int i = 0; i < num_bytes; i += 4) std::memcpy(to + i * kLanes, from.codes + i, 4);
    const int64_t groups = kBlock / m.group;
    const int64_t at = (panel * (m.columns / kBlock) + block) * groups * kLanes + lane;
    for (int64_t g = 0; g < groups; ++g) scales[at + g * kLanes] = from.scales[g];
    if (m.mins) mins[at] = from.min;
  }

  // Lanes beyond the last row stand for zeros.
  void pad() const {
    const Block zero{};
    for (int64_t row = m.rows; row % kLanes; ++row)
      for (int64_t b = 0; b < m.columns / kBlock; ++b) put(row, b, zero);
  }

  const Matrix& m;
  uint8_t* codes;
  uint16_t *scales, *mins;
};

// Rows [begin, end) of plain numbers, panel by panel; lanes beyond the last row, and a column beyond the last, hold
// zeros.
template <class T>
void pack_plain(const Matrix& m, uint8_t* memory, const uint8_t* raw, int64_t begin, int64_t end) {
  constexpr int64_t kTile = 64 / sizeof(T);  // columns: a cache line of each row
  const int64_t columns = m.columns;
  for (int64_t first = begin; first < end; first += kLanes) {
    auto* to = reinterpret_cast<T*>(memory + first / kLanes * m.codes_stride);
    for (int64_t start = 0; start < columns; start += kTile) {
      const int64_t stop = std::min(padded_columns(m), start + kTile);
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t row = first + lane;
        const uint8_t* from = raw + (row - begin) * columns * sizeof(T);
        for (int64_t c = start; c < stop; ++c) {
          T value = 0;
          if (row < end && c < columns) std::memcpy(&value, from + c * sizeof(T), sizeof(T));
          to[plain_place(m, lane, c)] = value;
        }
      }
    }
  }
}

// ---- quantising floats -----------------------------------------------------------------------------------

float largest_magnitude(const float* x) {
  float largest = 0;
  for (int i = 0; i < kBlock; ++i) {
    if (!(std::fabs(x[i]) <= std::numeric_limits<float>::max()))
      return std::numeric_limits<float>::quiet_NaN();
    largest = std::max(largest, std::fabs(x[i]));
  }
  return largest;
}

// To nearest, ties to even, for magnitudes below 2^22: in a form that compilers turn into vectors everywhere.
float rounded(float x) {
  constexpr float kShift = 0x1.8p23f;
  return x + kShift - kShift;
}

float sum_of_block(const float* x) {
  float parts[8];
  std::copy(x, x + 8, parts);
  for (int i = 8; i < kBlock; i += 8)
    for (int j = 0; j < 8; ++j) parts[j] += x[i + j];
  return ((parts[0] + parts[4]) + (parts[2] + parts[6])) + ((parts[1] + parts[5]) + (parts[3] + parts[7]));
}

void quantize_q8(const float* x, Block& out) {
  out.scales[0] = to_half(largest_magnitude(x) / 127.0f);
  const float scale = from_half(out.scales[0]), inverse = scale > 0 ? 1.0f / scale : 0.0f;
  for (int i = 0; i < kBlock; ++i) {
    const float code = std::min(std::max(rounded(x[i] * inverse), -127.0f), 127.0f);
    out.codes[i] = static_cast<uint8_t>(static_cast<int>(code) + kOffset8);
  }
}

struct Line {
  float scale, min;
};

// Codes with a line that fp16 can hold, and the squared error that remains.
float encode_q4(const float* x, Line line, float* codes) {
  const float inverse = line.scale > 0 ? 1.0f / line.scale : 0.0f;
  float squares[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    codes[i] = rounded(std::min(std::max((x[i] - line.min) * inverse, 0.0f), 15.0f));
    const float rest = x[i] - (line.scale * codes[i] + line.min);
    squares[i] = rest * rest;
  }
  return sum_of_block(squares);
}

// The line with which these codes come closest to x; `otherwise` if all codes are the same.
Line fit_line(const float* x, const float* codes, Line otherwise) {
  float squares[kBlock], products[kBlock];
  for (int i = 0; i < kBlock; ++i) {
    squares[i] = codes[i] * codes[i];
    products[i] = codes[i] * x[i];
  }
  const float sum_c = sum_of_block(codes), sum_x = sum_of_block(x);
  const float spread = kBlock * sum_of_block(squares) - sum_c * sum_c;
  if (spread <= 0) return otherwise;
  const float scale = (kBlock * sum_of_block(products) - sum_c * sum_x) / spread;
  return {scale, (sum_x - scale * sum_c) / kBlock};
}

// Of several widths of the range, each followed by one fit, keep the one with the least squared error.
void quantize_q4(const float* x, Block& out) {
  constexpr float kSteps[] = {15.0f, 14.5f, 15.5f, 16.0f, 16.5f};
  const float low = *std::min_element(x, x + kBlock), high = *std::max_element(x, x + kBlock);
  float least = std::numeric_limits<float>::infinity();
  float codes[kBlock], best[kBlock] = {};
  // What stays if nothing fits: NaN or infinite.
  out.scales[0] = to_half(largest_magnitude(x) + (high - low) / 15.0f);
  out.min = to_half(low);
  for (const float steps : kSteps) {
    Line line{(high - low) / steps, low};
    for (int fit = 0; fit < 2; ++fit) {
      const uint16_t scale = to_half(line.scale), min = to_half(line.min);
      const float error = encode_q4(x, {from_half(scale), from_half(min)}, codes);
      if (error < least) {
        least = error;
        out.scales[0] = scale;
        out.min = min;
        std::copy(codes, codes + kBlock, best);
      }
      line = fit_line(x, codes, line);
    }
  }
  for (int i = 0; i < 16; ++i)
    out.codes[i] = static_cast<uint8_t>(static_cast<int>(best[i]) | static_cast<int>(best[i + 16]) << 4);
}

}  // namespace

// ---- the matrix ------------------------------------------------------------------------------------------

PackedMatrix::PackedMatrix(const std::string& source, int64_t rows, int64_t columns)
    : source_(&find_source(source)) {
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max();
  if (rows < 1 || rows > kMost || columns < 1 || columns > kMost)
    throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " + std::to_string(columns) +
                                " cannot be packed");
  if (columns % source_->block_size)
    throw std::invalid_argument("rows of " + std::to_string(columns) + " weights, expected a multiple of " +
                                std::to_string(source_->block_size) + ", the block of " + source);
  view_.form = source_->form;
  view_.rows = static_cast<int32_t>(rows);
  view_.columns = static_cast<int32_t>(columns);
  view_.offset = source_->offset;
  view_.group = source_->group;
  if (is_quantized(view_.form)) {
    const int64_t num_blocks = columns / kBlock;
    view_.codes_stride = num_blocks * block_code_bytes(view_.form) * kLanes;
    scales_offset_ = aligned(num_panels(view_) * view_.codes_stride);
    mins_offset_ = scales_offset_ + aligned(num_panels(view_) * columns / view_.group * kLanes * 2);
    num_bytes_ = source_->has_mins ? 2 * mins_offset_ - scales_offset_ : mins_offset_;
  } else {
    view_.codes_stride = padded_columns(view_) * element_bytes(view_.form) * kLanes;
    num_bytes_ = num_panels(view_) * view_.codes_stride;
  }
}

int64_t PackedMatrix::row_bytes() const {
  return int64_t{view_.columns} / source_->block_size * source_->block_bytes;
}

const char* PackedMatrix::form_name() const {
  static constexpr const char* kNames[] = {"F32", "F16", "BF16", "Q8", "Q4"};
  return kNames[static_cast<int>(view_.form)];
}

void PackedMatrix::bind(uint8_t* memory) {
  bind(static_cast<const uint8_t*>(memory));
  writable_ = memory;
}

void PackedMatrix::bind(const uint8_t* memory) {
  if (reinterpret_cast<uintptr_t>(memory) % 64)
    throw std::invalid_argument("the memory is not 64-byte aligned");
  writable_ = nullptr;
  view_.codes = memory;
  if (!is_quantized(view_.form)) return;
  view_.scales = reinterpret_cast<const uint16_t*>(memory + scales_offset_);
  if (source_->has_mins) view_.mins = reinterpret_cast<const uint16_t*>(memory + mins_offset_);
}

void PackedMatrix::check_rows(int64_t begin, int64_t end) const {
  if (!is_bound()) throw std::invalid_argument("the matrix has no memory yet: bind it first");
  if (!writable_) throw std::invalid_argument("the matrix's memory is read only");
  if (begin < 0 || begin >= end || end > view_.rows || begin % kLanes || (end % kLanes && end != view_.rows))
    throw std::invalid_argument("rows " + std::to_string(begin) + " to " + std::to_string(end) + " of " +
                                std::to_string(view_.rows) + " are not whole panels of 16");
}

void PackedMatrix::pack(const uint8_t* raw, int64_t begin, int64_t end) {
  check_rows(begin, end);
  switch (view_.form) {
    case Form::F32:
      return pack_plain<uint32_t>(view_, writable_, raw, begin, end);
    case Form::F16:
    case Form::BF16:
      return pack_plain<uint16_t>(view_, writable_, raw, begin, end);
    default:
      break;
  }
  if (source_->block_bytes == 0)
    throw std::invalid_argument("a matrix of type q8 or q4 is packed from floats");
  const Planes planes{view_, writable_, reinterpret_cast<uint16_t*>(writable_ + scales_offset_),
                      reinterpret_cast<uint16_t*>(writable_ + mins_offset_)};
  const int parts = source_->block_size / kBlock;
  const int64_t num_source_blocks = view_.columns / source_->block_size;
  // All lanes of a block together: what they write lies side by side.
  for (int64_t first = begin; first < end; first += kLanes)
    for (int64_t b = 0; b < num_source_blocks; ++b)
      for (int64_t row = first; row < std::min(end, first + kLanes); ++row) {
        const uint8_t* from = raw + (row - begin) * row_bytes() + b * source_->block_bytes;
        for (int part = 0; part < parts; ++part) {
          Block block;
          source_->decode(from, part, block);
          planes.put(row, b * parts + part, block);
        }
      }
  if (end == view_.rows) planes.pad();
}

void PackedMatrix::pack_floats(const float* values, int64_t begin, int64_t end) {
  check_rows(begin, end);
  if (source_->block_bytes)
    throw std::invalid_argument(std::string("a matrix of type ") + source_->name +
                                " is packed from the bytes of a file");
  const Planes planes{view_, writable_, reinterpret_cast<uint16_t*>(writable_ + scales_offset_),
                      reinterpret_cast<uint16_t*>(writable_ + mins_offset_)};
  for (int64_t row = begin; row < end; ++row)
    for (int64_t b = 0; b < view_.columns / kBlock; ++b) {
      const float* from = values + (row - begin) * view_.columns + b * kBlock;
      Block block;
      if (view_.form == Form::Q8) {
        quantize_q8(from, block);
      } else {
        quantize_q4(from, block);
      }
      planes.put(row, b, block);
    }
  if (end == view_.rows) planes.pad();
}

void PackedMatrix::unpack(float* out) const {
  if (!is_bound()) throw std::invalid_argument("the matrix has no memory yet: bind it first");
  const Matrix& m = view_;
  for (int64_t row = 0; row < m.rows; ++row) {
    const int64_t panel = row / kLanes, lane = row % kLanes;
    const uint8_t* codes = m.codes + panel * m.codes_stride;
    for (int64_t c = 0; c < m.columns; ++c, ++out) {
      if (!is_quantized(m.form)) {
        const uint8_t* from = codes + plain_place(m, lane, c) * element_bytes(m.form);
        if (m.form == Form::F32) std::memcpy(out, from, 4);
        if (m.form == Form::F16) *out = from_half(load16(from));
        if (m.form == Form::BF16) *out = from_bf16(load16(from));
        continue;
      }
      const int64_t b = c / kBlock, at = (panel * m.columns + c) / m.group * kLanes + lane;
      const int i = static_cast<int>(c % kBlock), k = m.form == Form::Q4 ? i % 16 : i;
      const uint8_t byte = codes[b * block_code_bytes(m.form) * kLanes + k / 4 * 64 + 4 * lane + k % 4];
      const int code = m.form == Form::Q8 ? byte : i < 16 ? byte & 15 : byte >> 4;
      const float scale = from_half(m.scales[at]);
      *out = m.mins ? scale * static_cast<float>(code) + from_half(m.mins[at])
                    : scale * static_cast<float>(code - m.offset);
    }
  }
}

}  // namespace mainspring
