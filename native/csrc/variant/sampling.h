// Rows of logits: to a token and its log-probabilities. Included by variant.cpp, inside its namespaces.
//
// Theory of operation.
// - The rules are those of the numpy sampler, which is their specification; here are shorter ways to the same
//   answers. A row's result depends on the row and its request alone.
// - A row is read 16 logits at a time. What the mask forbids reads as -inf. Temperature divides only what can
//   still be chosen: division keeps the order, so bounds are compared with logits that are not divided yet.
// - Filters work on a list, the few (id, logit) pairs that a cheap bound let through, in the order of ids.
//   What the bound leaves out is certain not to matter.
// - Top-k and top-p are the same search: for the largest line such that what is not below it weighs enough,
//   where a token weighs 1 or its probability. See find_line.
// - Noise is computed as in numpy: hashed bits per token id, made into a float, in double, for few.

constexpr float kInfinity = __builtin_inff();
constexpr float kLowest = -__FLT_MAX__;
constexpr int kStretch = 256;  // logits whose sum, or maximum, is one vector

inline double larger(double a, double b) { return a < b ? b : a; }

struct LogitRow {
  const float* x;
  int count;
  const uint32_t* mask;  // bit t: token t is allowed; null: all are
};

// Which of the 16 logits from `i`, a multiple of 16, exist and are allowed.
inline Mask readable(const LogitRow& row, int i) {
  const Mask inside = first_lanes(row.count - i);
  return row.mask ? inside & (row.mask[i >> 5] >> (i & 16)) : inside;
}

inline F32 read(const LogitRow& row, int i) {
  const Mask m = readable(row, i);
  if (m == 0xffff) return load(row.x + i);
  return select(m, load_masked(first_lanes(row.count - i), row.x + i), splat(-kInfinity));
}

// The first index from `begin`, a multiple of 16, at which the row is allowed and holds `value`; -1: none.
inline int find(const LogitRow& row, int begin, float value) {
  for (int i = begin; i < row.count; i += 16) {
    const F32 v = read(row, i);
    const Mask m = (value == value ? equal(v, splat(value)) : is_nan(v)) & readable(row, i);
    if (m) return i + __builtin_ctz(m);
  }
  return -1;
}

// The largest of each lane over a stretch of the row, NaNs left out; *nan: whether there are any.
inline F32 tops_of(const LogitRow& row, int begin, bool* nan) {
  F32 tops[4] = {splat(-kInfinity), splat(-kInfinity), splat(-kInfinity), splat(-kInfinity)};
  Mask nans = 0;
  const auto take = [&](F32& top, F32 v) {
    nans |= is_nan(v);
    top = max(v, top);  // of a NaN and a number: the second, which is the number
  };
  if (!row.mask && row.count - begin >= kStretch) {
    for (int i = begin; i < begin + kStretch; i += 64)
      for (int j = 0; j < 4; ++j) take(tops[j], load(row.x + i + 16 * j));
  } else {
    for (int i = begin; i < row.count && i < begin + kStretch; i += 16) take(tops[0], read(row, i));
  }
  *nan = nans != 0;
  return max(max(tops[0], tops[1]), max(tops[2], tops[3]));
}

// Only a stretch that beats all before it is looked at twice.
int argmax(const float* x, int count, const uint32_t* mask, float* value) {
  const LogitRow row{x, count, mask};
  float best = -kInfinity;
  int where = 0;  // the stretch that holds `best` first
  for (int begin = 0; begin < count; begin += kStretch) {
    bool nan;
    const F32 top = tops_of(row, begin, &nan);
    if (nan) {
      *value = __builtin_nanf("");
      return find(row, begin, *value);
    }
    if (greater(top, splat(best))) {
      best = largest(top);
      where = begin;
    }
  }
  *value = best;
  return find(row, where, best);
}

// ---- lists ------------------------------------------------------------------------------------------------

struct List {
  float* value;
  int32_t* id;  // ascending, until the list is sorted
  int count;
};

