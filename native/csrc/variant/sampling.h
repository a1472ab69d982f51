// Rows of logits.
//
// A row is read 16 logits at a time. What its mask forbids, and what lies beyond its end, is read as -inf.

constexpr float kInfinity = __builtin_inff();

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

// Stretches of the row are reduced to one vector, and only a stretch that beats all before it is looked at again.
int argmax(const float* x, int count, const uint32_t* mask, float* value) {
  constexpr int kStretch = 256;
  const LogitRow row{x, count, mask};
  float best = -kInfinity;
  int where = 0;  // the stretch that holds `best` first
  for (int begin = 0; begin < count; begin += kStretch) {
    const int end = count - begin < kStretch ? count : begin + kStretch;
    F32 top = splat(-kInfinity);
    Mask nan = 0;
    for (int i = begin; i < end; i += 16) {
      const F32 v = read(row, i);
      nan |= is_nan(v);
      top = max(v, top);  // of a NaN and a number: the second, which is the number
    }
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
