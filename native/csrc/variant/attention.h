// Attention over the paged KV cache, and writing it. Included by variant.cpp, inside its namespaces.
//
// Theory of operation.
// - A row is one query head of one token. In a span (attention_plan.h) it sees the tokens [begin, end): it
//   multiplies its query with their keys, takes the largest score, one exp of every score's distance to it,
//   and adds the values with these weights. That is its partial result; `join` adds a later span's to an
//   earlier one's.
// - The terms of a score are added in the order of the head's elements, the values in the order of tokens,
//   the weights of a span lane by lane of its groups of 16 tokens. None of it depends on the rows beside.
// - Rows are computed in *strips* of up to 6, so that a key or value is widened to floats once for all of
//   them, and sums stay in registers: 6 rows times 4 vectors of 16 tokens (then: elements) where the
//   registers allow.
//
// Invariant: what a row may not see never reaches it, not even as 0 * NaN. Scores of hidden tokens are
// overwritten, and hidden values are never multiplied.

constexpr int kStripRows = 6;
constexpr int kSpanGroups = kSpan / kLanes;
constexpr int kLine = 64;  // bytes of a line of the caches
// Floats. Not a power of two, or rows would meet in the L1 cache.
constexpr int kQueryPitch = kMaxHeadSize + kLanes;
// Finite, so that exp(score - largest) is 0 and not a NaN where all scores are -inf.
constexpr float kLowestScore = -1e30f;

// ---- the cache --------------------------------------------------------------------------------------------

constexpr int bytes_of(KVForm form) { return form == KVForm::F32 ? 4 : form == KVForm::I8 ? 1 : 2; }

template <KVForm kForm>
inline F32 load_kv(const uint8_t* p) {
  if constexpr (kForm == KVForm::F32) return load(reinterpret_cast<const float*>(p));
  if constexpr (kForm == KVForm::F16) return load_half(reinterpret_cast<const uint16_t*>(p));
  if constexpr (kForm == KVForm::I8) return load_i8(reinterpret_cast<const int8_t*>(p));
}

// One KV head of one block.
struct HeadBlock {
  uint8_t *keys, *values;
  float *key_scales, *value_scales;  // of KVForm::I8
};

inline HeadBlock head_block(const KVCache& cache, int64_t block, int head) {
  const int64_t bytes = int64_t{cache.block_size} * cache.head_size * bytes_of(cache.form);
  const int64_t scales = cache.form == KVForm::I8 ? cache.block_size : 0;
  uint8_t* keys = cache.data + block * cache.block_stride + head * (2 * bytes + 8 * scales);
  auto* key_scales = reinterpret_cast<float*>(keys + 2 * bytes);
  return {keys, keys + bytes, key_scales, key_scales + scales};
}

// Element d of token i of a group of 16 keys stands at [d][i].
template <typename T>
inline void scatter_key(const T* lanes, uint8_t* group, int first, int token) {
  T* to = reinterpret_cast<T*>(group) + first * kLanes + token;
  for (int i = 0; i < kLanes; ++i) to[i * kLanes] = lanes[i];
}

// Numbers of a head to every second place, where their pairs' other halves are another token's.
inline void scatter_pairs(const uint16_t* lanes, uint8_t* to, int first_place) {
  auto* places = reinterpret_cast<uint16_t*>(to) + first_place;
  for (int i = 0; i < kLanes; ++i) places[2 * i] = lanes[i];
}

// Pairs of a key's elements: element d of token i of a group of 16 stands at [d / 2][i][d % 2].
inline void scatter_key_pairs(const uint16_t* lanes, uint8_t* group, int first, int token) {
  auto* to = reinterpret_cast<uint16_t*>(group) + first * kLanes + 2 * token;
  for (int i = 0; i < kLanes; i += 2) __builtin_memcpy(to + i * kLanes, lanes + i, 4);
}

// The scale of a row of 8-bit codes. A NaN or an infinity among the elements makes it a NaN, and so all
// that is computed from the row.
inline float code_scale(const float* x, int count) {
  F32 top = splat(0.0f), spoiled = splat(0.0f);
  for (int i = 0; i < count; i += kLanes) {
    const F32 v = load(x + i);
    top = max(top, abs(v));
    spoiled = fma(v, splat(0.0f), spoiled);
  }
  return largest(top) / 127.0f + sum(spoiled);
}

