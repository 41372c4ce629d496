// Matrix products, norms, activations and sampling, random numbers.
#include <ATen/CPUGeneratorImpl.h>

#include <limits>

#include "op.h"

using namespace op;

// A generator of the seed and offset that torch_npu hands over: the same pair gives the same numbers.
static at::Generator seeded(int64_t seed, int64_t offset) {
  return at::detail::createCPUGenerator(static_cast<uint64_t>(seed) * 0x9E3779B97F4A7C15ULL + static_cast<uint64_t>(offset));
}

OP(aclnnMm, (Tensor a, Tensor b, Tensor out, int8_t), put(out, at::mm(a, b)))
OP(aclnnMatmul, (Tensor a, Tensor b, Tensor out, int8_t), put(out, at::matmul(a, b)))
OP(aclnnBatchMatMul, (Tensor a, Tensor b, Tensor out, int8_t), put(out, at::bmm(a, b)))
OP(aclnnMv, (Tensor a, Tensor b, Tensor out, int8_t), put(out, at::mv(a, b)))
OP(aclnnDot, (Tensor a, Tensor b, Tensor out), put(out, at::dot(a, b)))
OP(aclnnAddmm, (Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t),
   put(out, at::addmm(c, a, b, beta, alpha)))
OP(aclnnBaddbmm, (Tensor c, Tensor a, Tensor b, Scalar beta, Scalar alpha, Tensor out, int8_t),
   put(out, at::baddbmm(c, a, b, beta, alpha)))

OP(aclnnRmsNorm, (Tensor x, Tensor gamma, double eps, Tensor y, Tensor rstd), {
  auto r = at::rsqrt(x.to(at::kFloat).pow(2).mean(-1, true) + eps);
  put(y, (x.to(at::kFloat) * r).to(x.scalar_type()) * gamma);
  put(rstd, r);
})

// Source of the checks: norm/add_rms_norm/op_host/op_api/aclnn_add_rms_norm.cpp of hicann/ops-nn at 8090233, CheckDtypeValid
// and CheckShapeDim; gamma's shape is in op-plugin's document of npu_add_rms_norm.
using AddRmsNorm = Make<void (*)(Tensor, Tensor, Tensor, double, Tensor, Tensor, Tensor)>;
static uint64_t add_rms_norm_need(const AddRmsNorm::Kept& k) {
  auto &a = std::get<0>(k), &b = std::get<1>(k), &gamma = std::get<2>(k), &y = std::get<4>(k), &rstd = std::get<5>(k),
       &sum = std::get<6>(k);
  require(a && b && gamma && y && rstd && sum, "x1, x2, gamma and the three outputs are needed");
  require(is_floating(*a), "x1 is " + dtype_of(*a));
  for (auto* each : {&b, &gamma, &y, &sum}) require((*each)->type == a->type, "x2, gamma, y or x differs from x1 in dtype");
  require(rstd->type == acl::kFloat, "rstd must be float32");
  for (auto* each : {&b, &y, &sum}) require((*each)->sizes == a->sizes, "x2, y or x differs from x1 in shape");
  size_t last = gamma->sizes.size(), all = a->sizes.size();
  require(last >= 1 && last <= all && all <= 8 && std::equal(gamma->sizes.begin(), gamma->sizes.end(), a->sizes.end() - last),
          "gamma must have the last dimensions of x1, which has at most 8");
  return 0;
}
OP_WITH_WORKSPACE(aclnnAddRmsNorm, (Tensor a, Tensor b, Tensor gamma, double eps, Tensor y, Tensor rstd, Tensor sum),
   add_rms_norm_need, {
     auto x = (a + b).to(at::kFloat);
     Ints dims;
     for (int64_t d = gamma.dim(); d; d--) dims.push_back(-d);
     auto r = at::rsqrt(x.pow(2).mean(dims, true) + eps);
     put(y, (x * r).to(a.scalar_type()) * gamma);
     put(rstd, r);
     put(sum, x.to(a.scalar_type()));
   })

