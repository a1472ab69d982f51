// One instruction-set variant: every kernel, compiled with this variant's flags. See kernels.h for its rules.
#if defined(VARIANT_avx2)
#include "simd/avx2.h"
#elif defined(VARIANT_avx512)
#include "simd/avx512.h"
#endif

#include "attention_plan.h"
#include "kernels.h"

namespace mainspring {
namespace {

#include "variant/rows.h"  // one row at a time: norms, activations, rotations

#include "variant/linear.h"  // packed matrices: products, encoding, single rows

#include "variant/attention.h"  // the KV cache: writing it, attention over it

#include "variant/sampling.h"  // rows of logits

#include "variant/ceilings.h"  // work to measure the machine by

}  // namespace

#define TABLE_OF(name) kernels_##name
#define TABLE(name) TABLE_OF(name)
#define TEXT_OF(name) #name
#define TEXT(name) TEXT_OF(name)

const Kernels TABLE(VARIANT) = {
    TEXT(VARIANT), linear, encode, round_to_bf16, embed, rms_norm, layer_norm, add, multiply, soft_cap, activate, gate,
    rope, write_kv, attend, argmax, sample_row, row_logprobs, exercise,
};

}  // namespace mainspring
