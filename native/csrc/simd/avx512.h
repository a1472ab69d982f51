// 16 lanes in one 512-bit register. The twin of avx2.h: the same names, the same results per lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// What the registers hold: rows of an integer tile, and vectors of sums of a float tile.
constexpr int kTileRows = 8, kTileSums = 16;
constexpr int kStripSums = 24;  // vectors of sums of a strip of attention
constexpr int kPairsTileRows = 8;  // rows of a tile of pairs

struct F32 {
  __m512 v;
};
struct I32 {
  __m512i v;
};
struct Bytes {  // 64 of them: four per lane
  __m512i v;
};

inline F32 splat(float x) { return {_mm512_set1_ps(x)}; }
inline I32 splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline I32 load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline F32 load_half(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// One of the two bf16 numbers in every lane: the first is the low half.
inline F32 load_bf16(const uint8_t* pairs, int which) {
  const __m512i both = _mm512_loadu_si512(pairs);
  return {_mm512_castsi512_ps(which == 0 ? _mm512_slli_epi32(both, 16)
                                         : _mm512_andnot_si512(_mm512_set1_epi32(0xffff), both))};
}
inline F32 load_i8(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))};
}
inline void store(float* p, F32 x) { _mm512_storeu_ps(p, x.v); }
inline void store(int32_t* p, I32 x) { _mm512_storeu_si512(p, x.v); }
inline void store_half(uint16_t* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// To nearest, ties to even; a NaN stays one.
inline void store_bf16(uint16_t* p, F32 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512i kept = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16)));
}
// The low byte of every lane: 16 bytes.
inline void store_low_bytes(int8_t* p, I32 x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x.v)); }

inline F32 operator+(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 operator-(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 operator*(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 operator/(F32 a, F32 b) { return {_mm512_div_ps(a.v, b.v)}; }
inline I32 operator+(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }    // a * b + c
inline F32 fnma(F32 a, F32 b, F32 c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }  // c - a * b
// Even lanes a * b - c, odd lanes a * b + c.
inline F32 fma_turn(F32 a, F32 b, F32 c) { return {_mm512_fmaddsub_ps(a.v, b.v, c.v)}; }
inline F32 swap_pairs(F32 a) { return {_mm512_permute_ps(a.v, 0xb1)}; }  // lanes 1, 0, 3, 2, ...
inline F32 load_doubled(const float* p) {  // p[0], p[0], p[1], p[1], ... p[7], p[7]
  const __m512 eight = _mm512_castps256_ps512(_mm256_loadu_ps(p));
  return {_mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7), eight)};
}
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 min(F32 a, F32 b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
template <int kBits>
inline I32 shift_left(I32 a) {
  return {_mm512_slli_epi32(a.v, kBits)};
}
template <int kBits>
inline I32 shift_right(I32 a) {  // arithmetic
  return {_mm512_srai_epi32(a.v, kBits)};
}
template <int kBits>
inline I32 shift_right_unsigned(I32 a) {
  return {_mm512_srli_epi32(a.v, kBits)};
}
inline I32 operator*(I32 a, I32 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }  // the low 32 bits
inline I32 operator^(I32 a, I32 b) { return {_mm512_xor_si512(a.v, b.v)}; }

// sum + the products of each lane's four unsigned bytes with the four signed ones at p, exactly. These are repeated
// for all lanes by the instruction itself: compilers make that a load of its own, and so fill the queues.
inline void add_products(__m512i& sum, Bytes codes, const int8_t* p) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(codes.v), "m"(*reinterpret_cast<const int8_t(*)[4]>(p)));
}

