// Weights from a file's layout into the kernels' one.
//
// Theory of operation.
// - A PackedMatrix is a plan: where in one piece of memory the planes of a matrix lie (codes, scales, mins,
//   each at a multiple of 64 bytes), given by source type and shape alone. It owns no memory. The memory it
//   is bound to is the whole state of the matrix: bound to a map of an image written earlier, it needs no
//   packing.
// - Packing goes by rows, whole panels at a time, so that several threads may pack parts of one matrix.
// - Lossless are F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 and IQ4_NL. Q3_K, Q4_K, Q5_K, Q6_K and IQ4_XS
//   hold their codes exactly and the product of their two scales rounded to fp16, once: a relative error of at
//   most 2^-11, and below fp16's normal numbers an absolute one of 2^-25.
// - Numbers are not judged: an infinite or NaN scale of a damaged file is packed as it is.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace mainspring {

// Of the bytes that packing makes. Whoever changes them for any source type counts this up: bytes that an earlier
// library packed lie on disks, and must not be taken for these. test_layout.py has a digest of every type.
constexpr int kLayoutVersion = 3;

struct SourceType;  // pack.cpp

class PackedMatrix {
 public:
  // `source`: the name of a GGUF tensor type, or "q8" or "q4" for floats that are to be quantised
  // (pack_floats). Throws std::invalid_argument for an unknown type and for columns that are not whole blocks
  // of it.
  PackedMatrix(const std::string& source, int64_t rows, int64_t columns);

  int64_t num_bytes() const { return num_bytes_; }
  int64_t row_bytes() const;  // of a row in the source; 0 for "q8" and "q4"
  const char* form_name() const;

  // Use memory of at least num_bytes(), 64-byte aligned, from now on. The caller keeps it alive. What is
  // const, an image on disk, can be read only.
  void bind(uint8_t* memory);
  void bind(const uint8_t* memory);
  bool is_bound() const { return view_.codes != nullptr; }
  const Matrix& view() const { return view_; }  // its pointers are null before bind

  // Pack rows [begin, end): begin is a multiple of kLanes, and so is end unless it is the last row's. Throws
  // std::invalid_argument for other rows, and where there is no memory to write to.
  void pack(const uint8_t* raw, int64_t begin, int64_t end);
  void pack_floats(const float* values, int64_t begin, int64_t end);  // [end - begin][columns]; q8 and q4

  void unpack(float* out) const;  // [rows][columns]: the values that the kernels see

 private:
  void check_rows(int64_t begin, int64_t end) const;

  const SourceType* source_;
  Matrix view_{};
  uint8_t* writable_ = nullptr;
  int64_t scales_offset_ = 0, mins_offset_ = 0, num_bytes_ = 0;
};

}  // namespace mainspring
