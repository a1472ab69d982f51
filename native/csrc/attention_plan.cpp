#include "attention_plan.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace mainspring {
namespace {

// Rows up to which a tile is a decode: more rows are bound by arithmetic, and sharing what they read gains
// nothing.
constexpr int kDecodeRows = 16;
// What a unit should cost: a claim and the packing of its queries should not count, and with less than this
// many units in a pass the last one would keep the other threads waiting.
constexpr float kMinUnitCost_ns = 8000.0f, kMaxUnitCost_ns = 50000.0f;
constexpr int kUnitsPerPass = 32;
// Floats of partial results that cutting tiles may take: long contexts of prompts are not cut for any price.
constexpr int64_t kMaxPartials = 4 << 20;

// A job's cost for one token of the context: reading K and V in 16 bits at 20 GB/s, arithmetic at 80
// GFLOP/s.
float cost_per_token_ns(int rows, int head_size) {
  return static_cast<float>(head_size) * (0.2f + 0.05f * static_cast<float>(rows));
}
constexpr float kCostOfRow_ns = 100.0f;

class Plan : public AttentionPlan {
 public:
  void make(const BatchView& batch, const BlockTables& tables, const AttentionShape& shape, int block_size);
  int units() const { return num_units * shape_.num_kv_heads; }
  int64_t partials() const { return num_partials_; }
  void rewind() { std::fill(counters_.begin(), counters_.end(), 0); }

 private:
  struct CostedUnit {
    float cost_ns;
    AttentionUnit unit;
  };

  void cut_request(const BatchView& batch, const BlockTables& tables, int request);
  void share_spans();
  void share_span(int span);
  bool same_blocks(const AttentionTile& a, const AttentionTile& b, int span) const;
  void cut_tiles();
  void pack_units();

  int rows_of(const AttentionTile& tile) const { return tile.num_tokens * heads_per_kv_; }
  int end_span(int tile) const { return tiles_[tile].first_span + tiles_[tile].num_spans; }
  int first_seen(int position) const { return shape_.window ? std::max(0, position - shape_.window + 1) : 0; }
  // How many tokens of spans [first, end) a tile reads.
  int num_read(const AttentionTile& tile, int first, int end) const;
  void add_job(const int32_t* members, int num_members, int first_span, int num_spans);

