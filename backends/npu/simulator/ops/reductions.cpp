// Sums, maxima, sorting, scans, softmax.
#include "op.h"

using namespace op;

static Tensor all_of(const Tensor& a, const Ints& d, bool keep) {
  auto b = a.to(at::kBool);
  return d.empty() ? b.all() : at::all(b, at::OptionalIntArrayRef(d), keep);
}
static Tensor any_of(const Tensor& a, const Ints& d, bool keep) {
  auto b = a.to(at::kBool);
  return d.empty() ? b.any() : at::any(b, at::OptionalIntArrayRef(d), keep);
}

OP(aclnnMean, (Tensor a, Ints d, bool keep, DType t, Tensor out), put(out, at::mean(a.to(t.type), d, keep)))
OP(aclnnMeanV2, (Tensor a, Ints d, bool keep, bool, Tensor out), put(out, at::mean(a, d, keep)))
OP(aclnnReduceSum, (Tensor a, Ints d, bool keep, DType t, Tensor out), put(out, at::sum(a.to(t.type), d, keep)))
OP(aclnnSoftmax, (Tensor a, int64_t d, Tensor out), put(out, at::softmax(a, d)))
OP(aclnnLogSoftmax, (Tensor a, int64_t d, Tensor out), put(out, at::log_softmax(a, d)))
OP(aclnnLogSumExp, (Tensor a, Ints d, bool keep, Tensor out), put(out, at::logsumexp(a, d, keep)))
OP(aclnnArgMax, (Tensor a, int64_t d, bool keep, Tensor out), put(out, at::argmax(a, d, keep)))
OP(aclnnMax, (Tensor a, Tensor out), put(out, at::max(a)))
OP(aclnnMin, (Tensor a, Tensor out), put(out, at::min(a)))
OP(aclnnAmax, (Tensor a, Ints d, bool keep, Tensor out), put(out, at::amax(a, d, keep)))
OP(aclnnAmin, (Tensor a, Ints d, bool keep, Tensor out), put(out, at::amin(a, d, keep)))
OP(aclnnMaxDim, (Tensor a, int64_t d, bool keep, Tensor out, Tensor i), {
  auto [values, at] = at::max(a, d, keep);
  put(out, values);
  put(i, at);
})
OP(aclnnMinDim, (Tensor a, int64_t d, bool keep, Tensor out, Tensor i), {
  auto [values, at] = at::min(a, d, keep);
  put(out, values);
  put(i, at);
})
OP(aclnnAll, (Tensor a, Ints d, bool keep, Tensor out), put_cast(out, all_of(a, d, keep)))
OP(aclnnAny, (Tensor a, Ints d, bool keep, Tensor out), put_cast(out, any_of(a, d, keep)))
OP(aclnnTopk, (Tensor a, int64_t k, int64_t d, bool largest, bool sorted, Tensor out, Tensor i), {
  auto [values, at] = at::topk(a, k, d, largest, sorted);
  put(out, values);
  put(i, at);
})
OP(aclnnSort, (Tensor a, bool stable, int64_t d, bool descending, Tensor out, Tensor i), {
  auto [values, at] = at::sort(a, stable, d, descending);
  put(out, values);
  put(i, at);
})
OP(aclnnArgsort, (Tensor a, int64_t d, bool descending, Tensor out), put(out, at::argsort(a, d, descending)))
OP(aclnnCumsum, (Tensor a, int64_t d, DType t, Tensor out), put(out, at::cumsum(a, d, t.type)))
OP(aclnnCumsumV2, (Tensor a, int64_t d, bool exclusive, bool reverse, Tensor out), {
  auto r = reverse ? at::flip(at::cumsum(at::flip(a, {d}), d), {d}) : at::cumsum(a, d);
  put(out, (exclusive ? r - a : r).to(out.scalar_type()));
})
OP(aclnnCumprod, (Tensor a, Scalar d, DType t, Tensor out), put(out, at::cumprod(a.to(t.type), d.to<int64_t>())))
OP(aclnnSearchSorted, (Tensor sorted, Tensor a, bool int32, bool right, Tensor, Tensor out),
   put(out, at::searchsorted(sorted, a, int32, right)))
