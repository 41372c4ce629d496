// Ops whose output shape depends on data: the adapter waits for them, then asks for the shape.
#include "op.h"

using namespace op;

template <>
struct op::Param<TensorHandle*> {
  using In = TensorHandle*;
  using Kept = TensorHandle*;
  static Kept keep(Checker& c, In in) { return c.handle(in, sim::Kind::tensor, false) ? in : nullptr; }
  static TensorHandle* give(Kept& kept) { return kept; }
};

static void put_shape(TensorHandle* out, const Tensor& value) {
  auto dense = value.contiguous();
  out->sizes = dense.sizes().vec();
  out->strides = dense.strides().vec();
  if (dense.numel()) look(*out).copy_(dense);
}

OP(aclnnMaskedSelect, (Tensor a, Tensor mask, TensorHandle* out), put_shape(out, at::masked_select(a, mask)))
OP(aclnnNonzero, (Tensor a, TensorHandle* out), put_shape(out, at::nonzero(a)))
OP(aclnnNonzeroV2, (Tensor a, TensorHandle* out), put_shape(out, at::nonzero(a).t()))
