// Fused-infer attention (aclnnFusedInferAttentionScoreV3 and V4): TND and batched layouts, contiguous or paged keys,
// grouped query heads, MLA's rope parts, log-sum-exp output, attention sinks.
//
// Lengths are host lists, checked when the op is issued as the real one does: that is where stale or misshapen
// lengths of a task update must show.
#include <cmath>
#include <limits>

#include "../runtime/limits.h"
#include "op.h"

using namespace op;
using sim::Limit;

namespace {

constexpr int64_t kCausalMask = 2048;  // sparse modes 2 to 4 take one compressed mask of this size

struct Problem {
  Str layout;
  int64_t heads, kv_heads, sparse, block_size;
  double scale;
  bool lse;
  Ints q_lengths, kv_lengths;
  int64_t before = 0, after = 0;  // sparse mode 4: keys that a row sees before and after its own

  bool packed() const { return layout == "TND"; }
  bool causal() const { return sparse == 3; }
  bool band() const { return sparse == 4; }
};

[[noreturn]] void bad(const std::string& why) { throw std::runtime_error(why); }
std::string text(int64_t n) { return std::to_string(n); }

// ---- checks when the op is issued: shapes, dtypes, lengths; the answer is the workspace in bytes ----

struct Shapes {
  const TensorHandle *query, *key, *value, *mask, *table, *query_rope, *key_rope, *out, *lse, *sink;
};

void check_dtypes(const Shapes& s) {
  if (s.key->type != s.query->type || s.value->type != s.query->type)
    bad("query, key and value differ in dtype");
  if (s.out->type != s.query->type) bad("attention_out differs from query in dtype");
  if (s.table && s.table->type != acl::kInt32) bad("block_table must be int32");
  if (s.query_rope && (s.query_rope->type != s.query->type || s.key_rope->type != s.query->type))
    bad("query_rope and key_rope must have query's dtype");
  if (s.mask && s.mask->type != acl::kBool && s.mask->type != acl::kInt8 && s.mask->type != acl::kUint8)
    bad("atten_mask must be bool, int8 or uint8");
}

void refuse_by(Limit limit, const std::string& why) { bad(sim::by_limit(limit, why)); }

// head_dim 512 with a latent as the only key head: the device's op of its own for MLA.
void check_latent_limits(const Problem& p, const Shapes& s) {
  if (!sim::is_on(Limit::fia_latent)) return;
  auto refuse = [](const std::string& why) { refuse_by(Limit::fia_latent, why); };
  if (s.query->type != acl::kBFloat16 && s.query->type != acl::kHalf) refuse("query is neither bfloat16 nor float16");
  if (!s.query_rope || s.query_rope->sizes.back() != 64) refuse("head_dim 512 needs query_rope and key_rope of 64");
  if (p.kv_heads != 1) refuse(text(p.kv_heads) + " key heads");
  if (p.heads > 128 || (p.heads & (p.heads - 1))) refuse(text(p.heads) + " query heads");
  if (s.table && p.block_size != 16 && p.block_size != 128) refuse("block_size " + text(p.block_size));
  if (p.lse) refuse("a log-sum-exp is asked for");
}

// What the sources say of layout TND; see limits.cpp for each row.
void check_limits(const Problem& p, const Shapes& s) {
  auto dim = [&](const TensorHandle& t) {  // of one head; paged caches may have all heads in one dimension
    return t.sizes.size() == 3 && s.table ? t.sizes[2] / p.kv_heads : t.sizes.back();
  };
  int64_t query = s.query->sizes.back(), key = dim(*s.key), value = dim(*s.value);
  if (sim::is_on(Limit::fia_mask)) {
    bool plain = p.sparse == 0 && !s.mask, masked = (p.sparse == 3 || p.sparse == 4) && s.mask;
    if (!plain && !masked)
      refuse_by(Limit::fia_mask, "sparse_mode " + text(p.sparse) + (s.mask ? " with" : " without") + " a mask");
    if (p.band() && (value != 128 && value != 64))
      refuse_by(Limit::fia_mask, "sparse_mode 4 with a value head_dim of " + text(value));
    if (p.band() && p.before + p.after < 0)
      refuse_by(Limit::fia_mask, "pre_tokens " + text(p.before) + " and next_tokens " + text(p.after));
  }
  if (sim::is_on(Limit::fia_sink) && s.sink)
    if (s.sink->sizes != Ints{p.heads} || s.sink->type != acl::kBFloat16 || value != 128)
      refuse_by(Limit::fia_sink, "learnable_sink of " + std::string(c10::toString(scalar_type(s.sink->type))) +
                                     ", value head_dim " + text(value));
  if (sim::is_on(Limit::fia_lengths) && p.q_lengths.size() > 4096)
    refuse_by(Limit::fia_lengths, text(static_cast<int64_t>(p.q_lengths.size())) + " sequences");
  if (query == 512) return check_latent_limits(p, s);
  if (sim::is_on(Limit::fia_dtype) && s.query->type != acl::kBFloat16)
    refuse_by(Limit::fia_dtype, std::string("query is ") + c10::toString(scalar_type(s.query->type)));
  if (sim::is_on(Limit::fia_head_dim)) {
    std::string heads = "head_dim " + text(query) + " of query, " + text(key) + " of key, " + text(value) + " of value";
    bool same = query == 128 && key == 128 && value == 128;
    if (s.query_rope) {
      int64_t rope = s.query_rope->sizes.back();
      if (!same || rope != 64) refuse_by(Limit::fia_head_dim, heads + ", " + text(rope) + " of rope");
    } else {
      bool wide = query == 192 && key == 192 && (value == 128 || (value == 192 && p.heads == p.kv_heads));
      if (!same && !wide) refuse_by(Limit::fia_head_dim, heads);
    }
  }
  if (sim::is_on(Limit::fia_block_size) && s.table && (p.block_size % 128 || p.block_size < 128 || p.block_size > 512))
    refuse_by(Limit::fia_block_size, "block_size " + text(p.block_size));
  if (sim::is_on(Limit::fia_lengths) && p.sparse == 3)
    for (size_t i = 0; i < p.q_lengths.size(); i++) {
      int64_t rows = p.q_lengths[i] - (i ? p.q_lengths[i - 1] : 0);
      if (rows > p.kv_lengths[i] && p.kv_lengths[i])
        refuse_by(Limit::fia_lengths, "sequence " + text(static_cast<int64_t>(i)) + " has " + text(rows) +
                                          " query rows and " + text(p.kv_lengths[i]) + " keys, with sparse_mode 3");
    }
}

uint64_t check(const Problem& p, const Shapes& s, bool largest) {
  if (!s.query || !s.key || !s.value) bad("query, key and value are needed");
  if (p.layout != "TND" && p.layout != "BSND" && p.layout != "BNSD" && p.layout != "BSH")
    bad("input_layout '" + p.layout + "' is not simulated");
  if (bool(s.query_rope) != bool(s.key_rope)) bad("query_rope and key_rope go together");
  check_dtypes(s);
  if (p.kv_heads <= 0 || p.heads % p.kv_heads) bad(text(p.heads) + " heads over " + text(p.kv_heads) + " kv heads");
  if (p.sparse >= 2 && p.sparse <= 4 &&
      (!s.mask || s.mask->sizes.size() < 2 || s.mask->sizes.back() != kCausalMask))
    bad("sparse_mode " + text(p.sparse) + " needs an atten_mask of 2048 x 2048");

  int64_t sequences = p.packed() ? static_cast<int64_t>(p.q_lengths.size()) : s.query->sizes[0];
  int64_t rows = p.packed() ? s.query->sizes[0] : 0;
  if (p.packed()) {
    if (p.q_lengths.empty()) bad("layout TND needs actual_seq_lengths");
    for (size_t i = 1; i < p.q_lengths.size(); i++)
      if (p.q_lengths[i] < p.q_lengths[i - 1]) bad("actual_seq_lengths must be cumulative in layout TND");
    if (p.q_lengths.back() != rows)
      bad("actual_seq_lengths ends at " + text(p.q_lengths.back()) + ", query has " + text(rows) + " tokens");
    if (p.kv_lengths.size() != p.q_lengths.size())
      bad(text(static_cast<int64_t>(p.kv_lengths.size())) + " kv lengths for " + text(sequences) + " sequences");
  } else {
    rows = sequences * s.query->sizes[p.layout == "BNSD" ? 2 : 1];
  }
  int64_t room = 0;
  if (s.table) {
    if (s.table->sizes.size() != 2 || s.table->sizes[0] < sequences)
      bad("block_table has " + text(s.table->sizes[0]) + " rows for " + text(sequences) + " sequences");
    int64_t cache_block = s.key->sizes.size() == 3 ? s.key->sizes[1] : s.key->sizes[2];
    if (cache_block != p.block_size)
      bad("block_size " + text(p.block_size) + ", the key cache has blocks of " + text(cache_block));
    room = s.table->sizes[1] * p.block_size;
  } else {
    room = p.packed() ? s.key->sizes[0] : s.key->sizes[p.layout == "BNSD" ? 2 : 1];
  }
  int64_t longest = 0;
  for (size_t i = 0; i < p.kv_lengths.size(); i++) {
    int64_t length = p.kv_lengths[i];
    if (length < 0 || length > room)
      bad("kv length " + text(length) + " of sequence " + text(static_cast<int64_t>(i)) + ", there is room for " +
          text(room));
    longest = std::max(longest, length);
  }
  if (p.packed()) check_limits(p, s);
  if (p.lse && (s.lse->type != acl::kFloat || s.lse->sizes.empty())) bad("softmax_lse must be float32");
  // Enough for the scores; the maximum is what any lengths that fit the block table may need.
  int64_t columns = largest || p.kv_lengths.empty() ? room : longest;
  return static_cast<uint64_t>((rows * p.heads * columns * 4 / 512 + 1) * 512);
}

template <int kHeads, int kOut, class Kept>
uint64_t need(const Kept& k, bool largest, const TensorHandle* sink = nullptr) {
  auto pointer = [](const Opt<TensorHandle>& t) { return t ? &*t : nullptr; };
  auto first = [](const std::vector<Opt<TensorHandle>>& list) {
    return list.size() == 1 && list[0] ? &*list[0] : nullptr;
  };
  // Optional tensors that this runtime doesn't compute with.
  auto refuse_if = [&](bool given, const char* what) {
    if (given) bad(std::string(what) + " is not simulated");
  };
  refuse_if(std::get<3>(k).has_value(), "pse_shift");
  refuse_if(std::get<7>(k).has_value() || std::get<8>(k).has_value() || std::get<9>(k).has_value(), "quantization");
  refuse_if(std::get<10>(k).has_value() || std::get<12>(k).has_value() || std::get<17>(k).has_value(), "quantization");
  refuse_if(std::get<15>(k).has_value() || std::get<16>(k).has_value(), "left padding");
  refuse_if(std::get<21>(k).has_value() || std::get<22>(k).has_value(), "a shared prefix");
  int64_t heads = std::get<kHeads>(k), kv = std::get<kHeads + 5>(k);
  Problem p{std::get<kHeads + 4>(k), heads, kv ? kv : heads, std::get<kHeads + 6>(k), std::get<kHeads + 8>(k),
            std::get<kHeads + 1>(k), std::get<kHeads + 10>(k), std::get<5>(k), std::get<6>(k), std::get<kHeads + 2>(k),
            std::get<kHeads + 3>(k)};
  Shapes s{pointer(std::get<0>(k)),  first(std::get<1>(k)),     first(std::get<2>(k)),
           pointer(std::get<4>(k)),  pointer(std::get<14>(k)),  pointer(std::get<24>(k)),
           pointer(std::get<25>(k)), pointer(std::get<kOut>(k)), pointer(std::get<kOut + 1>(k)), sink};
  return check(p, s, largest);
}

// ---- the computation, in float32, one sequence after the other ----

// The first `length` cached rows of sequence `row` as [length, heads, dim].
Tensor cached(const Tensor& cache, const Tensor& table, int64_t row, int64_t length, int64_t heads, int64_t block) {
  int64_t blocks = (length + block - 1) / block;
  auto ids = table[row].slice(0, 0, blocks).to(at::kLong);
  if (blocks && (ids.min().item<int64_t>() < 0 || ids.max().item<int64_t>() >= cache.size(0)))
    bad("block_table row " + text(row) + " names a block outside of the cache");
  auto pages = cache.index_select(0, ids);
  if (cache.dim() == 4) pages = pages.transpose(1, 2);  // [blocks, heads, block, dim] caches
  int64_t dim = cache.numel() / (cache.size(0) * block * heads);
  return pages.reshape({blocks * block, heads, dim}).slice(0, 0, length);
}

// Row `b` of a batched tensor as [tokens, heads, dim].
Tensor batched(const Tensor& t, const Str& layout, int64_t b, int64_t heads) {
  auto one = t[b];
  if (layout == "BNSD") return one.transpose(0, 1);
  return one.reshape({one.size(0), heads, -1});
}

void attend(const Problem& p, Tensor query, Tensor key, Tensor value, Tensor mask, Tensor table, Tensor query_rope,
            Tensor key_rope, Tensor sink, Tensor out, Tensor lse) {
  int64_t sequences = p.packed() ? static_cast<int64_t>(p.q_lengths.size()) : query.size(0);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (int64_t b = 0; b < sequences; b++) {
    int64_t begin = b && p.packed() ? p.q_lengths[b - 1] : 0;
    auto rows = [&](const Tensor& t, int64_t heads) {
      if (p.packed()) return t.slice(0, begin, p.q_lengths[b]);
      auto all = batched(t, p.layout, b, heads);
      return p.q_lengths.empty() ? all : all.slice(0, 0, p.q_lengths[b]);
    };
    auto keys = [&](const Tensor& t) {
      if (table.defined()) return cached(t, table, b, p.kv_lengths[b], p.kv_heads, p.block_size);
      if (p.packed()) return t.slice(0, b ? p.kv_lengths[b - 1] : 0, p.kv_lengths[b]);
      auto all = batched(t, p.layout, b, p.kv_heads);
      return p.kv_lengths.empty() ? all : all.slice(0, 0, p.kv_lengths[b]);
    };
    auto per_head = [&](const Tensor& t) {  // [tokens, kv heads, dim] -> [heads, tokens, dim]
      return t.to(at::kFloat).transpose(0, 1).repeat_interleave(p.heads / p.kv_heads, 0);
    };
    auto q = rows(query, p.heads).to(at::kFloat).transpose(0, 1);
    auto scores = at::bmm(q, per_head(keys(key)).transpose(1, 2));
    if (query_rope.defined())
      scores += at::bmm(rows(query_rope, p.heads).to(at::kFloat).transpose(0, 1),
                        per_head(keys(key_rope)).transpose(1, 2));
    scores *= p.scale;
    int64_t tokens = scores.size(1), columns = scores.size(2);
    auto target = rows(out, p.heads);
    if (!tokens) continue;
    if (!columns) {  // a padded row: no keys
      target.zero_();
      if (p.lse) rows(lse, p.heads).fill_(kInfinity);
      continue;
    }
    if (p.band()) {  // aligned to the last key: row i is at column columns - tokens + i
      auto ones = at::ones({tokens, columns}, at::kBool);
      scores.masked_fill_(ones.triu(columns - tokens + p.after + 1) | ones.tril(columns - tokens - p.before - 1),
                          -kInfinity);
    } else if (p.causal()) {
      scores.masked_fill_(at::ones({tokens, columns}, at::kBool).triu(columns - tokens + 1), -kInfinity);
    } else if (mask.defined()) {
      auto m = mask;
      while (m.dim() > 2) m = m[std::min<int64_t>(b, m.size(0) - 1)];
      scores.masked_fill_(m.slice(0, 0, tokens).slice(1, 0, columns).to(at::kBool), -kInfinity);
    }
    auto total = at::logsumexp(scores, -1, true);  // [heads, tokens, 1]
    if (sink.defined()) total = at::logaddexp(total, sink.to(at::kFloat).view({-1, 1, 1}));
    target.copy_(at::bmm(at::exp(scores - total), per_head(keys(value))).transpose(0, 1).reshape(target.sizes()));
    if (p.lse) rows(lse, p.heads).copy_(total.transpose(0, 1));
  }
}

}  // namespace

