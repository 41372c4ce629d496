// Reading and writing by index, joining, splitting and reordering.
#include "op.h"

using namespace op;

static c10::List<Opt<Tensor>> indices(const Tensors& tensors) {
  c10::List<Opt<Tensor>> list;
  for (auto& t : tensors) list.push_back(t.defined() ? Opt<Tensor>(t) : std::nullopt);
  return list;
}

static Tensor scattered(const Tensor& a, int64_t d, const Tensor& i, const Tensor& s, int64_t reduction) {
  if (reduction == 1) return at::scatter_add(a, d, i, s);
  if (reduction == 2) return at::scatter(a, d, i, s, "multiply");
  return at::scatter(a, d, i, s);
}

OP(aclnnEmbedding, (Tensor weight, Tensor i, Tensor out), put(out, at::embedding(weight, i)))
OP(aclnnIndexSelect, (Tensor a, int64_t d, Tensor i, Tensor out), put(out, at::index_select(a, d, i)))
OP(aclnnGather, (Tensor a, int64_t d, Tensor i, Tensor out), put(out, at::gather(a, d, i)))
OP(aclnnTake, (Tensor a, Tensor i, Tensor out), put(out, at::take(a, i)))
OP(aclnnIndex, (Tensor a, Tensors i, Tensor out), put(out, at::index(a, indices(i))))
OP(aclnnIndexPutImpl, (Tensor a, Tensors i, Tensor v, bool accumulate, bool),
   at::index_put_(a, indices(i), v, accumulate))
OP(aclnnIndexCopy, (Tensor a, int64_t d, Tensor i, Tensor s, Tensor out), put(out, at::index_copy(a, d, i, s)))
OP(aclnnInplaceIndexCopy, (Tensor a, int64_t d, Tensor i, Tensor s), a.index_copy_(d, i, s))
OP(aclnnIndexAdd, (Tensor a, int64_t d, Tensor i, Tensor s, Scalar alpha, Tensor out),
   put(out, at::index_add(a, d, i, s, alpha)))
OP(aclnnIndexFill, (Tensor a, int64_t d, Tensor i, Scalar v, Tensor out), put(out, at::index_fill(a, d, i, v)))
OP(aclnnInplaceIndexFill, (Tensor a, int64_t d, Tensor i, Scalar v), a.index_fill_(d, i, v))
OP(aclnnInplaceIndexFillTensor, (Tensor a, int64_t d, Ints i, Scalar v), a.index_fill_(d, at::tensor(i), v))
OP(aclnnScatter, (Tensor a, int64_t d, Tensor i, Tensor s, int64_t r, Tensor out), put(out, scattered(a, d, i, s, r)))
OP(aclnnInplaceScatter, (Tensor a, int64_t d, Tensor i, Tensor s, int64_t r), a.copy_(scattered(a, d, i, s, r)))
OP(aclnnScatterValue, (Tensor a, int64_t d, Tensor i, Scalar v, int64_t, Tensor out), put(out, at::scatter(a, d, i, v)))
OP(aclnnInplaceScatterValue, (Tensor a, int64_t d, Tensor i, Scalar v, int64_t), a.scatter_(d, i, v))
OP(aclnnScatterAdd, (Tensor a, int64_t d, Tensor i, Tensor s, Tensor out), put(out, at::scatter_add(a, d, i, s)))
OP(aclnnScatterNdUpdate, (Tensor a, Tensor i, Tensor v), {
  c10::List<Opt<Tensor>> by;
  for (int64_t k = 0; k < i.size(-1); k++) by.push_back(Opt<Tensor>(i.select(-1, k).to(at::kLong)));
  at::index_put_(a, by, v);
})
OP(aclnnInplaceScatterUpdate, (Tensor a, Tensor i, Tensor v, int64_t axis), {
  // row i of `a` gets `v` along `axis`, from position indices[i] on
  for (int64_t row = 0; row < a.size(0); row++) {
    int64_t from = i.reshape({-1})[row].item<int64_t>();
    a[row].narrow(axis < 0 ? axis : axis - 1, from, v[row].size(axis < 0 ? axis : axis - 1)).copy_(v[row]);
  }
})
OP(aclnnCat, (Tensors list, int64_t d, Tensor out), put(out, at::cat(list, d)))
OP(aclnnStack, (Tensors list, int64_t d, Tensor out), put(out, at::stack(list, d)))
OP(aclnnRepeat, (Tensor a, Ints times, Tensor out), put(out, a.repeat(times)))
OP(aclnnRepeatInterleave, (Tensor a, Tensor times, int64_t, Tensor out), put(out, at::repeat_interleave(a, times)))
OP(aclnnRepeatInterleaveWithDim, (Tensor a, Tensor times, int64_t d, int64_t, Tensor out),
   put(out, at::repeat_interleave(a, times, d)))
OP(aclnnRepeatInterleaveInt, (Tensor a, int64_t times, int64_t, Tensor out), put(out, at::repeat_interleave(a, times)))
OP(aclnnRepeatInterleaveIntWithDim, (Tensor a, int64_t times, int64_t d, int64_t, Tensor out),
   put(out, at::repeat_interleave(a, times, d)))
OP(aclnnRoll, (Tensor a, Ints shifts, Ints dims, Tensor out), put(out, at::roll(a, shifts, dims)))
OP(aclnnFlip, (Tensor a, Ints dims, Tensor out), put(out, at::flip(a, dims)))
OP(aclnnTriu, (Tensor a, int64_t diagonal, Tensor out), put(out, at::triu(a, diagonal)))
OP(aclnnTril, (Tensor a, int64_t diagonal, Tensor out), put(out, at::tril(a, diagonal)))
OP(aclnnPermute, (Tensor a, Ints dims, Tensor out), put(out, a.permute(dims)))
OP(aclnnSplitTensor, (Tensor a, int64_t size, int64_t d, Tensors out), {
  auto parts = a.split(size, d);
  for (size_t k = 0; k < parts.size(); k++) put(out[k], parts[k]);
})
OP(aclnnConstantPadNd, (Tensor a, Ints pad, Scalar v, Tensor out), put(out, at::constant_pad_nd(a, pad, v)))
OP(aclnnInplaceTriu, (Tensor a, int64_t diagonal), a.triu_(diagonal))
OP(aclnnInplaceTril, (Tensor a, int64_t diagonal), a.tril_(diagonal))
