// One row at a time: norms, activations, rotations. Included by variant.cpp, inside its namespaces.
//
// Theory of operation.
// - A row is any number of floats. Whole vectors first, then one vector of which only some lanes count: an
//   element's place in the row, and nothing else, decides what it is added to.
// - Sums have four running vectors, for one would wait for itself; they are joined in one order.

// e^x. The result is within 1 ulp of the true one (0.994 over every seventh float); e^-inf is 0, what is
// too large is inf, and a NaN stays a NaN. x = k * ln 2 + r with |r| <= ln 2 / 2; a polynomial, whose own
// error is 3e-9, gives e^r.
inline F32 exp(F32 x) {
  // Order of operands: where x is a NaN, max and min give their second operand.
  x = min(splat(100.0f), max(splat(-110.0f), x));
  const F32 k = round(x * splat(1.44269504f));
  F32 r = fnma(k, splat(0.693359375f), x);  // exact: this part of ln 2 has 9 bits
  r = fnma(k, splat(-2.12194440e-4f), r);
  F32 p = splat(1.3814599e-3f);
  p = fma(p, r, splat(8.3687170e-3f));
  p = fma(p, r, splat(4.1668389e-2f));
  p = fma(p, r, splat(1.6666521e-1f));
  p = fma(p, r, splat(4.9999993e-1f));
  p = fma(p, r * r, r);
  return scale(p + splat(1.0f), k);
}

// f(i, load, keep) for the places i of the vectors of a row of `count` floats.
template <typename F>
inline void for_vectors(int count, F f) {
  const auto load_all = [](const float* p) { return load(p); };
  const auto keep_all = [](float* p, F32 x) { store(p, x); };
  int i = 0;
  for (; i + kLanes <= count; i += kLanes) f(i, load_all, keep_all);
  if (i == count) return;
  const Mask rest = first_lanes(count - i);
  const auto load_rest = [rest](const float* p) { return load_masked(rest, p); };
  const auto keep_rest = [rest](float* p, F32 x) { store_masked(rest, p, x); };
  f(i, load_rest, keep_rest);
}

void rms_norm(const float* x, const float* weight, float eps, int count, float* out) {
  F32 squares[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    for (int j = 0; j < 4; ++j) {
      const F32 v = load(x + i + j * kLanes);
      squares[j] = fma(v, v, squares[j]);
    }
  }
  for_vectors(count - i, [&](int at, auto load, auto) {
    const F32 v = load(x + i + at);
    squares[0] = fma(v, v, squares[0]);
  });
  const float mean = sum((squares[0] + squares[1]) + (squares[2] + squares[3])) / static_cast<float>(count);
  const F32 factor = splat(1.0f / __builtin_sqrtf(mean + eps));
  for_vectors(count, [&](int at, auto load, auto keep) {
    keep(out + at, load(x + at) * factor * load(weight + at));
  });
}

void add(float* out, const float* x, int count) {
  for_vectors(count, [&](int at, auto load, auto keep) { keep(out + at, load(out + at) + load(x + at)); });
}

void silu_mul(const float* gate, const float* up, int count, float* out) {
  for_vectors(count, [&](int at, auto load, auto keep) {
    const F32 g = load(gate + at);
    keep(out + at, g / (splat(1.0f) + exp(splat(0.0f) - g)) * load(up + at));
  });
}

// Pairs (i, n + i) of one head.
inline void turn_halves(float* head, const float* cosines, const float* sines, int n) {
  for_vectors(n, [&](int at, auto load, auto keep) {
    const F32 x = load(head + at), y = load(head + n + at), c = load(cosines + at), s = load(sines + at);
    keep(head + at, fnma(y, s, x * c));
    keep(head + n + at, fma(x, s, y * c));
  });
}

// Pairs (2i, 2i + 1) of one head.
inline void turn_neighbours(float* head, const float* cosines, const float* sines, int n) {
  int i = 0;
  for (; i + kLanes / 2 <= n; i += kLanes / 2) {
    const F32 x = load(head + 2 * i);
    store(head + 2 * i, fma_turn(x, load_doubled(cosines + i), swap_pairs(x) * load_doubled(sines + i)));
  }
  for (; i < n; ++i) {
    const float x = head[2 * i], y = head[2 * i + 1];
    head[2 * i] = __builtin_fmaf(x, cosines[i], -(y * sines[i]));
    head[2 * i + 1] = __builtin_fmaf(y, cosines[i], x * sines[i]);
  }
}

void rope(float* heads, const float* cosines, const float* sines, int n, int num_heads, int head_size,
          bool interleaved) {
  const auto turn = interleaved ? turn_neighbours : turn_halves;
  for (int h = 0; h < num_heads; ++h) turn(heads + static_cast<int64_t>(h) * head_size, cosines, sines, n);
}
