// Elementwise ops, copies and casts, fills, comparisons.
#include "op.h"

using namespace op;

OP(aclnnInplaceCopy, (Tensor to, Tensor from), to.copy_(from))
OP(aclnnCast, (Tensor a, DType type, Tensor out), put(out, a.to(type.type)))
OP(aclnnInplaceZero, (Tensor a), a.zero_())
OP(aclnnInplaceOne, (Tensor a), a.fill_(1))
OP(aclnnInplaceFillScalar, (Tensor a, Scalar v), a.fill_(v))
OP(aclnnInplaceFillTensor, (Tensor a, Tensor v), a.copy_(v.expand(a.sizes())))
OP(aclnnArange, (Scalar from, Scalar to, Scalar step, Tensor out), put(out, at::arange(from, to, step, out.options())))

#define WITH_ALPHA(N, f)                                                              \
  OP(aclnn##N, (Tensor a, Tensor b, Scalar alpha, Tensor out), put(out, f(a, b, alpha)))  \
  OP(aclnn##N##s, (Tensor a, Scalar b, Scalar alpha, Tensor out), put(out, f(a, b, alpha))) \
  OP(aclnnInplace##N, (Tensor a, Tensor b, Scalar alpha), put_cast(a, f(a, b, alpha)))    \
  OP(aclnnInplace##N##s, (Tensor a, Scalar b, Scalar alpha), put_cast(a, f(a, b, alpha)))
WITH_ALPHA(Add, at::add)
WITH_ALPHA(Sub, at::sub)
OP(aclnnAddV3, (Scalar a, Tensor b, Scalar alpha, Tensor out), put(out, at::add(b * alpha, a)))
OP(aclnnRsub, (Tensor a, Tensor b, Scalar alpha, Tensor out), put(out, at::rsub(a, b, alpha)))
OP(aclnnRsubs, (Tensor a, Scalar b, Scalar alpha, Tensor out), put(out, at::rsub(a, b, alpha)))

#define BINARY(N, f)                                                      \
  OP(aclnn##N, (Tensor a, Tensor b, Tensor out), put(out, f(a, b)))       \
  OP(aclnn##N##s, (Tensor a, Scalar b, Tensor out), put(out, f(a, b)))    \
  OP(aclnnInplace##N, (Tensor a, Tensor b), put_cast(a, f(a, b)))         \
  OP(aclnnInplace##N##s, (Tensor a, Scalar b), put_cast(a, f(a, b)))
BINARY(Mul, at::mul)
BINARY(Div, at::div)
BINARY(FloorDivide, at::floor_divide)

OP(aclnnRemainderTensorTensor, (Tensor a, Tensor b, Tensor out), put(out, at::remainder(a, b)))
OP(aclnnRemainderTensorScalar, (Tensor a, Scalar b, Tensor out), put(out, at::remainder(a, b)))
OP(aclnnInplaceRemainderTensorTensor, (Tensor a, Tensor b), put_cast(a, at::remainder(a, b)))
OP(aclnnInplaceRemainderTensorScalar, (Tensor a, Scalar b), put_cast(a, at::remainder(a, b)))
OP(aclnnRemainderScalarTensor, (Scalar a, Tensor b, Tensor out), put(out, at::remainder(a, b)))

#define COMPARE(N, f)                                                              \
  OP(aclnn##N##Tensor, (Tensor a, Tensor b, Tensor out), put(out, f(a, b)))        \
  OP(aclnn##N##Scalar, (Tensor a, Scalar b, Tensor out), put(out, f(a, b)))        \
  OP(aclnnInplace##N##Tensor, (Tensor a, Tensor b), put_cast(a, f(a, b)))          \
  OP(aclnnInplace##N##Scalar, (Tensor a, Scalar b), put_cast(a, f(a, b)))
COMPARE(Eq, at::eq)
COMPARE(Ne, at::ne)
COMPARE(Lt, at::lt)
COMPARE(Le, at::le)
COMPARE(Gt, at::gt)
COMPARE(Ge, at::ge)
COMPARE(BitwiseAnd, at::bitwise_and)
COMPARE(BitwiseOr, at::bitwise_or)
COMPARE(BitwiseXor, at::bitwise_xor)
OP(aclnnLeftShift, (Tensor a, Tensor b, Tensor out), put(out, at::bitwise_left_shift(a, b)))
OP(aclnnRightShift, (Tensor a, Tensor b, Tensor out), put(out, at::bitwise_right_shift(a, b)))

#define UNARY(N, f)                                           \
  OP(aclnn##N, (Tensor a, Tensor out), put(out, f(a)))        \
  OP(aclnnInplace##N, (Tensor a), put_cast(a, f(a)))
UNARY(Neg, at::neg)
UNARY(Rsqrt, at::rsqrt)
UNARY(Sqrt, at::sqrt)
UNARY(Cos, at::cos)
UNARY(Sin, at::sin)
UNARY(Exp, at::exp)
UNARY(Log, at::log)
UNARY(Log1p, at::log1p)
UNARY(Silu, at::silu)
UNARY(Sigmoid, at::sigmoid)
UNARY(Relu, at::relu)
UNARY(Reciprocal, at::reciprocal)
UNARY(Abs, at::abs)
UNARY(LogicalNot, at::logical_not)
UNARY(BitwiseNot, at::bitwise_not)
UNARY(Tanh, at::tanh)
UNARY(Floor, at::floor)
UNARY(Ceil, at::ceil)
UNARY(Round, at::round)
OP(aclnnGelu, (Tensor a, Tensor out), put(out, at::gelu(a)))
OP(aclnnSoftplus, (Tensor a, Scalar beta, Scalar threshold, Tensor out), put(out, at::softplus(a, beta, threshold)))
OP(aclnnIsFinite, (Tensor a, Tensor out), put(out, at::isfinite(a)))
OP(aclnnMinimum, (Tensor a, Tensor b, Tensor out), put(out, at::minimum(a, b)))
OP(aclnnLogAddExp, (Tensor a, Tensor b, Tensor out), put(out, at::logaddexp(a, b)))
OP(aclnnMaximum, (Tensor a, Tensor b, Tensor out), put(out, at::maximum(a, b)))
OP(aclnnLogicalAnd, (Tensor a, Tensor b, Tensor out), put(out, at::logical_and(a, b)))
OP(aclnnLogicalOr, (Tensor a, Tensor b, Tensor out), put(out, at::logical_or(a, b)))
OP(aclnnLogicalXor, (Tensor a, Tensor b, Tensor out), put(out, at::logical_xor(a, b)))
OP(aclnnInplaceLogicalAnd, (Tensor a, Tensor b), put_cast(a, at::logical_and(a, b)))
OP(aclnnInplaceLogicalOr, (Tensor a, Tensor b), put_cast(a, at::logical_or(a, b)))
OP(aclnnClamp, (Tensor a, Opt<Scalar> low, Opt<Scalar> high, Tensor out), put(out, at::clamp(a, low, high)))
OP(aclnnNanToNum, (Tensor a, float nan, float high, float low, Tensor out), put(out, at::nan_to_num(a, nan, high, low)))
OP(aclnnClampMin, (Tensor a, Scalar low, Tensor out), put(out, at::clamp_min(a, low)))
OP(aclnnClampMax, (Tensor a, Scalar high, Tensor out), put(out, at::clamp_max(a, high)))
OP(aclnnInplaceClampMin, (Tensor a, Scalar low), put_cast(a, at::clamp_min(a, low)))
OP(aclnnInplaceClampMax, (Tensor a, Scalar high), put_cast(a, at::clamp_max(a, high)))
OP(aclnnClampTensor, (Tensor a, Tensor low, Tensor high, Tensor out),
   put(out, at::clamp(a, low.defined() ? Opt<Tensor>(low) : std::nullopt,
                      high.defined() ? Opt<Tensor>(high) : std::nullopt)))
OP(aclnnClampMinTensor, (Tensor a, Tensor low, Tensor out), put(out, at::clamp_min(a, low)))
OP(aclnnClampMaxTensor, (Tensor a, Tensor high, Tensor out), put(out, at::clamp_max(a, high)))
OP(aclnnPowTensorScalar, (Tensor a, Scalar e, Tensor out), put(out, at::pow(a, e)))
OP(aclnnPowScalarTensor, (Scalar a, Tensor e, Tensor out), put(out, at::pow(a, e)))
OP(aclnnPowTensorTensor, (Tensor a, Tensor e, Tensor out), put(out, at::pow(a, e)))
OP(aclnnInplacePowTensorScalar, (Tensor a, Scalar e), put_cast(a, at::pow(a, e)))
OP(aclnnSWhere, (Tensor c, Tensor a, Tensor b, Tensor out), put(out, at::where(c, a, b)))
OP(aclnnAddcmul, (Tensor a, Tensor b, Tensor c, Scalar v, Tensor out), put(out, at::addcmul(a, b, c, v)))
OP(aclnnInplaceMaskedFillScalar, (Tensor a, Tensor mask, Scalar v), a.masked_fill_(mask, v))
OP(aclnnInplaceMaskedFillTensor, (Tensor a, Tensor mask, Tensor v), a.masked_fill_(mask, v))
OP(aclnnLeftShifts, (Tensor a, Scalar b, Tensor out), put(out, at::bitwise_left_shift(a, b)))
OP(aclnnInplaceAddcmul, (Tensor a, Tensor b, Tensor c, Scalar v), a.addcmul_(b, c, v))
OP(aclnnEqual, (Tensor a, Tensor b, Tensor out), put(out, at::scalar_tensor(a.equal(b), out.options())))
