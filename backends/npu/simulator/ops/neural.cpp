// Matrix products, the norm, random numbers.
#include <ATen/CPUGeneratorImpl.h>

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

OP(aclnnAddRmsNorm, (Tensor a, Tensor b, Tensor gamma, double eps, Tensor y, Tensor rstd, Tensor sum), {
  auto x = a + b;
  auto r = at::rsqrt(x.to(at::kFloat).pow(2).mean(-1, true) + eps);
  put(y, (x.to(at::kFloat) * r).to(x.scalar_type()) * gamma);
  put(rstd, r);
  put(sum, x);
})

OP(aclnnNanToNum, (Tensor a, float nan, float high, float low, Tensor out), put(out, at::nan_to_num(a, nan, high, low)))

OP(aclnnSwiGlu, (Tensor x, int64_t dim, Tensor out), {
  auto halves = x.chunk(2, dim);
  put(out, at::silu(halves[0]) * halves[1]);
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