// The largest workspace that any lengths may need: the same parameters, no launch.
#define MAX_WORKSPACE(name, most)                                                                 \
  extern "C" {                                                                                    \
  __attribute__((used)) static void* name##_resolve_max() {                                       \
    return reinterpret_cast<void*>(&name##_make::workspace_size<&name##_body, name##_name, most>); \
  }                                                                                               \
  int name##GetMaxWorkspaceSize() __attribute__((ifunc(#name "_resolve_max")));                   \
  }

using V3 = op::Make<void (*)(
    Tensor, Tensors, Tensors, Tensor, Tensor, Ints, Ints, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Ints, Tensor, Tensor, Tensor, int64_t, double, int64_t,
    int64_t, Str, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t, Tensor, Tensor)>;
using V4 = op::Make<void (*)(
    Tensor, Tensors, Tensors, Tensor, Tensor, Ints, Ints, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int64_t,
    double, int64_t, int64_t, Str, int64_t, int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t, int64_t, Tensor,
    Tensor)>;
static uint64_t v3_now(const V3::Kept& k) { return need<27, 40>(k, false); }
static uint64_t v3_most(const V3::Kept& k) { return need<27, 40>(k, true); }
static const TensorHandle* v4_sink(const V4::Kept& k) { return std::get<28>(k) ? &*std::get<28>(k) : nullptr; }
static uint64_t v4_now(const V4::Kept& k) { return need<29, 43>(k, false, v4_sink(k)); }
static uint64_t v4_most(const V4::Kept& k) { return need<29, 43>(k, true, v4_sink(k)); }

