// What attention has to do in one step, cut into units that threads claim.
//
// Theory of operation.
// - K and V are walked in *spans*: tokens [256 s, 256 s + 256) of a request, whatever the window. A row
//   (one query head of one token) reduces each span that it sees by itself, and joins its spans in their
//   order. So nothing below has an influence on a result; all of it is about speed.
// - A *tile* is some neighbouring tokens of a request, with all query heads of a KV head: rows for which K
//   and V are read once. A *job* walks some spans for some tiles, and a *unit* is some jobs of about the
//   cost a thread should claim at once.
// - A tile that is one job's alone is computed there and then. The spans of any other tile leave partial
//   results, and who finishes the last one joins them: a counter per tile and KV head says who that is.
// - Decodes (tiles of few rows, which are bound by reading K and V) whose block tables name the same blocks
//   for their first spans form one job for each of these spans, and so read them once.
//
// A plan depends on the batch and on (shape, block size), not on the layer: it is made once a step and
// group of layers with equal shape, and serves all of them.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace mainspring {

constexpr int kSpan = 256;         // tokens
constexpr int kMaxHeadSize = 256;  // and a multiple of kLanes
constexpr int kAttentionRows = 64;  // of all tiles of a job; also the most query heads of a KV head
constexpr int kAttentionScratch = 64 * 1024;  // floats of scratch of a thread, for `attend`

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

struct AttentionTile {
  const int32_t* blocks;  // of its request
  int32_t first_token;    // in the batch
  int32_t num_tokens;
  int32_t position;    // of the first token
  int32_t seq_len;     // of its request, after this step
  int32_t first_span;  // that any of its rows sees
  int32_t num_spans;
  // Where its partial results begin, if it has any: [KV heads][spans][rows][partial_pitch].
  int64_t partials;
  bool whole;  // one job has all of it
};

struct AttentionJob {
  int32_t first_member, num_members;  // places in AttentionPlan::members
  int32_t first_span, num_spans;
};

struct AttentionUnit {
  int32_t first_job, num_jobs;
};

// Made by plan_attention, read by variant/attention.h.
struct AttentionPlan {
  const AttentionTile* tiles;
  const int32_t* members;  // numbers of tiles
  const AttentionJob* jobs;
  const AttentionUnit* units;
  int32_t num_units;   // for each KV head
  int32_t* num_ended;  // [tiles][KV heads]: spans
};

// Floats of a row's partial result: the weighted sum of the values, then the largest score and the sum of
// the weights.
constexpr int partial_pitch(int head_size) { return head_size + kLanes; }

// Reuses `plan`'s memory (null: makes one). The block tables must stay as long as the plan is used. Throws
// std::invalid_argument for a shape that attention does not have. Destroy with destroy_plan.
AttentionPlan* plan_attention(AttentionPlan* plan, const BatchView&, const BlockTables&,
                              const AttentionShape&, int block_size);
void destroy_plan(AttentionPlan*);
int num_units(const AttentionPlan&);
int64_t num_partials(const AttentionPlan&);  // floats that AttentionArgs::partials must hold
// Before every layer: forget which spans are finished.
void rewind(AttentionPlan&);

}  // namespace mainspring
