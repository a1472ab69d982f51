// What the instruction-set variants offer, and the shapes of what they work on.
//
// Theory of operation.
// - csrc/variant.cpp is compiled once per instruction set. Each gives one `Kernels`, a table of functions; the
//   rest of the library is compiled for any x86-64 and calls through the table that cpu.cpp chose.
// - A kernel is called by one thread for one piece of work and knows neither threads nor batches. Everything
//   that is shared between threads is read only, or is this piece's own to write.
// - The order in which an output's terms are added is a function of its operands' shapes alone: never of how
//   many rows, panels or threads there are. So a row's result is the same bits alone and in any batch.
//
// A variant must not instantiate a template or an inline function of the C++ library: the linker keeps one copy
// of it for all variants, and that copy may hold instructions that another machine lacks.
#pragma once

#include <cstdint>

namespace mainspring {

constexpr int kLanes = 16;  // output columns of a panel: the lanes of every vector here
constexpr int kBlock = 32;  // weights along a row that share a scale, and activations that do
constexpr int kGroup = 16;  // half a block: weights that share a scale where scales are finer

// How the weights of a matrix are held. Rows of the matrix (outputs) are grouped in panels of kLanes, the last
// one padded with zeros. Inside a panel:
//   F32, F16  [columns][kLanes]: 16 outputs' weights for one input lie side by side.
//   BF16      [columns / 2, rounded up][kLanes][2]: those for two inputs, as products of pairs want them; the one
//             after the last input is 0.
//   Q8        [columns / 4][kLanes][4] bytes: four inputs' codes of an output make one 32-bit word.
//   Q4        [columns / 32][4][kLanes][4] bytes: byte (j, lane, i) of a block of 32 holds in its low nibble the
//             code of input 4 * j + i and in its high nibble that of input 16 + 4 * j + i.
// A code is unsigned. Its value is scale * (code - offset), or scale * code + min where there are mins. No scale
// is 0: where it was, codes stand for nothing.
enum class Form : int32_t { F32 = 0, F16 = 1, BF16 = 2, Q8 = 3, Q4 = 4 };

struct Matrix {
  Form form;
  int32_t rows;            // outputs
  int32_t columns;         // inputs; a multiple of kBlock for Q8 and Q4
  int32_t offset;          // of Q8 and Q4 without mins
  const uint8_t* codes;    // panel p begins at codes + p * codes_stride; 64-byte aligned
  const uint16_t* scales;  // fp16 [panels][columns / group][kLanes]; null for F32, F16, BF16
  const uint16_t* mins;    // fp16, as scales; may be null
  int64_t codes_stride;    // bytes
  int32_t group = kBlock;  // inputs that share a scale: kBlock; or kGroup, of Q8 without mins alone
};

// Activations as integers, rows in pairs, so that a product finds all that it needs of a few rows and a block at
// fixed distances from few addresses. Per pair of rows and kBlock inputs there is a record:
//   int8_t high[2][kBlock], int8_t low[2][kBlock] where there are 16 bits, RecordTail.
// A value is scale * (high * 256 + low) with 16 bits, else scale * high.
constexpr int kPair = 2;
// A scale is a sum or a difference of two powers of two, so that to multiply with it can be left to units that have
// nothing to do while others multiply (times_powers).
struct RecordTail {
  float scales[kPair];  // 0 where all inputs count as zeros, NaN where one is not finite
  float sums[kPair];    // scale * sum of the block's integers: what an output's min is multiplied with
  int32_t half_sums[kPair][kBlock / kGroup];  // of the integers of every kGroup inputs
  uint32_t powers[kPair][2];  // the scale's: what to add to the bits of a float, to multiply it by either
};
constexpr int codes_bytes(bool wide) { return kPair * kBlock * (wide ? 2 : 1); }
constexpr int record_bytes(bool wide) { return codes_bytes(wide) + static_cast<int>(sizeof(RecordTail)); }

// Floats to be encoded or rounded: `count` rows of `columns` that begin `pitch` floats apart.
struct Rows {
  const float* at;
  int64_t pitch;
  int32_t count, columns;
};

struct Encoded {
  uint8_t* records;  // [rows / 2, rounded up][columns / kBlock]; null: nothing is encoded
  int32_t columns;
  bool wide;  // 16 bits
};

// Activations rounded to bf16, for products of pairs: to nearest, ties to even. A row is a whole number of pairs; the
// number after its last column is 0.
struct Rounded {
  uint16_t* rows;  // [rows][pitch()]; null: nothing is rounded
  int32_t columns;