template <KVForm kForm>
void write_head(const KVCache& cache, const float* key, const float* value, int64_t block, int head, int at) {
  const HeadBlock to = head_block(cache, block, head);
  const int size = cache.head_size, token = at % kLanes;
  uint8_t* group = to.keys + int64_t{at - token} * size * bytes_of(kForm);
  uint8_t* row = to.values + int64_t{at} * size * bytes_of(kForm);
  F32 key_factor = splat(0.0f), value_factor = key_factor;
  if constexpr (kForm == KVForm::I8) {
    const float key_scale = code_scale(key, size), value_scale = code_scale(value, size);
    to.key_scales[at] = key_scale;
    to.value_scales[at] = value_scale;
    key_factor = splat(key_scale > 0.0f ? 1.0f / key_scale : 0.0f);
    value_factor = splat(value_scale > 0.0f ? 1.0f / value_scale : 0.0f);
  }
  for (int d = 0; d < size; d += kLanes) {
    const F32 k = load(key + d), v = load(value + d);
    if constexpr (kForm == KVForm::F32) {
      scatter_key(key + d, group, d, token);
      store(reinterpret_cast<float*>(row) + d, v);
    } else if constexpr (kForm == KVForm::F16) {
      uint16_t lanes[kLanes];
      store_half(lanes, k);
      scatter_key(lanes, group, d, token);
      store_half(reinterpret_cast<uint16_t*>(row) + d, v);
    } else if constexpr (kForm == KVForm::BF16) {
      uint16_t lanes[kLanes];
      store_bf16(lanes, k);
      scatter_key_pairs(lanes, group, d, token);
      store_bf16(lanes, v);
      scatter_pairs(lanes, to.values + int64_t{at - at % 2} * size * bytes_of(kForm), 2 * d + at % 2);
    } else {
      int8_t lanes[kLanes];
      store_low_bytes(lanes, round_to_int(k * key_factor));
      scatter_key(lanes, group, d, token);
      store_low_bytes(reinterpret_cast<int8_t*>(row) + d, round_to_int(v * value_factor));
    }
  }
}

void write_kv(const KVCache& cache, const float* kv, int64_t slot) {
  const auto write = cache.form == KVForm::F32   ? write_head<KVForm::F32>
                     : cache.form == KVForm::F16 ? write_head<KVForm::F16>
                     : cache.form == KVForm::I8  ? write_head<KVForm::I8>
                                                 : write_head<KVForm::BF16>;
  const int64_t block = slot / cache.block_size, values = int64_t{cache.num_kv_heads} * cache.head_size;
  const int at = static_cast<int>(slot % cache.block_size);
  for (int h = 0; h < cache.num_kv_heads; ++h) {
    const float* key = kv + int64_t{h} * cache.head_size;
    write(cache, key, key + values, block, h, at);
  }
}

// ---- a strip of rows in one span --------------------------------------------------------------------------

// The tokens of a span that are seen: [begin, end), counted from its first; may be empty.
struct Seen {
  int begin, end;
};
inline Seen either(Seen a, Seen b) {
  return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}
inline Seen both(Seen a, Seen b) {
  return {a.begin > b.begin ? a.begin : b.begin, a.end < b.end ? a.end : b.end};
}

// Where the groups of 16 tokens of a span lie, for one KV head. Set for the groups that `seen` touches.
struct SpanView {
  int head_size;
  float soft_cap;
  KVForm form;
  Seen seen;  // by any row
  const uint8_t* keys[kSpanGroups];
  const uint8_t* values[kSpanGroups];
  const float* key_scales[kSpanGroups];  // of KVForm::I8
  const float* value_scales[kSpanGroups];
  // What will be read next, of the same size as keys[g] and values[g]: asked for while these are read.
  const uint8_t* after_keys[kSpanGroups];
  const uint8_t* after_values[kSpanGroups];
};

inline void ask_for(const uint8_t* p) { __builtin_prefetch(p, 0, 2); }

