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

// The factor that makes the root mean square of `count` floats 1, `eps` added to their mean square.
inline F32 inverse_rms(const float* x, float eps, int count) {
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
  return splat(1.0f / __builtin_sqrtf(mean + eps));
}

inline float mean(const float* x, int count) {
  F32 sums[4] = {splat(0.0f), splat(0.0f), splat(0.0f), splat(0.0f)};
  int i = 0;
  for (; i + 4 * kLanes <= count; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) sums[j] = sums[j] + load(x + i + j * kLanes);
  for_vectors(count - i, [&](int at, auto load, auto) { sums[0] = sums[0] + load(x + i + at); });
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<float>(count);
}

void rms_norm(const float* x, const float* weight, float eps, int count, float* out) {
  const F32 factor = inverse_rms(x, eps, count);
  for_vectors(count, [&](int at, auto load, auto keep) {
    keep(out + at, load(x + at) * factor * load(weight + at));
  });
}

// The distances to the mean are kept on the way, so that the lanes behind the last one count as none.
void layer_norm(const float* x, const float* weight, const float* bias, float eps, int count, float* out) {
  const F32 middle = splat(mean(x, count));
  for_vectors(count, [&](int at, auto load, auto keep) { keep(out + at, load(x + at) - middle); });
  const F32 factor = inverse_rms(out, eps, count);
  for_vectors(count, [&](int at, auto load, auto keep) {
    keep(out + at, fma(load(out + at) * factor, load(weight + at), load(bias + at)));
  });
}

void add(float* out, const float* x, int count) {
  for_vectors(count, [&](int at, auto load, auto keep) { keep(out + at, load(out + at) + load(x + at)); });
}

void multiply(float* x, float factor, int count) {
  for_vectors(count, [&](int at, auto load, auto keep) { keep(x + at, load(x + at) * splat(factor)); });
}

// ---- activations -----------------------------------------------------------------------------------------

// c0 + c1 x + c2 x^2 ...
template <int kCount>
inline F32 polynomial(const float (&coefficients)[kCount], F32 x) {
  F32 p = splat(coefficients[kCount - 1]);
#pragma GCC unroll 16
  for (int i = kCount - 2; i >= 0; --i) p = fma(p, x, splat(coefficients[i]));
  return p;
}

// Within 4 ulp. Near 0, where 1 - 2 / (e^2x + 1) would cancel, by an odd polynomial: its own error is 2e-8 of
// the result.
inline F32 tanh(F32 x) {
  static constexpr float kOdd[] = {-3.33332733e-1f, 1.33311895e-1f, -5.37169622e-2f, 2.05596067e-2f,
                                   -5.61077259e-3f};
  const F32 one = splat(1.0f), square = x * x;
  const F32 near = fma(x * square, polynomial(kOdd, square), x);
  const F32 far = one - splat(2.0f) / (exp(x + x) + one);
  return select(greater(splat(0.625f), abs(x)), near, far);
}

// x * sigmoid(x)
inline F32 silu(F32 x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

// x times the normal distribution up to x. The tail of it beyond |x| is e^(-x^2 / 2) * u * (a polynomial in u),
// u = 1 / (1 + 0.3 |x|), whose own error is 4e-9 of the tail up to |x| = 14, where x * tail leaves the floats.
inline F32 gelu(F32 x) {
  static constexpr float kTail[] = {1.19686633e-1f,  1.19572868e-1f, 1.10227093e-1f,  7.84266856e-2f,
                                    9.60545378e-2f,  -7.92410163e-2f, 1.91573839e-1f, -2.28061417e-1f,
                                    1.12373092e-1f, -2.06123163e-2f};
  const F32 one = splat(1.0f);
  const F32 u = one / fma(splat(0.3f), abs(x), one);
  const F32 tail = polynomial(kTail, u) * u * exp(x * x * splat(-0.5f));
  return x * select(greater(splat(0.0f), x), tail, one - tail);
}

// x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))), in which (1 + tanh(y)) / 2 is the sigmoid of 2 y.
inline F32 gelu_tanh(F32 x) {
  const F32 y = x * fma(x * x, splat(2.0f * 0.7978845608f * 0.044715f), splat(2.0f * 0.7978845608f));
  return x / (splat(1.0f) + exp(splat(0.0f) - y));
}

// use(f) with the function of one vector that `activation` names.
template <typename Use>
inline void with_function(Activation activation, Use use) {
  switch (activation) {
    case Activation::Silu:
      return use([](F32 x) { return silu(x); });
    case Activation::Gelu:
      return use([](F32 x) { return gelu(x); });
    case Activation::GeluTanh:
      return use([](F32 x) { return gelu_tanh(x); });
  }
}

void activate(Activation activation, const float* x, int count, float* out) {
  with_function(activation, [&](auto f) {
    for_vectors(count, [&](int at, auto load, auto keep) { keep(out + at, f(load(x + at))); });
  });
}

void gate(Activation activation, const float* x, const float* up, int count, float* out) {
  with_function(activation, [&](auto f) {
    for_vectors(count, [&](int at, auto load, auto keep) {
      keep(out + at, f(load(x + at)) * load(up + at));
    });
  });
}

inline F32 capped(F32 x, float cap) { return splat(cap) * tanh(x / splat(cap)); }

void soft_cap(float* x, float cap, int count) {
  for_vectors(count, [&](int at, auto load, auto keep) { keep(x + at, capped(load(x + at), cap)); });
}

// ---- rotations -------------------------------------------------------------------------------------------

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
