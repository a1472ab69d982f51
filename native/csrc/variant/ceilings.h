// Work without purpose, by which the machine is measured: what the products of linear.h would reach without
// scales, what fused steps reach in registers, how fast memory is read.

// kTileRows rows times panels, as a tile of linear.h goes, on memory that should stay in the first-level
// cache.
inline int64_t exercise_bytes(const uint8_t* memory, int64_t num_bytes, int32_t* result) {
  constexpr int kBlocks = 8, kRowBytes = kBlocks * kBlock, kPanelBytes = kRowBytes * kLanes;
  const int8_t* rows = reinterpret_cast<const int8_t*>(memory);
  int64_t num_operations = 0;
  I32 sums[kTileRows];
  for (I32& sum : sums) sum = splat(0);
  for (int64_t at = 0; at + kPanelBytes <= num_bytes; at += kPanelBytes)
    for (int b = 0; b < kBlocks; ++b) {
      Bytes block[kBlock / 4];
#pragma GCC unroll 8
      for (int j = 0; j < kBlock / 4; ++j) block[j] = low_nibbles(load_bytes(memory + at + (b * 8 + j) * 64));
      dot_nibbles<kBlock / 4>(sums, block, rows + b * kBlock, kRowBytes);
      num_operations += 2 * kTileRows * kBlock * kLanes;
    }
  for (const I32& s : sums) *result += sum(to_float(s)) > 0;
  return num_operations;
}

inline int64_t exercise_floats(const uint8_t* memory, int64_t num_bytes, int32_t* result) {
  const int64_t num_rounds = num_bytes / 16;
  const F32 half = splat(0.5f);
  F32 sums[kTileSums];  // for all the compiler knows unlike one another, or it would compute one for all
#pragma GCC unroll 16
  for (int i = 0; i < kTileSums; ++i) sums[i] = load_i8(reinterpret_cast<const int8_t*>(memory) + kLanes * i);
  for (int64_t round = 0; round < num_rounds; ++round)
#pragma GCC unroll 16
    for (int i = 0; i < kTileSums; ++i) sums[i] = fma(sums[i], half, half);
  for (const F32& s : sums) *result += sum(s) > 0;
  return num_rounds * kTileSums * kLanes * 2;
}

inline int64_t exercise_reads(const uint8_t* memory, int64_t num_bytes, int32_t* result) {
  I32 sums[4] = {splat(0), splat(0), splat(0), splat(0)};
  for (int64_t at = 0; at + 256 <= num_bytes; at += 256)
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      sums[i] = sums[i] + load(reinterpret_cast<const int32_t*>(memory + at + 64 * i));
      __builtin_prefetch(memory + at + 64 * i + kAhead);
    }
  for (const I32& s : sums) *result += sum(to_float(s)) > 0;
  return num_bytes;
}

int64_t exercise(Exercise kind, const uint8_t* memory, int64_t num_bytes, int32_t* result) {
  switch (kind) {
    case Exercise::ByteProducts:
      return exercise_bytes(memory, num_bytes, result);
    case Exercise::FloatProducts:
      return exercise_floats(memory, num_bytes, result);
    case Exercise::Reads:
      return exercise_reads(memory, num_bytes, result);
  }
  return 0;
}
