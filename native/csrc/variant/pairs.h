// Attention over K and V in bf16, by products of pairs. Included by attention.h, where the instruction set has them.
//
// Theory of operation.
// - One instruction multiplies two bf16 numbers with two others in every lane and adds both products to a sum in fp32:
//   twice the rate of fp32 arithmetic. For scores the two are neighbouring elements of a head, for values neighbouring
//   tokens; K and V lie in the cache as it wants them (kernels.h).
// - Queries, and the weights of the values, are rounded to bf16. That is within what 8-bit activations cost, and not
//   within what exact ones promise, so this form is for the former alone.
// - Of a pair of which a row sees one token, the other one's value is made a zero: hidden values are never multiplied.

// weights[r][16 g + lane] = query r times key `lane` of group g, for kG groups.
template <int kR, int kG>
BF16_TARGET inline void score_pairs(const Strip& strip, const SpanView& span, int first) {
  F32 sums[kR][kG];
  const uint8_t *keys[kG], *after[kG];
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kG; ++g) sums[r][g] = splat(0.0f);
#pragma GCC unroll 4
  for (int g = 0; g < kG; ++g) {
    keys[g] = span.keys[first + g];
    after[g] = span.after_keys[first + g];
  }
  const float* q = strip.queries;  // a pair in the place of every float
  const int64_t end = int64_t{span.head_size / 2} * kLine;
  for (int64_t at = 0; at < end; at += kLine, ++q) {
    Pairs k[kG];
#pragma GCC unroll 4
    for (int g = 0; g < kG; ++g) {
      k[g] = load_pairs(keys[g] + at);
      ask_for(after[g] + at);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kR; ++r) {
      const Pairs pair = splat_pair(q + r * kQueryPitch);
#pragma GCC unroll 4
      for (int g = 0; g < kG; ++g) sums[r][g] = dot_pairs(sums[r][g], k[g], pair);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kG; ++g) store(strip.weights + r * kSpan + (first + g) * kLanes, sums[r][g]);
}

BF16_TARGET inline void pair_query(const float* q, float factor, int head_size, float* to) {
  for (int d = 0; d < head_size; d += kLanes) store_pairs(to + d / 2, load(q + d) * splat(factor));
}

// e^(x - peak), by way of 2^t, within 3e-6 of itself and the rounding of t: more than enough for a number that is
// rounded to bf16. Where x is -inf it is 0, and a NaN stays one.
inline F32 weight_of(F32 x, float peak) {
  constexpr float kLog2e = 1.44269504f;
  static constexpr float kPower[] = {9.99999261e-1f, 6.93121815e-1f, 2.40247448e-1f, 5.59178603e-2f, 9.5701019e-3f};
  const F32 t = max(splat(-200.0f), fma(x, splat(kLog2e), splat(-kLog2e * peak)));
  const F32 k = round(t);
  return scale(polynomial(kPower, t - k), k);
}

// Pairs of tokens [2 begin, 2 end), of which every row sees all, or (kRagged) some rows some.
template <int kR, int kV, bool kRagged>
BF16_TARGET inline void add_pairs(const Strip& strip, const SpanView& span, int first, int begin, int end,
                                  F32 (&sums)[kR][kV]) {
  constexpr int kGroupPairs = kLanes / 2;
  const int64_t pair_bytes = int64_t{span.head_size} * 4;
  for (int p = begin; p < end;) {
    const int64_t offset = (p % kGroupPairs) * pair_bytes + first * 4;
    const uint8_t *at = span.values[p / kGroupPairs] + offset, *after = span.after_values[p / kGroupPairs] + offset;
    const int stop = end < (p / kGroupPairs + 1) * kGroupPairs ? end : (p / kGroupPairs + 1) * kGroupPairs;
    for (; p < stop; ++p, at += pair_bytes, after += pair_bytes) {
      const float* weights = strip.weights + p;  // a pair in the place of every float
      Pairs x[kV];
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) {
        ask_for(after + v * kLine);
        x[v] = load_pairs(at + v * kLine);
      }
#pragma GCC unroll 6
      for (int r = 0; r < kR; ++r) {
        const Pairs pair = splat_pair(weights + r * kSpan);
        if constexpr (kRagged) {
          const Seen seen = strip.seen[r];
          const bool sees_first = seen.begin <= 2 * p && 2 * p < seen.end;
          const bool sees_second = seen.begin <= 2 * p + 1 && 2 * p + 1 < seen.end;
          if (!sees_first && !sees_second) continue;
#pragma GCC unroll 4
          for (int v = 0; v < kV; ++v) {
            const Pairs shown = !sees_second ? only_first(x[v]) : !sees_first ? only_second(x[v]) : x[v];
            sums[r][v] = dot_pairs(sums[r][v], shown, pair);
          }
        } else {
#pragma GCC unroll 4
          for (int v = 0; v < kV; ++v) sums[r][v] = dot_pairs(sums[r][v], x[v], pair);
        }
      }
    }
  }
}

// partials[r][first ... first + 16 kV) = the values' elements, weighted and added in the order of pairs of tokens.
template <int kR, int kV>
BF16_TARGET inline void add_paired_values(const Strip& strip, const SpanView& span, int first) {
  F32 sums[kR][kV];
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) sums[r][v] = splat(0.0f);
  const int begin = strip.all.begin / 2, end = (strip.all.end + 1) / 2;
  const int begin_common = (strip.common.begin + 1) / 2, end_common = strip.common.end / 2;
  if (begin_common < end_common) {
    add_pairs<kR, kV, true>(strip, span, first, begin, begin_common, sums);
    add_pairs<kR, kV, false>(strip, span, first, begin_common, end_common, sums);
    add_pairs<kR, kV, true>(strip, span, first, end_common, end, sums);
  } else {
    add_pairs<kR, kV, true>(strip, span, first, begin, end, sums);
  }
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v)
      store(strip.partials + r * partial_pitch(span.head_size) + first + v * kLanes, sums[r][v]);
}

template <int kR>
BF16_TARGET void attend_paired_strip(const Strip& strip, const SpanView& span) {
  constexpr int kWide = vectors_of(kR);
  const int end_group = (strip.all.end + kLanes - 1) / kLanes;
  int g = strip.all.begin / kLanes;
  for (; g + kWide <= end_group; g += kWide) score_pairs<kR, kWide>(strip, span, g);
  for (; g < end_group; ++g) score_pairs<kR, 1>(strip, span, g);
  // Pairs of weights come to stand from the row's begin on: what is written was read before.
  weigh<kR>(strip, span, [](float* row, int g, float peak) BF16_TARGET {
    const F32 weight = weight_of(load(row + g * kLanes), peak);
    store_pairs(row + g * (kLanes / 2), weight);
    return weight;
  });
  int d = 0;
  for (; d + kWide * kLanes <= span.head_size; d += kWide * kLanes) add_paired_values<kR, kWide>(strip, span, d);
  for (; d < span.head_size; d += kLanes) add_paired_values<kR, 1>(strip, span, d);
}