// Source of the checks: activation/swi_glu/docs/aclnnSwiGlu.md of hicann/ops-nn at 0c8fd4c.
using SwiGlu = Make<void (*)(Tensor, int64_t, Tensor)>;
static uint64_t swi_glu_need(const SwiGlu::Kept& k) {
  auto &x = std::get<0>(k), &out = std::get<2>(k);
  int64_t dim = std::get<1>(k), all = x ? static_cast<int64_t>(x->sizes.size()) : 0;
  require(x && out, "x and out are needed");
  require(is_floating(*x) && out->type == x->type, "x is " + dtype_of(*x) + ", out " + dtype_of(*out));
  require(dim >= -all && dim < all, "there is no dimension " + std::to_string(dim));
  auto half = x->sizes;
  auto& size = half[dim < 0 ? dim + all : dim];
  require(size % 2 == 0, "dimension " + std::to_string(dim) + " of size " + std::to_string(size) + " has no halves");
  size /= 2;
  require(out->sizes == half, "out is not half of x");
  int64_t stride = 1;
  for (size_t d = x->sizes.size(); d--; stride *= x->sizes[d])
    require(x->sizes[d] < 2 || x->strides[d] == stride, "x has gaps between its rows");
  return 0;
}
OP_WITH_WORKSPACE(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), swi_glu_need, {
  auto halves = x.to(at::kFloat).chunk(2, dim);
  put(out, (at::silu(halves[0]) * halves[1]).to(x.scalar_type()));
})

// The first columns of each head are turned, as many as the table has. Source of the checks: posembedding/
// rope_with_sin_cos_cache of cann/ops-transformer, op_api/aclnn_rope_with_sin_cos_cache.cpp, and its document's limits.
using RopeWithCache = Make<void (*)(Tensor, Tensor, Tensor, Tensor, Ints, int64_t, bool, Tensor, Tensor)>;
static uint64_t rope_with_cache_need(const RopeWithCache::Kept& k) {
  auto &positions = std::get<0>(k), &query = std::get<1>(k), &key = std::get<2>(k), &table = std::get<3>(k),
       &query_out = std::get<7>(k), &key_out = std::get<8>(k);
  int64_t dim = std::get<5>(k);
  require(positions && query && key && table && query_out && key_out, "the four inputs and two outputs are needed");
  require(is_floating(*query), "query is " + dtype_of(*query));
  for (auto* each : {&key, &table, &query_out, &key_out})
    require((*each)->type == query->type, "key, the table or an output differs from query in dtype");
  require(positions->type == acl::kInt32 || positions->type == acl::kInt64, "positions are " + dtype_of(*positions));
  require(query->sizes.size() == 2 && key->sizes.size() == 2 && table->sizes.size() == 2,
          "query, key and the table must have two dimensions");
  require(positions->sizes == Ints{query->sizes[0]} && key->sizes[0] == query->sizes[0],
          "positions and key must have the rows of query; positions of several axes are not simulated");
  require(query_out->sizes == query->sizes && key_out->sizes == key->sizes, "the outputs have other shapes than query and key");
  int64_t step = query->type == acl::kFloat ? 16 : 32, turned = table->sizes[1];
  require(dim > 0 && dim % step == 0 && turned % step == 0 && turned <= dim,
          "heads of " + std::to_string(dim) + ", " + std::to_string(turned) + " columns of the table");
  require(query->sizes[1] % dim == 0 && key->sizes[1] % dim == 0, "query or key is no heads of " + std::to_string(dim));
  return 0;
}
OP_WITH_WORKSPACE(aclnnRopeWithSinCosCache,
   (Tensor positions, Tensor query, Tensor key, Tensor table, Ints, int64_t dim, bool halves, Tensor query_out, Tensor key_out),
   rope_with_cache_need, {
     auto angles = table.index_select(0, positions.to(at::kLong)).to(at::kFloat).unsqueeze(1).chunk(2, -1);
     auto turn = [&](const at::Tensor& x, at::Tensor& out) {
       auto heads = x.to(at::kFloat).reshape({x.size(0), -1, dim}).clone();
       auto part = heads.narrow(-1, 0, table.size(1));
       auto pairs = halves ? part.unflatten(-1, {2, -1}) : part.unflatten(-1, {-1, 2}).transpose(-1, -2);
       auto a = pairs.select(-2, 0).clone(), b = pairs.select(-2, 1).clone();
       pairs.select(-2, 0).copy_(a * angles[0] - b * angles[1]);
       pairs.select(-2, 1).copy_(b * angles[0] + a * angles[1]);
       put(out, heads.reshape(x.sizes()).to(x.scalar_type()));
     };
     turn(query, query_out);
     turn(key, key_out);
   })