struct Strip {
  const float* queries;  // [rows][kQueryPitch], times the scale of the scores; of KVForm::BF16: pairs of bf16
  Seen seen[kStripRows];
  Seen all;         // the tokens that some row sees
  Seen common;      // those that every row sees; may be empty
  float* weights;   // [rows][kSpan]: scores, then their weights
  float* partials;  // [rows][partial_pitch]
};

// weights[r][16 g + lane] = query r times key `lane` of group g, for kG groups.
template <KVForm kForm, int kR, int kG>
inline void score_groups(const Strip& strip, const SpanView& span, int first) {
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
  const float* q = strip.queries;
  const int64_t end = int64_t{span.head_size} * kLanes * bytes_of(kForm);
  for (int64_t at = 0; at < end; at += kLanes * bytes_of(kForm), ++q) {
    F32 k[kG];
#pragma GCC unroll 4
    for (int g = 0; g < kG; ++g) k[g] = load_kv<kForm>(keys[g] + at);
    if (at % kLine == 0) {
#pragma GCC unroll 4
      for (int g = 0; g < kG; ++g) ask_for(after[g] + at);
    }
#pragma GCC unroll 6
    for (int r = 0; r < kR; ++r) {
      const F32 element = splat(q[r * kQueryPitch]);
#pragma GCC unroll 4
      for (int g = 0; g < kG; ++g) sums[r][g] = fma(element, k[g], sums[r][g]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int g = 0; g < kG; ++g) store(strip.weights + r * kSpan + (first + g) * kLanes, sums[r][g]);
}

// Scores as they should be, -inf where a row does not see the token, for 16 tokens of one row.
inline F32 finish_scores(const Strip& strip, const SpanView& span, int r, int g) {
  float* at = strip.weights + r * kSpan + g * kLanes;
  const int begin = strip.seen[r].begin - g * kLanes, end = strip.seen[r].end - g * kLanes;
  F32 x = load(at);
  if (span.form == KVForm::I8) x = x * load(span.key_scales[g]);
  if (span.soft_cap != 0.0f) x = capped(x, span.soft_cap);
  const Mask before = begin > 0 ? first_lanes(begin) : 0, seen = end > 0 ? first_lanes(end) & ~before : 0;
  x = select(seen, x, splat(-__builtin_inff()));
  store(at, x);
  return x;
}

// Scores to weights, by weight(place, g, peak) for 16 tokens at a time, of all rows in turns, so that none waits for
// itself. The largest scores and the sums of the weights go to the ends of the partial results.
template <int kR, typename Weight>
inline __attribute__((always_inline)) void weigh(const Strip& strip, const SpanView& span, Weight weight) {
  const int first = strip.all.begin / kLanes, end = (strip.all.end + kLanes - 1) / kLanes;
  // Groups of which nothing has to be changed.
  const bool as_they_are = span.form != KVForm::I8 && span.soft_cap == 0.0f;
  const int first_plain = as_they_are ? (strip.common.begin + kLanes - 1) / kLanes : end;
  const int end_plain = strip.common.end / kLanes;
  F32 tops[kR], totals[kR];
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r) tops[r] = splat(kLowestScore);
  for (int g = first; g < end; ++g) {
    const bool plain = g >= first_plain && g < end_plain;
#pragma GCC unroll 6
    for (int r = 0; r < kR; ++r)
      tops[r] = max(tops[r], plain ? load(strip.weights + r * kSpan + g * kLanes) : finish_scores(strip, span, r, g));
  }
  float peaks[kR];
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r) {
    peaks[r] = largest(tops[r]);
    totals[r] = splat(0.0f);
  }
  for (int g = first; g < end; ++g)
#pragma GCC unroll 6
    for (int r = 0; r < kR; ++r) totals[r] = totals[r] + weight(strip.weights + r * kSpan, g, peaks[r]);
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r) {
    float* partial = strip.partials + r * partial_pitch(span.head_size) + span.head_size;
    partial[0] = peaks[r];
    partial[1] = sum(totals[r]);
  }
}