// Each lane's products of 4 * kWords unsigned bytes with as many signed ones, which are the same for all
// lanes, added to sums[r] for kRows rows, whose signed bytes begin `pitch` bytes apart. Each row has two chains, for
// one would wait for itself, and those of all rows take turns, so that few instructions have to be looked ahead.
template <int kWords, int kRows>
inline void dot_bytes(I32 (&sums)[kRows], const Bytes* codes, const int8_t* activations, int pitch) {
  __m512i others[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) others[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int j = 0; j < kWords; j += 2) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) add_products(sums[r].v, codes[j], activations + r * pitch + 4 * j);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) add_products(others[r], codes[j + 1], activations + r * pitch + 4 * j + 4);
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r].v = _mm512_add_epi32(sums[r].v, others[r]);
}
// The same where no code is above 15.
template <int kWords, int kRows>
inline void dot_nibbles(I32 (&sums)[kRows], const Bytes* codes, const int8_t* activations, int pitch) {
  dot_bytes<kWords>(sums, codes, activations, pitch);
}
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes b) { return {_mm512_and_si512(b.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes b) {
  return {_mm512_and_si512(_mm512_srli_epi16(b.v, 4), _mm512_set1_epi8(15))};
}

// Two bf16 numbers in every lane. Not every processor with this variant multiplies them (see has_bf16), so who
// does is compiled for it function by function.
#define BF16_TARGET __attribute__((target("avx512bf16")))
struct Pairs {
  __m512i v;
};
inline Pairs load_pairs(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Pairs splat_pair(const float* p) {  // the pair in the place of a float
  int32_t pair;
  __builtin_memcpy(&pair, p, 4);
  return {_mm512_set1_epi32(pair)};
}
inline Pairs only_first(Pairs a) { return {_mm512_and_si512(a.v, _mm512_set1_epi32(0xffff))}; }
inline Pairs only_second(Pairs a) { return {_mm512_andnot_si512(_mm512_set1_epi32(0xffff), a.v)}; }
// Neighbouring numbers as pairs, in the place of eight floats; to nearest, ties to even.
BF16_TARGET inline void store_pairs(float* p, F32 x) {
  _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(x.v));
}
// sum + the products of both numbers. Denormal ones, and results, are zeros.
BF16_TARGET inline F32 dot_pairs(F32 sum, Pairs a, Pairs b) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}

// Across lanes, always in the order of this tree: halves, quarters, eighths, neighbours.
inline float sum(F32 a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float largest(F32 a) { return _mm512_reduce_max_ps(a.v); }
// Of all lanes of both; a NaN if there is one, for then its bits are above all others'.
inline float largest_magnitude(F32 a, F32 b) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  const __m512i both = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(a.v), magnitude),
                                        _mm512_and_si512(_mm512_castps_si512(b.v), magnitude));
  const uint32_t bits = _mm512_reduce_max_epu32(both);
  float result;
  __builtin_memcpy(&result, &bits, 4);
  return result;
}
inline int32_t sum(I32 a) { return _mm512_reduce_add_epi32(a.v); }
// The low bytes of 32 integers, and sums = those of 16 bytes each; gives both together, as a float.
inline float store_summed_bytes(int8_t* p, I32 a, I32 b, int32_t (&sums)[2]) {
  const __m256i bytes = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm512_cvtepi32_epi8(a.v)),
                                                _mm512_cvtepi32_epi8(b.v), 1);
  _mm256_storeu_si256((__m256i*)p, bytes);
  // Sums of eight bytes' distances to 0, of bytes from 0 to 255.
  const __m256i eights =
      _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m256i both = _mm256_sub_epi32(_mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0x4e)),
                                        _mm256_set1_epi32(16 * 128));
  const __m128i first = _mm256_castsi256_si128(both), second = _mm256_extracti128_si256(both, 1);
  _mm_storeu_si32(&sums[0], first);
  _mm_storeu_si32(&sums[1], second);
  return _mm_cvtss_f32(_mm_cvtepi32_ps(_mm_add_epi32(first, second)));
}

// 2^k for k held as a float, -126 <= k <= 127.
inline F32 power_of_two(F32 k) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(k.v), _mm512_set1_epi32(127)), 23))};
}
// x * 2^k for a whole k held as a float, rounded once; whatever k: 0 or infinity where the result has no
// place.
inline F32 scale(F32 x, F32 k) { return {_mm512_scalef_ps(x.v, k.v)}; }
inline F32 round(F32 a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }

// x times a scale of kernels.h, which is also given as its powers: by additions, which do not wait for the units that
// multiply. Exact where neither x nor a product with a power is 0, denormal, or not finite; a NaN is not passed on.
constexpr bool kScalesLoseNan = true;
inline F32 times_scale(F32 x, float, const uint32_t (&powers)[2]) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const auto times = [&](uint32_t power) {
    return _mm512_castsi512_ps(_mm512_add_epi32(bits, _mm512_set1_epi32(static_cast<int32_t>(power))));
  };
  return {_mm512_add_ps(times(powers[0]), times(powers[1]))};
}

using Mask = uint32_t;  // bit i: lane i
inline Mask first_lanes(int count) { return count >= 16 ? 0xffffu : (1u << count) - 1; }
inline F32 select(Mask m, F32 yes, F32 no) { return {_mm512_mask_blend_ps((__mmask16)m, no.v, yes.v)}; }
inline F32 load_masked(Mask m, const float* p) {  // other lanes: 0
  return {_mm512_maskz_loadu_ps((__mmask16)m, p)};
}
inline void store_masked(Mask m, float* p, F32 x) { _mm512_mask_storeu_ps(p, (__mmask16)m, x.v); }
inline Mask greater(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }
inline Mask not_less(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ); }
inline Mask equal(F32 a, F32 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
inline F32 where_not_less(F32 a, F32 b, F32 x) {  // x, and 0 where a is less than b
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GE_OQ), x.v)};
}
inline Mask not_less_unsigned(I32 a, I32 b) { return _mm512_cmp_epu32_mask(a.v, b.v, _MM_CMPINT_NLT); }
inline Mask is_nan(F32 a) { return _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q); }

// The lanes of `m`, side by side from p on. All 16 places are written; those after the lanes of `m` hold
// anything.
inline void store_packed(float* p, Mask m, F32 x) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps((__mmask16)m, x.v));
}
inline void store_packed(int32_t* p, Mask m, I32 x) {
  _mm512_storeu_si512(p, _mm512_maskz_compress_epi32((__mmask16)m, x.v));
}

}  // namespace