  int64_t pitch() const { return (int64_t{columns} + 1) / 2 * 2; }
};

// What a linear kernel reads, one of: floats for F32, F16 and BF16 weights, encoded rows for Q8 and Q4, rounded rows
// for BF16. The last is only for processors that multiply pairs (has_bf16 of cpu.h).
struct Input {
  const float* rows;  // [rows][columns], or null
  Encoded encoded;    // or no records
  Rounded rounded;    // or no rows
};

// Where a linear kernel writes: place (r, c) is at[r * pitch + c].
struct Output {
  float* at;
  int64_t pitch;  // floats from row to row
  bool add;       // to what is there
};

// ---- attention ------------------------------------------------------------------------------------------

// K and V of one layer. Block b begins at data + b * block_stride; in it, per KV head:
//   K  [block_size / 16][head_size][16 tokens], V  [block_size][head_size], of `form`;
//   and for I8 a float per token: [block_size] scales of K, [block_size] scales of V.
// BF16 has pairs: K  [block_size / 16][head_size / 2][16 tokens][2], V  [block_size / 2][head_size][2 tokens]. It is
// only for processors that multiply them (has_bf16 of cpu.h).
enum class KVForm : int32_t { F32 = 0, F16 = 1, I8 = 2, BF16 = 3 };

struct KVCache {
  uint8_t* data;
  int64_t block_stride;  // bytes
  KVForm form;
  int32_t block_size;  // tokens, a multiple of 16
  int32_t num_kv_heads;
  int32_t head_size;
};

struct AttentionShape {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;
  float scale;
  int32_t window;   // a token sees itself and the window - 1 before it; 0: all before it
  float soft_cap;   // cap * tanh(score / cap); 0: none
  bool causal;
};

struct AttentionPlan;  // attention_plan.h

struct AttentionArgs {
  const AttentionPlan* plan;
  const float* q;  // row t's query heads begin at q + t * q_stride
  int64_t q_stride;
  float* out;  // [tokens][num_heads * head_size]; may be null if encoded.records is not
  Encoded encoded;  // as well, or no records; only where the query heads of a KV head are whole blocks
  Rounded rounded;  // likewise
  KVCache cache;
  AttentionShape shape;
  float* partials;  // plan's scratch
};

// ---- sampling -------------------------------------------------------------------------------------------

// All that one row of logits is asked. The meaning of each part, and their order, is that of the engine's numpy
// sampler, which gives the same answer.
struct RowRequest {
  const uint32_t* mask;  // the grammar's: bit t says whether token t may follow; null: all may

  const int64_t* allowed_ids;  // where there are any, all others are forbidden; null: none asked for
  const int64_t* bias_ids;
  const float* bias;
  const int64_t* stop_ids;  // forbidden, unless that and the mask leave nothing
  const int64_t* counted_ids;
  const float* counts;  // how often they are in the output
  const int64_t* forbidden_ids;
  int32_t num_allowed, num_biased, num_stops, num_counted, num_forbidden;
  float repetition;
  float frequency;
  double presence;

  float temperature;  // 0: the best
  int32_t top_k;      // 0: off
  double top_p;       // 1: off
  double min_p;       // 0: off
  int64_t seed;
  int64_t position;