// partials[r][first ... first + 16 kV) = the values' elements, weighted and added in the order of tokens.
template <KVForm kForm, int kR, int kV>
inline void add_values(const Strip& strip, const SpanView& span, int first) {
  F32 sums[kR][kV];
#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) sums[r][v] = splat(0.0f);
  const int64_t row_bytes = int64_t{span.head_size} * bytes_of(kForm);
  const int64_t first_bytes = int64_t{first} * bytes_of(kForm);

  // Tokens [begin, end) of which every row sees all, or (kRagged) some rows some.
  const auto add_tokens = [&]<bool kRagged>(int begin, int end) {
    for (int t = begin; t < end;) {
      const int64_t offset = (t % kLanes) * row_bytes + first_bytes;
      const uint8_t *at = span.values[t / kLanes] + offset, *after = span.after_values[t / kLanes] + offset;
      const int stop = end < (t / kLanes + 1) * kLanes ? end : (t / kLanes + 1) * kLanes;
      for (; t < stop; ++t, at += row_bytes, after += row_bytes) {
        const float* weights = strip.weights + t;
        F32 x[kV];
        for (int b = 0; b < kV * kLanes * bytes_of(kForm); b += kLine) ask_for(after + b);
#pragma GCC unroll 4
        for (int v = 0; v < kV; ++v) x[v] = load_kv<kForm>(at + v * kLanes * bytes_of(kForm));
#pragma GCC unroll 6
        for (int r = 0; r < kR; ++r) {
          if (kRagged && (t < strip.seen[r].begin || t >= strip.seen[r].end)) continue;
          const F32 weight = splat(weights[r * kSpan]);
#pragma GCC unroll 4
          for (int v = 0; v < kV; ++v) sums[r][v] = fma(weight, x[v], sums[r][v]);
        }
      }
    }
  };
  if (strip.common.begin < strip.common.end) {
    add_tokens.template operator()<true>(strip.all.begin, strip.common.begin);
    add_tokens.template operator()<false>(strip.common.begin, strip.common.end);
    add_tokens.template operator()<true>(strip.common.end, strip.all.end);
  } else {
    add_tokens.template operator()<true>(strip.all.begin, strip.all.end);
  }

#pragma GCC unroll 6
  for (int r = 0; r < kR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v)
      store(strip.partials + r * partial_pitch(span.head_size) + first + v * kLanes, sums[r][v]);
}

// How many vectors a row of a strip of `rows` may have in registers.
constexpr int vectors_of(int rows) {
  const int fit = kStripSums / rows;
  return fit >= 4 ? 4 : fit >= 2 ? 2 : 1;
}

template <KVForm kForm, int kR>
void attend_strip(const Strip& strip, const SpanView& span) {
  constexpr int kWide = vectors_of(kR);
  const int end_group = (strip.all.end + kLanes - 1) / kLanes;
  int g = strip.all.begin / kLanes;
  for (; g + kWide <= end_group; g += kWide) score_groups<kForm, kR, kWide>(strip, span, g);
  for (; g < end_group; ++g) score_groups<kForm, kR, 1>(strip, span, g);
  weigh<kR>(strip, span, [&](float* row, int g, float peak) {
    const F32 weight = exp(load(row + g * kLanes) - splat(peak));
    const F32 scaled = kForm == KVForm::I8 ? weight * load(span.value_scales[g]) : weight;
    store(row + g * kLanes, scaled);
    return weight;
  });
  int d = 0;
  for (; d + kWide * kLanes <= span.head_size; d += kWide * kLanes)
    add_values<kForm, kR, kWide>(strip, span, d);
  for (; d < span.head_size; d += kLanes) add_values<kForm, kR, 1>(strip, span, d);
}

#ifdef BF16_TARGET
#include "pairs.h"
#endif

using AttendStrip = void (*)(const Strip&, const SpanView&);

constexpr AttendStrip kAttendStrip[][kStripRows] = {
    {attend_strip<KVForm::F32, 1>, attend_strip<KVForm::F32, 2>, attend_strip<KVForm::F32, 3>,
     attend_strip<KVForm::F32, 4>, attend_strip<KVForm::F32, 5>, attend_strip<KVForm::F32, 6>},
    {attend_strip<KVForm::F16, 1>, attend_strip<KVForm::F16, 2>, attend_strip<KVForm::F16, 3>,
     attend_strip<KVForm::F16, 4>, attend_strip<KVForm::F16, 5>, attend_strip<KVForm::F16, 6>},
    {attend_strip<KVForm::I8, 1>, attend_strip<KVForm::I8, 2>, attend_strip<KVForm::I8, 3>,
     attend_strip<KVForm::I8, 4>, attend_strip<KVForm::I8, 5>, attend_strip<KVForm::I8, 6>},
#ifdef BF16_TARGET
    {attend_paired_strip<1>, attend_paired_strip<2>, attend_paired_strip<3>, attend_paired_strip<4>,
     attend_paired_strip<5>, attend_paired_strip<6>},
#endif
};