// Logits below the k-th largest are -inf; then the smallest whose probabilities add up to at most 1 - p. Source of the
// checks: index/apply_top_k_top_p_with_sorted/op_api/aclnn_apply_top_k_top_p.cpp of hicann/ops-nn at ef4b09d.
using TopKTopP = Make<void (*)(Tensor, Tensor, Tensor, Tensor)>;
static uint64_t top_k_top_p_need(const TopKTopP::Kept& k) {
  auto &logits = std::get<0>(k), &p = std::get<1>(k), &top_k = std::get<2>(k), &out = std::get<3>(k);
  require(logits && out && (p || top_k), "logits, out, and p or k are needed");
  require(is_floating(*logits) && out->type == logits->type, "logits are " + dtype_of(*logits) + ", out " + dtype_of(*out));
  require(logits->sizes.size() == 2 && out->sizes == logits->sizes, "logits and out must be [rows, vocabulary], both the same");
  Ints rows{logits->sizes[0]};
  require(!p || (p->type == logits->type && p->sizes == rows), "p must be one number per row, of logits' dtype");
  require(!top_k || (top_k->type == acl::kInt32 && top_k->sizes == rows), "k must be one int32 per row");
  return 0;
}
OP_WITH_WORKSPACE(aclnnApplyTopKTopP, (Tensor logits, Tensor p, Tensor k, Tensor out), top_k_top_p_need, {
  auto [sorted, places] = at::sort(logits.to(at::kFloat), true, -1, false);
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  if (k.defined())
    for (int64_t row = 0; row < sorted.size(0); row++) {
      int64_t count = k[row].item<int64_t>(), all = sorted.size(1);
      bool cuts = count > 0 && count < all;
      require_by(sim::Limit::top_k, count > 0 && (count <= 1024 || !cuts), "k is " + std::to_string(count));
      if (cuts) sorted[row].masked_fill_(sorted[row] < sorted[row][all - count], kLowest);
    }
  if (p.defined()) {
    auto small = sorted.softmax(-1).cumsum(-1) <= 1 - p.to(at::kFloat).unsqueeze(1);
    small.select(1, -1).fill_(false);
    sorted = sorted.masked_fill(small, kLowest);
  }
  put(out, at::empty_like(sorted).scatter_(1, places, sorted).to(logits.scalar_type()));
})

OP(aclnnInplaceNormal, (Tensor a, float mean, float std, int64_t seed, int64_t offset),
   a.normal_(mean, std, seeded(seed, offset)))
OP(aclnnInplaceUniform, (Tensor a, double low, double high, uint64_t seed, uint64_t offset),
   a.uniform_(low, high, seeded(static_cast<int64_t>(seed), static_cast<int64_t>(offset))))
OP(aclnnInplaceRandom, (Tensor a, int64_t low, int64_t high, int64_t seed, int64_t offset),
   a.random_(low, high, seeded(seed, offset)))

// In capture, seed and offset are device tensors, and the graph adds its own offset.
static at::Generator seeded(const Tensor& seed, const Tensor& offset, int64_t more) {
  return seeded(seed.item<int64_t>(), offset.item<int64_t>() + more);
}
OP(aclnnInplaceNormalTensor, (Tensor a, float mean, float std, Tensor seed, Tensor offset, int64_t more),
   a.normal_(mean, std, seeded(seed, offset, more)))
OP(aclnnInplaceUniformTensor, (Tensor a, double low, double high, Tensor seed, Tensor offset, int64_t more),
   a.uniform_(low, high, seeded(seed, offset, more)))
OP(aclnnInplaceRandomTensor, (Tensor a, int64_t low, int64_t high, Tensor seed, Tensor offset, int64_t more),
   a.random_(low, high, seeded(seed, offset, more)))
