// 16 lanes in two 256-bit registers. The twin of avx512.h: the same names, the same results per lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace {

// What the registers hold: rows of an integer tile, and vectors of sums of a float tile.
constexpr int kTileRows = 6, kTileSums = 6;
constexpr int kStripSums = 6;

struct F32 {
  __m256 lo, hi;
};
struct I32 {
  __m256i lo, hi;
};
struct Bytes {  // 64 of them: four per lane
  __m256i lo, hi;
};

inline F32 splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline I32 splat(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline I32 load(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
inline F32 load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
// One of the two bf16 numbers in every lane: the first is the low half.
inline F32 load_bf16(const uint8_t* pairs, int which) {
  auto half = [which](const uint8_t* p) {
    const __m256i both = _mm256_loadu_si256((const __m256i*)p);
    return _mm256_castsi256_ps(which == 0 ? _mm256_slli_epi32(both, 16)
                                          : _mm256_andnot_si256(_mm256_set1_epi32(0xffff), both));
  };
  return {half(pairs), half(pairs + 32)};
}
inline F32 load_i8(const int8_t* p) {
  auto half = [](const int8_t* q) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)q)));
  };
  return {half(p), half(p + 8)};
}
inline void store(float* p, F32 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
inline void store(int32_t* p, I32 x) {
  _mm256_storeu_si256((__m256i*)p, x.lo);
  _mm256_storeu_si256((__m256i*)(p + 8), x.hi);
}
inline void store_half(uint16_t* p, F32 x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT;
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.lo, kNearest));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.hi, kNearest));
}
// To nearest, ties to even; a NaN stays one.
inline void store_bf16(uint16_t* p, F32 x) {
  auto half = [](__m256 v) {
    const __m256i bits = _mm256_castps_si256(v);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, odd), _mm256_set1_epi32(0x7fff));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  };
  const __m256i both = _mm256_packus_epi32(half(x.lo), half(x.hi));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(both, 0xd8));
}
inline void store_low_bytes(int8_t* p, I32 x) {
  const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                        0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
  auto half = [&](int8_t* q, __m256i y) {
    y = _mm256_shuffle_epi8(y, pick);
    __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1));
    _mm_storel_epi64((__m128i*)q, both);
  };
  half(p, x.lo);
  half(p + 8, x.hi);
}

#define BOTH(type, f) \
  type { f(a.lo), f(a.hi) }
#define PAIR(type, f) \
  type { f(a.lo, b.lo), f(a.hi, b.hi) }
inline F32 operator+(F32 a, F32 b) { return PAIR(F32, _mm256_add_ps); }
inline F32 operator-(F32 a, F32 b) { return PAIR(F32, _mm256_sub_ps); }
inline F32 operator*(F32 a, F32 b) { return PAIR(F32, _mm256_mul_ps); }
inline F32 operator/(F32 a, F32 b) { return PAIR(F32, _mm256_div_ps); }
inline I32 operator+(I32 a, I32 b) { return PAIR(I32, _mm256_add_epi32); }
inline F32 max(F32 a, F32 b) { return PAIR(F32, _mm256_max_ps); }
inline F32 min(F32 a, F32 b) { return PAIR(F32, _mm256_min_ps); }
inline F32 to_float(I32 a) { return BOTH(F32, _mm256_cvtepi32_ps); }
inline I32 round_to_int(F32 a) { return BOTH(I32, _mm256_cvtps_epi32); }
#undef BOTH
#undef PAIR
inline F32 fma(F32 a, F32 b, F32 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32 fnma(F32 a, F32 b, F32 c) {
  return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline F32 fma_turn(F32 a, F32 b, F32 c) {
  return {_mm256_fmaddsub_ps(a.lo, b.lo, c.lo), _mm256_fmaddsub_ps(a.hi, b.hi, c.hi)};
}
inline F32 swap_pairs(F32 a) { return {_mm256_permute_ps(a.lo, 0xb1), _mm256_permute_ps(a.hi, 0xb1)}; }
inline F32 load_doubled(const float* p) {
  const __m256 eight = _mm256_loadu_ps(p);
  return {_mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3)),
          _mm256_permutevar8x32_ps(eight, _mm256_setr_epi32(4, 4, 5, 5, 6, 6, 7, 7))};
}
inline F32 abs(F32 a) {
  const __m256 rest = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, rest), _mm256_and_ps(a.hi, rest)};
}
template <int kBits>
inline I32 shift_left(I32 a) {
  return {_mm256_slli_epi32(a.lo, kBits), _mm256_slli_epi32(a.hi, kBits)};
}
template <int kBits>
inline I32 shift_right(I32 a) {
  return {_mm256_srai_epi32(a.lo, kBits), _mm256_srai_epi32(a.hi, kBits)};
}
template <int kBits>
inline I32 shift_right_unsigned(I32 a) {
  return {_mm256_srli_epi32(a.lo, kBits), _mm256_srli_epi32(a.hi, kBits)};
}
inline I32 operator*(I32 a, I32 b) {
  return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)};
}
inline I32 operator^(I32 a, I32 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }

inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline Bytes low_nibbles(Bytes b) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.lo, low), _mm256_and_si256(b.hi, low)};
}
inline Bytes high_nibbles(Bytes b) {
  const __m256i low = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(b.lo, 4), low),
          _mm256_and_si256(_mm256_srli_epi16(b.hi, 4), low)};
}

// Each lane's products of 4 * kWords codes of at most 15 with as many signed bytes, which are the same for
// all lanes, added to `sum`. Exact: the 16 bits in which two products at a time are summed hold eight pairs
// of them.
template <int kWords>
inline I32 dot_row_of_nibbles(I32 sum, const Bytes* codes, const int8_t* activations) {
  static_assert(kWords <= 8);
  __m256i lo = _mm256_setzero_si256(), hi = lo;
#pragma GCC unroll 8
  for (int j = 0; j < kWords; ++j) {
    int32_t word;
    __builtin_memcpy(&word, activations + 4 * j, 4);
    const __m256i w = _mm256_set1_epi32(word);
    lo = _mm256_add_epi16(lo, _mm256_maddubs_epi16(codes[j].lo, w));
    hi = _mm256_add_epi16(hi, _mm256_maddubs_epi16(codes[j].hi, w));
  }
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_add_epi32(sum.lo, _mm256_madd_epi16(lo, ones)),
          _mm256_add_epi32(sum.hi, _mm256_madd_epi16(hi, ones))};
}
// The same for any bytes, as 16 times their high nibbles and their low ones.
template <int kWords>
inline I32 dot_row_of_bytes(I32 sum, const Bytes* codes, const int8_t* activations) {
  Bytes low[kWords], high[kWords];
#pragma GCC unroll 8
  for (int j = 0; j < kWords; ++j) {
    low[j] = low_nibbles(codes[j]);
    high[j] = high_nibbles(codes[j]);
  }
  const I32 sixteenths = dot_row_of_nibbles<kWords>(splat(0), high, activations);
  return dot_row_of_nibbles<kWords>(sum + shift_left<4>(sixteenths), low, activations);
}

// Of kRows rows, whose activations begin `pitch` bytes apart.
template <int kWords, int kRows>
inline void dot_nibbles(I32 (&sums)[kRows], const Bytes* codes, const int8_t* activations, int pitch) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = dot_row_of_nibbles<kWords>(sums[r], codes, activations + r * pitch);
}
template <int kWords, int kRows>
inline void dot_bytes(I32 (&sums)[kRows], const Bytes* codes, const int8_t* activations, int pitch) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) sums[r] = dot_row_of_bytes<kWords>(sums[r], codes, activations + r * pitch);
}