// ---- partial results --------------------------------------------------------------------------------------

inline void copy_partial(float* to, const float* from, int head_size) {
  for (int d = 0; d < partial_pitch(head_size); d += kLanes) store(to + d, load(from + d));
}

// Add a later span's partial result to that of the spans before it.
inline void join(float* sums, const float* part, int head_size) {
  const float peak = sums[head_size], other = part[head_size];
  const bool rises = other > peak;
  float fade[kLanes];  // of what has the smaller peak
  store(fade, exp(splat(rises ? peak - other : other - peak)));
  const F32 old_factor = splat(rises ? fade[0] : 1.0f), new_factor = splat(rises ? 1.0f : fade[0]);
  for (int d = 0; d < head_size; d += kLanes)
    store(sums + d, fma(load(sums + d), old_factor, load(part + d) * new_factor));
  float total[kLanes];
  store(total, fma(splat(sums[head_size + 1]), old_factor, splat(part[head_size + 1]) * new_factor));
  sums[head_size] = rises ? other : peak;
  sums[head_size + 1] = total[0];
}

// ---- jobs -------------------------------------------------------------------------------------------------

// One row of a job, and which tokens of its request it sees.
struct Row {
  const AttentionTile* tile;
  int number;      // in its tile: token * query heads of a KV head + query head
  int begin, end;  // tokens of its request
};

// The part of a span that a row sees; may be empty.
inline Seen seen_in(const Row& row, int span) {
  const int first = span * kSpan;
  return {row.begin > first ? row.begin - first : 0, row.end - first < kSpan ? row.end - first : kSpan};
}
inline bool sees(const Row& row, int span) {
  const Seen seen = seen_in(row, span);
  return seen.begin < seen.end;
}

// Computes the jobs of one KV head.
class Worker {
 public:
  Worker(const AttentionArgs& args, int head, float* scratch)
      : args_(args),
        shape_(args.shape),
        head_(head),
        heads_per_kv_(args.shape.num_heads / args.shape.num_kv_heads),
        pitch_(partial_pitch(args.shape.head_size)),
        queries_(scratch),
        sums_(queries_ + kAttentionRows * kQueryPitch),
        weights_(sums_ + kAttentionRows * partial_pitch(kMaxHeadSize)),
        parts_(weights_ + kStripRows * kSpan),
        line_(parts_ + kStripRows * partial_pitch(kMaxHeadSize)) {}

  void run(const AttentionUnit& unit) {
    const AttentionPlan& plan = *args_.plan;
    const AttentionJob* job = plan.jobs + unit.first_job;
    const AttentionJob* const end = job + unit.num_jobs;
    SpanView view = view_of(*job, job->first_span);
    for (; job < end; ++job) {
      num_rows_ = 0;
      for (int i = 0; i < job->num_members; ++i) take_tile(member(*job, i));
      for (int i = 0; i < job->num_spans; ++i) {
        SpanView next = view;
        if (i + 1 < job->num_spans) {
          next = view_of(*job, job->first_span + i + 1);
        } else if (job + 1 < end) {
          next = view_of(job[1], job[1].first_span);
        }
        foresee(view, next);
        attend_span(view, job->first_span + i);
        view = next;
      }
      end_job(*job);
    }
  }

 private:
  const AttentionTile& member(const AttentionJob& job, int i) const {
    return args_.plan->tiles[args_.plan->members[job.first_member + i]];
  }

  void take_tile(const AttentionTile& tile) {
    take_queries(tile);
    take_rows(tile);
  }

  Row row_of(const AttentionTile& tile, int token, int query_head) const {
    const int position = tile.position + token;
    const int begin = shape_.window && position >= shape_.window ? position - shape_.window + 1 : 0;
    return {&tile, token * heads_per_kv_ + query_head, begin, shape_.causal ? position + 1 : tile.seq_len};
  }