OP_WITH_WORKSPACE(aclnnFusedInferAttentionScoreV3,
   (Tensor query, Tensors key, Tensors value, Tensor, Tensor mask, Ints q_lengths, Ints kv_lengths, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor table, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Ints, Tensor query_rope, Tensor key_rope, Tensor, int64_t heads, double scale, int64_t before, int64_t after, Str layout,
    int64_t kv_heads, int64_t sparse, int64_t, int64_t block_size, int64_t, bool lse_flag, int64_t, int64_t, Tensor out,
    Tensor lse),
   v3_now,
   attend({layout, heads, kv_heads ? kv_heads : heads, sparse, block_size, scale, lse_flag, q_lengths, kv_lengths, before, after},
          query, key[0], value[0], mask, table, query_rope, key_rope, Tensor(), out, lse))
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV3, v3_most)

OP_WITH_WORKSPACE(aclnnFusedInferAttentionScoreV4,
   (Tensor query, Tensors key, Tensors value, Tensor, Tensor mask, Ints q_lengths, Ints kv_lengths, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor table, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor query_rope, Tensor key_rope, Tensor, Tensor, Tensor sink, int64_t heads, double scale, int64_t before,
    int64_t after, Str layout, int64_t kv_heads, int64_t sparse, int64_t, int64_t block_size, int64_t, bool lse_flag, int64_t,
    int64_t, int64_t, Tensor out, Tensor lse),
   v4_now,
   attend({layout, heads, kv_heads ? kv_heads : heads, sparse, block_size, scale, lse_flag, q_lengths, kv_lengths, before, after},
          query, key[0], value[0], mask, table, query_rope, key_rope, sink, out, lse))
