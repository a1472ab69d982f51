// What attention has to do in one step, cut into units that threads claim.
//
// A plan depends on the batch and on (shape, block size, cache form), not on the layer: it is made once a step and
// group of layers with equal shape, and serves all of them.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace mainspring {

struct BatchView {  // see kernels/ops.py, Batch; everything is contiguous
  int32_t num_requests;
  int32_t num_tokens;
  const int32_t* token_ids;
  const int32_t* positions;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
};

struct BlockTables {  // of one KV group
  const int32_t* blocks;  // [num_requests][width]
  int32_t width;
  const int64_t* slots;  // [num_tokens], -1: not kept
};

constexpr int kAttentionScratch = 64 * 1024;  // floats of scratch of a thread, for `attend`

// Fields are the plan's own business: made here, read by variant/attention.h.
struct AttentionPlan;

// Reuses `plan`'s memory (null: makes one). Destroy with destroy_plan.
AttentionPlan* plan_attention(AttentionPlan* plan, const BatchView&, const BlockTables&, const AttentionShape&,
                              int block_size);
void destroy_plan(AttentionPlan*);
int num_units(const AttentionPlan&);
int64_t num_partials(const AttentionPlan&);  // floats that AttentionArgs::partials must hold
// Before every layer: forget which spans are finished.
void rewind(AttentionPlan&);

}  // namespace mainspring