  void take_rows(const AttentionTile& tile) {
    for (int t = 0; t < tile.num_tokens; ++t)
      for (int h = 0; h < heads_per_kv_; ++h) rows_[num_rows_++] = row_of(tile, t, h);
  }

  void take_queries(const AttentionTile& tile) {
    const int size = shape_.head_size;
    float* to = queries_ + num_rows_ * kQueryPitch;
    for (int t = 0; t < tile.num_tokens; ++t) {
      const float* q =
          args_.q + (tile.first_token + t) * args_.q_stride + int64_t{head_} * heads_per_kv_ * size;
      for (int h = 0; h < heads_per_kv_; ++h, q += size, to += kQueryPitch) take_query(q, to);
    }
  }

  void take_query(const float* q, float* to) const {
#ifdef BF16_TARGET
    if (args_.cache.form == KVForm::BF16) return pair_query(q, shape_.scale, shape_.head_size, to);
#endif
    for (int d = 0; d < shape_.head_size; d += kLanes) store(to + d, load(q + d) * splat(shape_.scale));
  }

  // What no row sees is not looked up: the table may hold anything there. All members of a job have the
  // same blocks.
  SpanView view_of(const AttentionJob& job, int span) const {
    const KVCache& cache = args_.cache;
    SpanView view;
    view.head_size = cache.head_size;
    view.soft_cap = shape_.soft_cap;
    view.form = cache.form;
    view.seen = {kSpan, 0};
    for (int i = 0; i < job.num_members; ++i) {
      const AttentionTile& tile = member(job, i);
      const Seen first = seen_in(row_of(tile, 0, 0), span);
      const Seen last = seen_in(row_of(tile, tile.num_tokens - 1, 0), span);
      if (first.begin < last.end) view.seen = either(view.seen, {first.begin, last.end});
    }
    const int32_t* blocks = member(job, 0).blocks;
    const int64_t group_bytes = int64_t{kLanes} * cache.head_size * bytes_of(cache.form);
    for (int g = view.seen.begin / kLanes; g * kLanes < view.seen.end; ++g) {
      const int token = span * kSpan + g * kLanes, group = token % cache.block_size / kLanes;
      const HeadBlock block = head_block(cache, blocks[token / cache.block_size], head_);
      view.keys[g] = block.keys + group * group_bytes;
      view.values[g] = block.values + group * group_bytes;
      view.key_scales[g] = block.key_scales + group * kLanes;
      view.value_scales[g] = block.value_scales + group * kLanes;
    }
    return view;
  }

  // While keys are read, the values are asked for; while these are, the next span's keys.
  static void foresee(SpanView& view, const SpanView& next) {
    for (int g = view.seen.begin / kLanes; g * kLanes < view.seen.end; ++g) {
      view.after_keys[g] = view.values[g];
      const bool has = g >= next.seen.begin / kLanes && g * kLanes < next.seen.end;
      view.after_values[g] = has ? next.keys[g] : view.values[g];
    }
  }

  // Rows that see something of the span, in strips of about equal size.
  void attend_span(const SpanView& view, int span) {
    for (int r = 0; r < num_rows_;) {
      int end = r;
      while (end < num_rows_ && sees(rows_[end], span)) ++end;
      for (int strips = (end - r + kStripRows - 1) / kStripRows; strips > 0; --strips) {
        const int count = (end - r + strips - 1) / strips;
        attend_rows(view, span, r, count);
        r += count;
      }
      while (r < num_rows_ && !sees(rows_[r], span)) ++r;
    }
  }

  void attend_rows(const SpanView& view, int span, int first, int count) {
    // What begins a row's sum need not be copied there.
    const bool begins = rows_[first].tile->whole && begins_in(first, span) && begins_in(first + count - 1, span);
    float* parts = begins ? sums_ + first * pitch_ : parts_;
    Strip strip{queries_ + first * kQueryPitch, {}, {kSpan, 0}, {0, kSpan}, weights_, parts};
    for (int r = 0; r < count; ++r) {
      strip.seen[r] = seen_in(rows_[first + r], span);
      strip.all = either(strip.all, strip.seen[r]);
      strip.common = both(strip.common, strip.seen[r]);
    }
    kAttendStrip[static_cast<int>(view.form)][count - 1](strip, view);
    for (int r = 0; r < count && !begins; ++r) keep(first + r, span, parts_ + r * pitch_);
  }