inline I32 lane_numbers() {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(numbers);
}

// To the list's end go those of 16 lanes that `m` says. It may be the list being read, written behind.
inline void append(List& list, Mask m, F32 value, I32 id) {
  store_packed(list.value + list.count, m, value);
  store_packed(list.id + list.count, m, id);
  list.count += __builtin_popcount(m);
}

// The list of what is at least `bound`; -inf: of all, also of what is forbidden.
inline void gather(const LogitRow& row, float bound, List& list) {
  list.count = 0;
  for (int i = 0; i < row.count; i += 16) {
    const F32 v = read(row, i);
    const Mask m = not_less(v, splat(bound)) & first_lanes(row.count - i);
    if (m) append(list, m, v, lane_numbers() + splat(i));
  }
}

// Keep what is above the line, and the first `num_equal` on it.
inline void keep_above(List& list, float line, int num_equal) {
  const int count = list.count;
  list.count = 0;
  for (int i = 0; i < count; i += 16) {
    const F32 v = load(list.value + i);
    const Mask inside = first_lanes(count - i);
    Mask m = greater(v, splat(line)) & inside;
    Mask ties = equal(v, splat(line)) & inside;
    for (; ties && num_equal > 0; --num_equal, ties &= ties - 1) m |= ties & -ties;
    append(list, m, v, load(list.id + i));
  }
}

// Largest first, equals as they stood: runs are merged, twice as long each time. The result is one of both.
inline List sorted(List from, List to) {
  for (int width = 1; width < from.count; width *= 2) {
    for (int begin = 0; begin < from.count; begin += 2 * width) {
      const int middle = begin + width < from.count ? begin + width : from.count;
      const int end = middle + width < from.count ? middle + width : from.count;
      int a = begin, b = middle;
      for (int i = begin; i < end; ++i) {
        const int next = b == end || (a < middle && from.value[a] >= from.value[b]) ? a++ : b++;
        to.value[i] = from.value[next];
        to.id[i] = from.id[next];
      }
    }
    to.count = from.count;
    const List swapped = from;
    from = to;
    to = swapped;
  }
  return from;
}

// ---- the line ---------------------------------------------------------------------------------------------

struct Line {
  float value;
  double above;  // what the greater ones weigh together
  double each;   // what one on the line weighs
};