// Across lanes, always in the order of this tree: halves, quarters, eighths, neighbours.
inline float sum(F32 a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float largest(F32 a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}
// Of all lanes of both; a NaN if there is one, for then its bits are above all others'.
inline float largest_magnitude(F32 a, F32 b) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  const auto bits_of = [&](__m256 x) { return _mm256_and_si256(_mm256_castps_si256(x), magnitude); };
  const __m256i h = _mm256_max_epu32(_mm256_max_epu32(bits_of(a.lo), bits_of(a.hi)),
                                     _mm256_max_epu32(bits_of(b.lo), bits_of(b.hi)));
  __m128i q = _mm_max_epu32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_max_epu32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epu32(q, _mm_shuffle_epi32(q, 0xb1))));
}
inline int32_t sum(I32 a) {
  __m256i h = _mm256_add_epi32(a.lo, a.hi);
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128(h), _mm256_extracti128_si256(h, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
// The low bytes of 32 integers, and sums = those of 16 bytes each; gives both together, as a float.
inline float store_summed_bytes(int8_t* p, I32 a, I32 b, int32_t (&sums)[2]) {
  store_low_bytes(p, a);
  store_low_bytes(p + 16, b);
  sums[0] = sum(a);
  sums[1] = sum(b);
  return static_cast<float>(sums[0] + sums[1]);
}

inline F32 power_of_two(F32 k) {
  auto half = [](__m256 x) {
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  };
  return {half(k.lo), half(k.hi)};
}
// Two factors, for one reaches neither the smallest nor the largest results; the first product is exact.
inline F32 scale(F32 x, F32 k) {
  auto half = [](__m256 y, __m256 n) {
    n = _mm256_max_ps(_mm256_set1_ps(-250.0f), _mm256_min_ps(_mm256_set1_ps(250.0f), n));
    const __m256i all = _mm256_cvtps_epi32(n), first = _mm256_srai_epi32(all, 1),
                  rest = _mm256_sub_epi32(all, first);
    const __m256i bias = _mm256_set1_epi32(127);
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
  };
  return {half(x.lo, k.lo), half(x.hi, k.hi)};
}
inline F32 round(F32 a) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kNearest), _mm256_round_ps(a.hi, kNearest)};
}

// x times a scale of kernels.h, which is also given as its powers.
constexpr bool kScalesLoseNan = false;
inline F32 times_scale(F32 x, float scale, const uint32_t (&)[2]) { return x * splat(scale); }

using Mask = uint32_t;  // bit i: lane i
inline Mask first_lanes(int count) { return count >= 16 ? 0xffffu : (1u << count) - 1; }
inline __m256i spread(Mask m) {  // bit i to all bits of lane i, of eight
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)m), bits), bits);
}
inline F32 select(Mask m, F32 yes, F32 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_castsi256_ps(spread(m))),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_castsi256_ps(spread(m >> 8)))};
}
inline F32 load_masked(Mask m, const float* p) {
  return {_mm256_maskload_ps(p, spread(m)), _mm256_maskload_ps(p + 8, spread(m >> 8))};
}
inline void store_masked(Mask m, float* p, F32 x) {
  _mm256_maskstore_ps(p, spread(m), x.lo);
  _mm256_maskstore_ps(p + 8, spread(m >> 8), x.hi);
}
template <int kPredicate>
inline Mask compare(F32 a, F32 b) {
  return (Mask)_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, kPredicate)) |
         (Mask)_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, kPredicate)) << 8;
}
inline Mask greater(F32 a, F32 b) { return compare<_CMP_GT_OQ>(a, b); }
inline Mask not_less(F32 a, F32 b) { return compare<_CMP_GE_OQ>(a, b); }
inline Mask equal(F32 a, F32 b) { return compare<_CMP_EQ_OQ>(a, b); }
inline Mask is_nan(F32 a) { return compare<_CMP_UNORD_Q>(a, a); }
inline F32 where_not_less(F32 a, F32 b, F32 x) {  // x, and 0 where a is less than b
  return {_mm256_and_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), x.lo),
          _mm256_and_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ), x.hi)};
}
inline Mask not_less_unsigned(I32 a, I32 b) {  // where the larger of the two is a
  auto half = [](__m256i x, __m256i y) {
    return (Mask)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_max_epu32(x, y), x)));
  };
  return half(a.lo, b.lo) | half(a.hi, b.hi) << 8;
}

// The lanes of m, of eight, moved to the front: as many bytes of the lanes' numbers as the mask has bits are
// extracted side by side.
inline __m256i packing(Mask m) {
  const uint64_t lanes = _pext_u64(0x0706050403020100u, _pdep_u64(m & 0xff, 0x0101010101010101u) * 0xff);
  return _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((long long)lanes));
}
inline void store_packed(int32_t* p, Mask m, I32 x) {
  _mm256_storeu_si256((__m256i*)p, _mm256_permutevar8x32_epi32(x.lo, packing(m)));
  _mm256_storeu_si256((__m256i*)(p + __builtin_popcount(m & 0xff)),
                      _mm256_permutevar8x32_epi32(x.hi, packing(m >> 8)));
}
inline void store_packed(float* p, Mask m, F32 x) {
  store_packed((int32_t*)p, m, I32{_mm256_castps_si256(x.lo), _mm256_castps_si256(x.hi)});
}

}  // namespace