  // Later rows do not begin before earlier ones of their tile.
  bool begins_in(int r, int span) const { return span == rows_[r].begin / kSpan; }

  void keep(int r, int span, const float* part) {
    const Row& row = rows_[r];
    if (!row.tile->whole) {
      copy_partial(partial(row, span), part, shape_.head_size);
    } else if (begins_in(r, span)) {
      copy_partial(sums_ + r * pitch_, part, shape_.head_size);
    } else {
      join(sums_ + r * pitch_, part, shape_.head_size);
    }
  }

  float* partial(const Row& row, int span) const {
    const AttentionTile& tile = *row.tile;
    const int64_t place = int64_t{head_} * tile.num_spans + (span - tile.first_span);
    return args_.partials + tile.partials + (place * tile.num_tokens * heads_per_kv_ + row.number) * pitch_;
  }

  void end_job(const AttentionJob& job) {
    if (member(job, 0).whole) {
      finish(member(job, 0));
      return;
    }
    for (int i = 0; i < job.num_members; ++i) {
      const AttentionTile& tile = member(job, i);
      int32_t* num_ended = args_.plan->num_ended + (&tile - args_.plan->tiles) * shape_.num_kv_heads + head_;
      // Whoever ends the last span sees what all others wrote before they counted theirs.
      if (__atomic_add_fetch(num_ended, job.num_spans, __ATOMIC_ACQ_REL) == tile.num_spans)
        join_partials(tile);
    }
  }

  // Join what all jobs of a tile have left, in the order of the spans.
  void join_partials(const AttentionTile& tile) {
    num_rows_ = 0;
    take_rows(tile);
    for (int r = 0; r < num_rows_; ++r) {
      float* sums = sums_ + r * pitch_;
      int span = rows_[r].begin / kSpan;
      copy_partial(sums, partial(rows_[r], span), shape_.head_size);
      while (sees(rows_[r], ++span)) join(sums, partial(rows_[r], span), shape_.head_size);
    }
    finish(tile);
  }

  // Divide the sums by those of the weights, and hand out the rows of a tile.
  void finish(const AttentionTile& tile) {
    const int size = shape_.head_size, width = heads_per_kv_ * size, column = head_ * width;
    const float* sums = sums_;
    for (int token = tile.first_token; token < tile.first_token + tile.num_tokens; ++token) {
      float* to = args_.out ? args_.out + int64_t{token} * shape_.num_heads * size + column : line_;
      for (int h = 0; h < heads_per_kv_; ++h, sums += pitch_) {
        const F32 factor = splat(1.0f / sums[size + 1]);
        for (int d = 0; d < size; d += kLanes) store(to + h * size + d, load(sums + d) * factor);
      }
      const Rows row{to, 0, 1, width};
      if (args_.encoded.records) encode(row, args_.encoded, token, column);
      if (args_.rounded.rows) round_to_bf16(row, args_.rounded, token, column);
    }
  }

  const AttentionArgs& args_;
  const AttentionShape& shape_;
  const int head_, heads_per_kv_, pitch_;
  // Parts of the thread's scratch.
  float* queries_;  // [kAttentionRows][kQueryPitch], times the scale of the scores
  float* sums_;     // [kAttentionRows][partial_pitch]
  float* weights_;  // [kStripRows][kSpan]
  float* parts_;    // [kStripRows][partial_pitch]
  float* line_;     // the query heads of a KV head, of one token
  Row rows_[kAttentionRows];
  int num_rows_ = 0;
};

static_assert(kAttentionRows * (kQueryPitch + partial_pitch(kMaxHeadSize) + kMaxHeadSize) +
                  kStripRows * (kSpan + partial_pitch(kMaxHeadSize)) <=
              kAttentionScratch);

void attend(const AttentionArgs& args, int unit, float* scratch) {
  const int num_kv_heads = args.shape.num_kv_heads;
  Worker(args, unit % num_kv_heads, scratch).run(args.plan->units[unit / num_kv_heads]);
}