MAX_WORKSPACE(aclnnFusedInferAttentionScoreV4, v4_most)

// Attention over whole sequences, which torch_npu takes for scaled_dot_product_attention: a mask of any shape that
// broadcasts, true where a key is hidden.
static void attend_whole(Tensor query, Tensor key, Tensor value, Tensor mask, double scale, Tensor most, Tensor sum,
                         Tensor out) {
  auto repeat = [&](const Tensor& t) { return t.to(at::kFloat).repeat_interleave(query.size(1) / t.size(1), 1); };
  auto scores = at::matmul(query.to(at::kFloat), repeat(key).transpose(2, 3)) * scale;
  if (mask.defined()) scores.masked_fill_(mask.to(at::kBool), -std::numeric_limits<float>::infinity());
  auto highest = scores.amax(-1, true);
  auto weights = (scores - highest).exp();
  auto total = weights.sum(-1, true);
  out.copy_(at::matmul(weights / total, repeat(value)).reshape(out.sizes()));
  if (most.defined()) most.copy_(highest.expand(most.sizes()));
  if (sum.defined()) sum.copy_(total.expand(sum.sizes()));
}

OP(aclnnFlashAttentionScore,
   (Tensor query, Tensor key, Tensor value, Tensor pse, Tensor dropped, Tensor padding, Tensor mask, Ints prefix,
    double scale, double keep, int64_t, int64_t, int64_t heads, Str layout, int64_t, int64_t sparse, Tensor most,
    Tensor sum, Tensor, Tensor out),
   {
     if (layout != "BNSD") bad("input_layout '" + layout + "' is not simulated here");
     if (pse.defined() || dropped.defined() || padding.defined() || !prefix.empty() || keep != 1.0)
       bad("pse, dropout, padding_mask and prefix are not simulated");
     if (sparse > 1) bad("sparse_mode " + text(sparse) + " is not simulated here");
     if (heads != query.size(1)) bad(text(heads) + " heads, query has " + text(query.size(1)));
     attend_whole(query, key, value, mask, scale, most, sum, out);
   })