  AttentionShape shape_{};
  int heads_per_kv_ = 1, block_size_ = 1;
  int64_t num_partials_ = 0;
  float unit_cost_ns_ = 0;
  std::vector<AttentionTile> tiles_;
  std::vector<int32_t> members_;
  std::vector<AttentionJob> jobs_;
  std::vector<float> job_costs_ns_;
  std::vector<CostedUnit> costed_;
  std::vector<AttentionUnit> units_;
  std::vector<int32_t> counters_;
  // While sharing:
  std::vector<int32_t> candidates_;  // tiles, of which all spans so far are shared or still to come
  std::vector<int32_t> same_;        // those that share a span
  std::vector<int32_t> own_span_;    // per tile: the first span that it shares with nobody
};

void check(bool right, const char* what, int found) {
  if (!right)
    throw std::invalid_argument("attention: " + std::string(what) + ", not " + std::to_string(found));
}

void check_shape(const AttentionShape& shape, int block_size) {
  check(shape.head_size > 0 && shape.head_size <= kMaxHeadSize && shape.head_size % kLanes == 0,
        "the head size must be a multiple of 16 up to 256", shape.head_size);
  check(shape.num_kv_heads > 0 && shape.num_heads % shape.num_kv_heads == 0,
        "the number of KV heads must divide that of the heads", shape.num_kv_heads);
  check(shape.num_heads <= shape.num_kv_heads * kAttentionRows, "at most 64 query heads may share a KV head",
        shape.num_heads / shape.num_kv_heads);
  check(block_size > 0 && block_size % kLanes == 0, "the block size must be a multiple of 16", block_size);
  check(shape.window >= 0, "the window must be positive, or 0 for none", shape.window);
  check(shape.causal || !shape.window, "a window needs causal attention", shape.window);
}

void Plan::make(const BatchView& batch, const BlockTables& tables, const AttentionShape& shape,
                int block_size) {
  check_shape(shape, block_size);
  shape_ = shape;
  block_size_ = block_size;
  heads_per_kv_ = shape.num_heads / shape.num_kv_heads;
  num_partials_ = 0;
  tiles_.clear();
  members_.clear();
  jobs_.clear();
  job_costs_ns_.clear();
  for (int r = 0; r < batch.num_requests; ++r) cut_request(batch, tables, r);
  share_spans();
  cut_tiles();
  pack_units();
  counters_.assign(tiles_.size() * shape.num_kv_heads, 0);

  AttentionPlan::tiles = tiles_.data();
  AttentionPlan::members = members_.data();
  AttentionPlan::jobs = jobs_.data();
  AttentionPlan::units = units_.data();
  AttentionPlan::num_units = static_cast<int32_t>(units_.size());
  AttentionPlan::num_ended = counters_.data();
}

// Tiles of about equal size.
void Plan::cut_request(const BatchView& batch, const BlockTables& tables, int request) {
  const int first = batch.query_start_loc[request], num_tokens = batch.query_start_loc[request + 1] - first;
  const int seq_len = batch.seq_lens[request], start = seq_len - num_tokens;
  const int most = kAttentionRows / heads_per_kv_, count = (num_tokens + most - 1) / most;
  for (int i = 0; i < count; ++i) {
    const int begin = static_cast<int>(int64_t{num_tokens} * i / count);
    const int end = static_cast<int>(int64_t{num_tokens} * (i + 1) / count);
    AttentionTile tile{};
    tile.blocks = tables.blocks + int64_t{request} * tables.width;
    tile.first_token = first + begin;
    tile.num_tokens = end - begin;
    tile.position = start + begin;
    tile.seq_len = seq_len;
    tile.first_span = first_seen(tile.position) / kSpan;
    const int last_seen = shape_.causal ? start + end - 1 : seq_len - 1;
    tile.num_spans = last_seen / kSpan + 1 - tile.first_span;
    tiles_.push_back(tile);
  }
}

int Plan::num_read(const AttentionTile& tile, int first, int end) const {
  const int begin_seen = first_seen(tile.position);
  const int end_seen = shape_.causal ? tile.position + tile.num_tokens : tile.seq_len;
  return std::max(0, std::min(end * kSpan, end_seen) - std::max(first * kSpan, begin_seen));
}

void Plan::add_job(const int32_t* members, int num_members, int first_span, int num_spans) {
  const auto at = static_cast<int32_t>(members_.size());
  int rows = 0, tokens = 0;
  for (int i = 0; i < num_members; ++i) {
    const AttentionTile& tile = tiles_[members[i]];
    members_.push_back(members[i]);
    rows += rows_of(tile);
    tokens = std::max(tokens, num_read(tile, first_span, first_span + num_spans));
  }
  jobs_.push_back({at, num_members, first_span, num_spans});
  job_costs_ns_.push_back(kCostOfRow_ns * static_cast<float>(rows * num_spans) +
                          static_cast<float>(tokens) * cost_per_token_ns(rows, shape_.head_size));
}

// Whether reading span `span` through either table is reading the same memory.
bool Plan::same_blocks(const AttentionTile& a, const AttentionTile& b, int span) const {
  const int first = span * kSpan / block_size_, last = ((span + 1) * kSpan - 1) / block_size_;
  return !std::memcmp(a.blocks + first, b.blocks + first, sizeof(int32_t) * (last + 1 - first));
}

// Whole spans that decodes have in common. Who shares a span with nobody shares no later one: prefixes are
// shared.
void Plan::share_spans() {
  own_span_.resize(tiles_.size());
  candidates_.clear();
  int last = 0;
  for (size_t i = 0; i < tiles_.size(); ++i) {
    const AttentionTile& tile = tiles_[i];
    own_span_[i] = tile.first_span;
    if (rows_of(tile) > kDecodeRows || tile.seq_len < (tile.first_span + 1) * kSpan) continue;
    candidates_.push_back(static_cast<int32_t>(i));
    last = std::max(last, tile.seq_len / kSpan);
  }
  for (int span = 0; span < last && candidates_.size() > 1; ++span) share_span(span);
}

void Plan::share_span(int span) {
  const int place = span * kSpan / block_size_;
  const auto has_span = [&](int tile) {
    return tiles_[tile].first_span <= span && span < end_span(tile) &&
           (span + 1) * kSpan <= tiles_[tile].seq_len;
  };
  const auto first_block = [&](int tile) { return has_span(tile) ? tiles_[tile].blocks[place] : INT32_MIN; };
  // Those who may share come to stand side by side, in the order of the batch; blocks are compared only
  // there.
  std::sort(candidates_.begin(), candidates_.end(), [&](int a, int b) {
    const int block_a = first_block(a), block_b = first_block(b);
    return block_a != block_b ? block_a < block_b : a < b;
  });
  size_t kept = 0;
  for (size_t i = 0, end; i < candidates_.size(); i = end) {
    const int leader = candidates_[i], block = first_block(leader);
    for (end = i + 1; end < candidates_.size() && first_block(candidates_[end]) == block;) ++end;
    if (!has_span(leader)) {  // their window begins later, or they are at their end
      for (size_t j = i; j < end; ++j)
        if (tiles_[candidates_[j]].first_span > span) candidates_[kept++] = candidates_[j];
      continue;
    }
    same_.clear();
    for (size_t j = i; j < end; ++j)
      if (same_blocks(tiles_[leader], tiles_[candidates_[j]], span)) same_.push_back(candidates_[j]);
    if (same_.size() < 2) continue;
    for (const int32_t tile : same_) {
      own_span_[tile] = span + 1;
      candidates_[kept++] = tile;
    }
    for (size_t j = 0, next; j < same_.size(); j = next) {
      int rows = 0;
      for (next = j; next < same_.size() && rows + rows_of(tiles_[same_[next]]) <= kAttentionRows; ++next)
        rows += rows_of(tiles_[same_[next]]);
      add_job(&same_[j], static_cast<int>(next - j), span, 1);
    }
  }
  candidates_.resize(kept);
}

// What tiles do not share. A tile that costs much more than a unit should is cut between spans.
void Plan::cut_tiles() {
  float total_ns = 0;
  for (const float cost_ns : job_costs_ns_) total_ns += cost_ns;
  for (size_t i = 0; i < tiles_.size(); ++i)
    total_ns += static_cast<float>(num_read(tiles_[i], own_span_[i], end_span(i))) *
                cost_per_token_ns(rows_of(tiles_[i]), shape_.head_size);
  unit_cost_ns_ =
      std::max(kMinUnitCost_ns, total_ns * static_cast<float>(shape_.num_kv_heads) / kUnitsPerPass);

  const int64_t pitch = partial_pitch(shape_.head_size);
  for (size_t i = 0; i < tiles_.size(); ++i) {
    AttentionTile& tile = tiles_[i];
    const auto number = static_cast<int32_t>(i);
    const int first = own_span_[i], num_own = end_span(i) - first;
    const float per_span_ns = kSpan * cost_per_token_ns(rows_of(tile), shape_.head_size);
    const int spans = std::max(1, static_cast<int>(unit_cost_ns_ / per_span_ns));
    const int64_t partials = pitch * rows_of(tile) * tile.num_spans * shape_.num_kv_heads;
    const bool may_cut = num_own >= 2 * spans && num_partials_ + partials <= kMaxPartials;
    tile.whole = first == tile.first_span && !may_cut;
    if (tile.whole) {
      add_job(&number, 1, first, num_own);
      continue;
    }
    tile.partials = num_partials_;
    num_partials_ += partials;
    for (int span = first; span < end_span(i); span += spans)
      add_job(&number, 1, span, std::min(spans, end_span(i) - span));
  }
}

// Jobs are put together, in their order, until they cost enough. The dearest units come first, so that
// threads end together.
void Plan::pack_units() {
  const float enough_ns = std::min(unit_cost_ns_, kMaxUnitCost_ns);
  costed_.clear();
  for (size_t i = 0, end; i < jobs_.size(); i = end) {
    float cost_ns = job_costs_ns_[i];
    for (end = i + 1; end < jobs_.size() && cost_ns + job_costs_ns_[end] <= enough_ns; ++end)
      cost_ns += job_costs_ns_[end];
    costed_.push_back({cost_ns, {static_cast<int32_t>(i), static_cast<int32_t>(end - i)}});
  }
  std::stable_sort(costed_.begin(), costed_.end(),
                   [](const CostedUnit& a, const CostedUnit& b) { return a.cost_ns > b.cost_ns; });
  units_.clear();
  for (const CostedUnit& costed : costed_) units_.push_back(costed.unit);
}

}  // namespace

AttentionPlan* plan_attention(AttentionPlan* plan, const BatchView& batch, const BlockTables& tables,
                              const AttentionShape& shape, int block_size) {
  Plan* made = plan ? static_cast<Plan*>(plan) : new Plan{};
  try {
    made->make(batch, tables, shape, block_size);
  } catch (...) {
    if (!plan) delete made;
    throw;
  }
  return made;
}

void destroy_plan(AttentionPlan* plan) { delete static_cast<Plan*>(plan); }
int num_units(const AttentionPlan& plan) { return static_cast<const Plan&>(plan).units(); }
int64_t num_partials(const AttentionPlan& plan) { return static_cast<const Plan&>(plan).partials(); }
void rewind(AttentionPlan& plan) { static_cast<Plan&>(plan).rewind(); }

}  // namespace mainspring