// Floats as integers in the same order. 0.0 comes after -0.0, which no float comparison can part: never mind.
inline int64_t key_of(float x) {
  int32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits < 0 ? INT64_C(-1) - (bits & 0x7fffffff) : bits;
}
inline float of_key(int64_t key) {
  const auto bits = static_cast<uint32_t>(key < 0 ? (-1 - key) | 0x80000000 : key);
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

constexpr int kCuts = 7;  // thresholds tried in one reading: eight parts

// Those of `value` that are at least cuts[j] weigh weighs[j]. Without `weight` each weighs 1.
inline void weigh(const float* value, const float* weight, int count, const float* cuts, double* weighs) {
  for (int j = 0; j < kCuts; ++j) weighs[j] = 0;
  for (int begin = 0; begin < count; begin += kStretch) {
    const int end = count - begin < kStretch ? count : begin + kStretch;
    F32 sums[kCuts];
    for (int j = 0; j < kCuts; ++j) sums[j] = splat(0.0f);
    for (int i = begin; i < end; i += 16) {
      const F32 v = load(value + i);
      F32 w = weight ? load(weight + i) : splat(1.0f);
      if (count - i < 16) w = select(first_lanes(count - i), w, splat(0.0f));
      for (int j = 0; j < kCuts; ++j) sums[j] = sums[j] + where_not_less(v, splat(cuts[j]), w);
    }
    for (int j = 0; j < kCuts; ++j) weighs[j] += sum(sums[j]);
  }
}

// Keep what is at least `low` and less than `high`, side by side at the front; how many that are.
inline int keep_between(float* value, float* weight, int count, float low, float high) {
  int kept = 0;
  for (int i = 0; i < count; i += 16) {
    const F32 v = load(value + i);
    const Mask m = not_less(v, splat(low)) & ~not_less(v, splat(high)) & first_lanes(count - i);
    if (!m) continue;
    if (weight) store_packed(weight + kept, m, load(weight + i));
    store_packed(value + kept, m, v);
    kept += __builtin_popcount(m);
  }
  return kept;
}

struct Range {
  float least, most;
};

inline Range range_of(const float* value, int count) {
  F32 least = splat(kInfinity), most = splat(-kInfinity);
  for (int i = 0; i < count; i += 16) {
    const F32 v = load(value + i);
    const Mask inside = first_lanes(count - i);
    least = min(least, inside == 0xffff ? v : select(inside, v, splat(kInfinity)));
    most = max(most, inside == 0xffff ? v : select(inside, v, splat(-kInfinity)));
  }
  return {-largest(splat(0.0f) - least), largest(most)};
}

// The line among few: from the largest down.
inline Line walk_down(float* value, float* weight, int count, double above, double needed) {
  for (int i = 1; i < count; ++i) {
    const float v = value[i], w = weight ? weight[i] : 1.0f;
    int j = i;
    for (; j > 0 && value[j - 1] < v; --j) {
      value[j] = value[j - 1];
      if (weight) weight[j] = weight[j - 1];
    }
    value[j] = v;
    if (weight) weight[j] = w;
  }
  Line line{};
  for (int i = 0; i < count && (i == 0 || above < needed); ++i) {
    const double each = weight ? weight[i] : 1.0;
    if (i == 0 || value[i] != line.value) line = {value[i], above, each};
    above += each;
  }
  return line;
}

// Where to cut, from the top down. Even in value, and 32 from the top at most, for what lies deeper weighs
// nothing as a probability; or even among the floats there are, which shrinks any range to a single float.
inline void choose_cuts(const Range& range, bool even_in_value, float* cuts) {
  const int64_t low = key_of(range.least), high = key_of(range.most);
  const float depth = range.most - range.least;
  const float span = depth < 32.0f ? depth : 32.0f;
  for (int j = 1; j <= kCuts; ++j) {
    int64_t cut = high - (high - low) * j / (kCuts + 1);
    if (even_in_value) cut = key_of(range.most - span * static_cast<float>(j) / (kCuts + 1));
    cuts[j - 1] = of_key(cut > low ? cut : low + 1);
  }
}

// The largest line such that what is not below it weighs at least `needed`; if all weigh less, the least
// value. Destroys `value` and `weight`, of which there is at least one.
//
// Seven cuts part the values in eight, and the part that holds the line is kept, until it is small.
inline Line find_line(float* value, float* weight, int count, double needed) {
  constexpr int kFew = 24, kEvenPasses = 4;
  double above = 0;
  for (int pass = 0; count > kFew; ++pass) {
    const Range range = range_of(value, count);
    if (range.least == range.most) return {range.least, above, weight ? weight[0] : 1.0};
    float cuts[kCuts];
    double weighs[kCuts];
    choose_cuts(range, pass < kEvenPasses, cuts);
    weigh(value, weight, count, cuts, weighs);
    int part = 0;
    while (part < kCuts && above + weighs[part] < needed) ++part;
    count = keep_between(value, weight, count, part < kCuts ? cuts[part] : -kInfinity,
                         part > 0 ? cuts[part - 1] : kInfinity);
    if (part > 0) above += weighs[part - 1];
  }
  return walk_down(value, weight, count, above, needed);
}

// ---- scratch ----------------------------------------------------------------------------------------------

struct Scratch {
  List list, other;
  float* edited;
  float* value;   // find_line's
  float* weight;  // find_line's

  Scratch(float* memory, int count) {
    const int64_t size = count + kSamplingSlack;
    list = {memory, reinterpret_cast<int32_t*>(memory + size), 0};
    other = {memory + 2 * size, reinterpret_cast<int32_t*>(memory + 3 * size), 0};
    edited = memory + 4 * size;
    value = memory + 5 * size;
    weight = memory + 6 * size;
  }
};

inline void copy(float* to, const float* from, int count) {
  __builtin_memcpy(to, from, sizeof(float) * count);
}

// The k-th largest, 1 <= k <= row.count, and a list that holds all that are as large.
//
// Every stretch gives 16 maxima, of 16 logits each. The k-th largest maximum is a bound, for k logits at
// least are as large; usually few more are.
Line kth_largest(const LogitRow& row, int k, Scratch& scratch) {
  float bound = -kInfinity;
  if (k <= row.count / 32) {
    int num_maxima = 0;
    bool nan;
    for (int begin = 0; begin < row.count; begin += kStretch, num_maxima += 16) {
      store(scratch.value + num_maxima, tops_of(row, begin, &nan));
    }
    bound = find_line(scratch.value, nullptr, num_maxima, k).value;
  }
  gather(row, bound, scratch.list);
  copy(scratch.value, scratch.list.value, scratch.list.count);
  return find_line(scratch.value, nullptr, scratch.list.count, k);
}

// ---- stages 3 to 7: edits ---------------------------------------------------------------------------------

inline bool has_edits(const RowRequest& r) {
  return r.allowed_ids || r.num_biased || r.num_stops || r.num_counted || r.num_forbidden;
}

inline void forbid(const int64_t* ids, int count, float* row) {
  for (int i = 0; i < count; ++i) row[ids[i]] = -kInfinity;
}

// The row as its mask and allowed ids leave it.
inline void copy_allowed(const RowRequest& r, const LogitRow& raw, float* row) {
  if (!r.allowed_ids) {
    for (int i = 0; i < raw.count; i += 16) store(row + i, read(raw, i));
    return;
  }
  for (int i = 0; i < raw.count; i += 16) store(row + i, splat(-kInfinity));
  for (int i = 0; i < r.num_allowed; ++i) {
    const int64_t id = r.allowed_ids[i];
    if (!raw.mask || (raw.mask[id >> 5] >> (id & 31) & 1)) row[id] = raw.x[id];
  }
}

// A grammar that allows nothing but the end is obeyed: it is at its end, and more would be wrong.
inline void forbid_stops(const RowRequest& r, int count, float* row, float* before) {
  for (int i = 0; i < r.num_stops; ++i) before[i] = row[r.stop_ids[i]];
  forbid(r.stop_ids, r.num_stops, row);
  float most;
  if (r.mask && (argmax(row, count, nullptr, &most), most == -kInfinity)) {
    for (int i = 0; i < r.num_stops; ++i) row[r.stop_ids[i]] = before[i];
  }
}

inline void penalise(const RowRequest& r, float* row) {
  for (int i = 0; i < r.num_counted; ++i) {
    float x = row[r.counted_ids[i]];
    if (r.repetition != 1.0f) x = x > 0 ? x / r.repetition : x * r.repetition;
    x -= r.frequency * r.counts[i];
    if (r.counts[i] > 0) x = static_cast<float>(x - r.presence);
    row[r.counted_ids[i]] = x;
  }
}

void edit(const RowRequest& r, const LogitRow& raw, Scratch& scratch) {
  float* row = scratch.edited;
  copy_allowed(r, raw, row);
  for (int i = 0; i < r.num_biased; ++i) row[r.bias_ids[i]] += r.bias[i];
  if (r.num_stops) forbid_stops(r, raw.count, row, scratch.value);
  penalise(r, row);
  forbid(r.forbidden_ids, r.num_forbidden, row);
}

// ---- noise ------------------------------------------------------------------------------------------------

struct NoiseKey {
  int32_t low, high;
};

inline uint64_t mix(uint64_t x) {  // splitmix64's finaliser
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
  return x ^ (x >> 31);
}

inline NoiseKey noise_key(int64_t seed, int64_t position) {
  const uint64_t key =
      mix(mix(static_cast<uint64_t>(seed) + 0x9E3779B97F4A7C15) + static_cast<uint64_t>(position));
  return {static_cast<int32_t>(key), static_cast<int32_t>(key >> 32)};
}

inline I32 noise_bits(I32 id, NoiseKey key) {
  const auto constant = [](uint32_t x) { return splat(static_cast<int32_t>(x)); };
  I32 x = id * constant(0x9E3779B1) + splat(key.low);
  x = (x ^ shift_right_unsigned<16>(x)) * constant(0x85EBCA6B);
  x = (x ^ shift_right_unsigned<13>(x)) + splat(key.high);
  x = x * constant(0xC2B2AE35);
  x = (x ^ shift_right_unsigned<16>(x)) * constant(0x846CA68B);
  return x ^ shift_right_unsigned<15>(x);
}

inline double gumbel(uint32_t bits) {
  return -__builtin_log(-__builtin_log((static_cast<double>(bits) + 0.5) * 0x1p-32));
}

// ---- stages 9 to 11: temperature, filters, the draw -------------------------------------------------------

// A logit such that all smaller ones, divided by `temperature`, are certainly below `bound`.
inline float divides_below(double bound, float temperature) {
  const double x = (bound - 1e-3 - 1e-6 * __builtin_fabs(bound)) * static_cast<double>(temperature);
  return x > static_cast<double>(kLowest) ? static_cast<float>(x) : kLowest;
}

// Which of 16 tokens may score more than `score`: logits x / temperature, and the bits of their noise.
//
// With u the uniform number of the bits, noise is -ln(-ln u), which is less than -ln(1 - u). So only where
// 1 - u is below e^(x / temperature - score) is the noise worth computing. `slack` covers all roundings here.
inline Mask may_exceed(F32 x, I32 bits, float inverse_temperature, double score, double slack) {
  const F32 least = fma(x, splat(inverse_temperature), splat(static_cast<float>(slack - score)));
  const F32 complement = to_float(shift_right_unsigned<1>(bits ^ splat(-1)));  // of 31 bits
  return not_less(exp(least) * splat(0x1p31f), complement);
}

// The winner of logit + noise: its index; the first among equals. `best` is the index of the largest logit.
//
// With B the score of any one token, the winner's logit is at least B minus the greatest noise there is. B is
// at first the score of the largest logit, then the best so far.
int draw(const LogitRow& row, const int32_t* ids, float temperature, int best, const RowRequest& r) {
  constexpr double kGreatestNoise = 22.9;
  const NoiseKey key = noise_key(r.seed, r.position);
  const float inverse = 1.0f / temperature;
  const double slack = 1e-3 + 2e-6 * (25 + __builtin_fabs(row.x[best] / static_cast<double>(temperature)));
  int winner = -1;
  double score = 0;
  F32 lowest;
  const auto try_one = [&](int index, int32_t bits) {
    const double s = static_cast<double>(row.x[index] / temperature) + gumbel(static_cast<uint32_t>(bits));
    if (winner >= 0 && !(s > score || (s == score && index < winner))) return;
    winner = index;
    score = s;
    lowest = splat(divides_below(score - kGreatestNoise, temperature));
  };
  int32_t bits[16];
  store(bits, noise_bits(splat(ids ? ids[best] : best), key));
  try_one(best, bits[0]);
  for (int i = 0; i < row.count; i += 16) {
    const F32 x = read(row, i);
    Mask m = not_less(x, lowest) & readable(row, i);
    if (!m) continue;
    const I32 noise = noise_bits(ids ? load(ids + i) : lane_numbers() + splat(i), key);
    m &= may_exceed(x, noise, inverse, score, slack);
    if (!m) continue;
    store(bits, noise);
    for (; m; m &= m - 1) try_one(i + __builtin_ctz(m), bits[__builtin_ctz(m)]);
  }
  return winner;
}

// What `temper` reads, and what it lets through.
struct Tempering {
  float temperature;
  float top;     // the largest logit, divided
  float lowest;  // divided logits below it do not count
  float cut;     // nor are those below this listed, though they count in the total
};

// The list of logits, divided by the temperature; and where `weight` is given, which takes each listed one's
// e^(logit - top), the sum of that over all that count.
double temper(const LogitRow& row, const Tempering& t, List& list, float* weight) {
  const double reach = weight ? larger(t.lowest, t.top - 100.0) : t.lowest;  // e^-100 adds nothing
  const F32 lowest_undivided = splat(divides_below(reach, t.temperature));
  const F32 listed = splat(t.lowest > t.cut ? t.lowest : t.cut), divisor = splat(t.temperature);
  const int count = row.count;
  double total = 0;
  list.count = 0;
  for (int begin = 0; begin < count; begin += kStretch) {
    const int end = count - begin < kStretch ? count : begin + kStretch;
    F32 part = splat(0.0f);
    for (int i = begin; i < end; i += 16) {
      const F32 x = read(row, i);
      const Mask near = not_less(x, lowest_undivided) & readable(row, i);
      if (!near) continue;
      const F32 y = t.temperature == 1.0f ? x : x / divisor;
      const Mask m = near & not_less(y, listed);
      if (weight) {
        const F32 w = exp(y - splat(t.top));
        part = part + select(near & not_less(y, splat(t.lowest)), w, splat(0.0f));
        store_packed(weight + list.count, m, w);
      }
      if (m) append(list, m, y, lane_numbers() + splat(i));
    }
    total += sum(part);
  }
  return total;
}

// The divided logit below which min_p and top_k forbid; -inf: none. What division makes equal is equal.
float threshold(const LogitRow& row, float top, const RowRequest& r, Scratch& scratch) {
  double lowest = -kInfinity;
  if (r.min_p > 0) lowest = static_cast<float>(top + __builtin_log(r.min_p));
  if (r.top_k > 0 && r.top_k < row.count) {
    lowest = larger(lowest, kth_largest(row, r.top_k, scratch).value / r.temperature);
  }
  return static_cast<float>(lowest);
}

// A logit such that tokens below it cannot be in a nucleus: all of them together weigh less than what top_p
// leaves out, for the total is 1 at least. Where top_p is so near to 1 that rounding matters: -inf.
inline float nucleus_cut(const RowRequest& r, float top, int count) {
  if (r.top_p > 1 - 1e-6) return -kInfinity;
  return static_cast<float>(top + __builtin_log((1 - r.top_p) / count) - 1);
}

// Keep the fewest tokens that together have the probability top_p. `total`: what e^(logit - top) adds up to.
// The best come first, and the token that crosses the line stays; among equals on the line the lower ids do.
void keep_nucleus(double top_p, double total, Scratch& scratch) {
  List& list = scratch.list;
  const double needed = top_p * total;
  copy(scratch.value, list.value, list.count);
  const Line line = find_line(scratch.value, scratch.weight, list.count, needed);
  double num_equal = __builtin_ceil((needed - line.above) / line.each);
  num_equal = num_equal < list.count ? num_equal : list.count;
  keep_above(list, line.value, num_equal > 1 ? static_cast<int>(num_equal) : 1);
}

// `best` is the index of the row's largest logit, which divided by the temperature is `top`.
int draw_filtered(const LogitRow& row, int best, float top, const RowRequest& r, Scratch& scratch) {
  if (top == -kInfinity) return best;  // all are, divided: the order that is left
  const float lowest = threshold(row, top, r, scratch);
  if (lowest == -kInfinity && r.top_p >= 1) return draw(row, nullptr, r.temperature, best, r);
  List& list = scratch.list;
  Tempering tempering{r.temperature, top, lowest, -kInfinity};
  float* weight = nullptr;
  if (r.top_p < 1) {
    weight = scratch.weight;
    tempering.cut = nucleus_cut(r, top, row.count);
  }
  const double total = temper(row, tempering, list, weight);
  if (weight) keep_nucleus(r.top_p, total, scratch);
  const LogitRow rest{list.value, list.count, nullptr};
  float value;
  return list.id[draw(rest, list.id, 1.0f, argmax(rest.x, rest.count, nullptr, &value), r)];
}

// ---- log-probabilities ------------------------------------------------------------------------------------

inline int rank_of(const LogitRow& row, float value) {
  int rank = 0;
  for (int i = 0; i < row.count; i += 16) {
    rank += __builtin_popcount(not_less(read(row, i), splat(value)) & first_lanes(row.count - i));
  }
  return rank;
}

// The `k` largest, largest first, lower ids first among equals.
List best_of(const LogitRow& row, int k, Scratch& scratch) {
  if (k < row.count) {
    const Line line = kth_largest(row, k, scratch);
    keep_above(scratch.list, line.value, k - static_cast<int>(line.above));
  } else {
    gather(row, -kInfinity, scratch.list);
  }
  return sorted(scratch.list, scratch.other);
}

// Of the token, then of the `num_logprobs` best of the row, whose largest logit is `top`.
void fill_logprobs(const LogitRow& row, float top, int token, int num_logprobs, Scratch& scratch,
                   RowResult* result) {
  const bool any = top > -kInfinity;
  const Tempering list_nothing{1.0f, top, -kInfinity, kInfinity};
  const double total = any ? temper(row, list_nothing, scratch.list, scratch.weight) : 1;
  const auto norm = static_cast<float>(top + __builtin_log(total));
  const auto logprob = [&](float x) {
    const float p = x - norm;
    return any && p > kLogprobFloor ? p : kLogprobFloor;
  };
  result->rank = rank_of(row, row.x[token]);
  result->ids[0] = token;
  result->logprobs[0] = logprob(row.x[token]);
  if (num_logprobs == 0) return;
  const List best = best_of(row, num_logprobs, scratch);
  for (int i = 0; i < num_logprobs; ++i) {
    result->ids[1 + i] = best.id[i];
    result->logprobs[1 + i] = logprob(best.value[i]);
  }
}

inline void fail(RowResult* result, RowStatus status, float value) {
  result->status = status;
  result->value = value;
}

void row_logprobs(const float* logits, int count, int token, int num_logprobs, float* memory,
                  RowResult* result) {
  float top;
  argmax(logits, count, nullptr, &top);
  if (!(top < kInfinity)) return fail(result, RowStatus::NotFinite, top);
  Scratch scratch(memory, count);
  result->status = RowStatus::Fine;
  result->token = token;
  fill_logprobs({logits, count, nullptr}, top, token, num_logprobs, scratch, result);
}

void sample_row(const RowRequest& r, const float* logits, int count, float* memory, RowResult* result) {
  float top;  // of all, to see whether they are numbers; then of those that can be chosen
  int best = argmax(logits, count, nullptr, &top);
  float raw_top = top;
  if (!(top < kInfinity)) return fail(result, RowStatus::NotFinite, top);
  Scratch scratch(memory, count);
  const LogitRow raw{logits, count, r.mask};
  LogitRow row = raw;
  if (has_edits(r)) {
    edit(r, raw, scratch);
    row = {scratch.edited, count, nullptr};
  }
  if (row.x != logits || row.mask) best = argmax(row.x, count, row.mask, &top);
  if (top == -kInfinity) return fail(result, RowStatus::NoneAllowed, top);
  if (!(top < kInfinity)) return fail(result, RowStatus::EditedToInfinity, top);
  if (r.temperature > 0) {
    const float divided = top / r.temperature;
    if (!(divided < kInfinity)) return fail(result, RowStatus::NotFinite, divided);
    best = draw_filtered(row, best, divided, r, scratch);
  }
  result->status = RowStatus::Fine;
  result->token = best;
  if (r.num_logprobs < 0) return;
  if (r.mask) argmax(logits, count, r.mask, &raw_top);
  fill_logprobs(raw, raw_top, best, r.num_logprobs, scratch, result);
}