  int32_t num_logprobs;  // -1: none asked for, not even the token's own
};

enum class RowStatus : int32_t { Fine = 0, NotFinite = 1, NoneAllowed = 2, EditedToInfinity = 3 };

struct RowResult {
  RowStatus status;  // if not Fine, nothing else is set
  float value;       // the logit that is not finite
  int32_t token;
  int32_t rank;     // how many logits are not smaller, itself counted
  int32_t* ids;     // [1 + num_logprobs], the caller's: the token, then the best
  float* logprobs;  // likewise; kLogprobFloor at least
};

constexpr float kLogprobFloor = -9999.0f;
constexpr int kSamplingArrays = 7;   // of scratch, each of as many floats as there are logits,
constexpr int kSamplingSlack = 256;  // and so many more

// x * sigmoid(x); x * (the normal distribution up to x), exact or by its usual form with tanh.
enum class Activation : int32_t { Silu = 0, Gelu = 1, GeluTanh = 2 };

// Work to measure a machine by (ceilings.h).
enum class Exercise : int32_t { ByteProducts, FloatProducts, Reads };

// ---- the table --------------------------------------------------------------------------------------------

struct Kernels {
  const char* name;

  // Row `row + r` of the input times row 16 * (panel + p) + lane of the matrix goes to place (r, 16 * p + lane)
  // of the output, for num_rows rows and num_panels panels. What the matrix has no row for is left alone.
  void (*linear)(const Matrix&, const Input&, int row, int num_rows, int panel, int num_panels, const Output&);

  // Rows of floats become the columns from `column` on of the rows from `row` on: encoded, which takes whole blocks,
  // or rounded.
  void (*encode)(const Rows&, const Encoded&, int row, int column);
  void (*round_to_bf16)(const Rows&, const Rounded&, int row, int column);

  // out[columns] = row `row` of the matrix.
  void (*embed)(const Matrix&, int row, float* out);

  // Of rows of `count` floats. `out` may be `x`.
  void (*rms_norm)(const float* x, const float* weight, float eps, int count, float* out);
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int count, float* out);
  void (*add)(float* out, const float* x, int count);        // out += x
  void (*multiply)(float* x, float factor, int count);       // x *= factor
  void (*soft_cap)(float* x, float cap, int count);          // x = cap * tanh(x / cap)
  void (*activate)(Activation, const float* x, int count, float* out);
  void (*gate)(Activation, const float* x, const float* up, int count, float* out);  // activation(x) * up
  // Turn `num_heads` heads in place: pair i of n by (cosines[i], sines[i]).
  void (*rope)(float* heads, const float* cosines, const float* sines, int n, int num_heads, int head_size,
               bool interleaved);

  // Keep one token's keys and values (kv: num_kv_heads * head_size of each) at slot block * block_size + i.
  void (*write_kv)(const KVCache&, const float* kv, int64_t slot);
  // Compute unit `unit` of the plan. `scratch`: the thread's own, kAttentionScratch floats, 64-byte aligned.
  void (*attend)(const AttentionArgs&, int unit, float* scratch);

  // The index of the largest of `count` floats, the first among equals, of those that `mask` allows (bit t of
  // it; null: all); its value goes to *value. A NaN wins over everything. -1 where none is allowed.
  int (*argmax)(const float* x, int count, const uint32_t* mask, float* value);

  // The next token of a row of `count` logits, which are not written. `scratch`: see kSamplingArrays.
  void (*sample_row)(const RowRequest&, const float* logits, int count, float* scratch, RowResult*);
  // Log-probabilities alone, of `token` and of the best.
  void (*row_logprobs)(const float* logits, int count, int token, int num_logprobs, float* scratch,
                       RowResult*);

  // Returns how many operations, or bytes, that was; *result changes, so that the work cannot be left out.
  int64_t (*exercise)(Exercise, const uint8_t* memory, int64_t num_bytes, int32_t* result);
};

extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;

}  // namespace mainspring
