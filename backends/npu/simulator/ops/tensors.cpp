// The argument objects of aclnn ops, the checks on them, and the launch of an op.
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pthread.h>

#include "op.h"

namespace op {

namespace {

// The bytes that a tensor's view spans, from its first element on.
size_t span(const TensorHandle& t, at::ScalarType type) {
  size_t last = 0;
  for (size_t i = 0; i < t.sizes.size(); i++) {
    if (!t.sizes[i]) return 0;
    last += static_cast<size_t>((t.sizes[i] - 1) * t.strides[i]);
  }
  return (last + 1) * c10::elementSize(type);
}

char* start(const TensorHandle& t, at::ScalarType type) {
  return static_cast<char*>(t.data) + t.offset * static_cast<int64_t>(c10::elementSize(type));
}

// Empty when the op's tensors are all alive on `device`.
std::string check(const Executor& executor, int device) {
  for (auto& t : executor.tensors) {
    auto type = scalar_type(t.type);
    size_t bytes = span(t, type);
    if (!bytes) continue;
    int at = sim::device_of(t.data);
    if (at < 0) return "a tensor argument is in host memory";
    if (at != device)
      return "a tensor of device " + std::to_string(at) + " on a stream of device " + std::to_string(device);
    if (!sim::device_range(start(t, type), bytes)) return "a tensor argument reaches outside of live device memory";
  }
  return "";
}

template <class T, class... A>
T* make(sim::Kind kind, A&&... arguments) {
  auto* made = new T{std::forward<A>(arguments)...};
  sim::add_handle(made, kind);
  return made;
}
template <class T>
aclError destroy(const T* handle, sim::Kind kind) {
  if (!handle) return acl::kSuccess;
  if (!sim::remove_handle(handle, kind))
    return sim::fail(acl::kInvalidHandle, std::string("destroys ") + sim::describe_handle(handle) + " as a " +
                                              sim::kind_name(kind));
  delete handle;
  return acl::kSuccess;
}

}  // namespace

at::ScalarType scalar_type(int type) {
  switch (type) {
    case acl::kFloat: return at::kFloat;
    case acl::kHalf: return at::kHalf;
    case acl::kBFloat16: return at::kBFloat16;
    case acl::kDouble: return at::kDouble;
    case acl::kInt8: return at::kChar;
    case acl::kUint8: return at::kByte;
    case acl::kInt16: return at::kShort;
    case acl::kInt32: return at::kInt;
    case acl::kInt64: return at::kLong;
    case acl::kBool: return at::kBool;
    case acl::kComplex64: return at::kComplexFloat;
    case acl::kComplex128: return at::kComplexDouble;
    default: throw std::runtime_error("data type " + std::to_string(type) + " is not simulated");
  }
}

Tensor look(const TensorHandle& t) {
  auto type = scalar_type(t.type);
  auto options = at::TensorOptions().dtype(type);
  size_t bytes = span(t, type);
  if (!bytes) return at::empty(t.sizes, options);
  if (!sim::device_range(start(t, type), bytes)) throw std::runtime_error("it touches device memory that was freed");
  return at::from_blob(sim::view(start(t, type)), t.sizes, t.strides, options);
}

void put(Tensor out, const Tensor& value) {
  if (out.scalar_type() != value.scalar_type())
    throw std::runtime_error(std::string("its output has dtype ") + c10::toString(out.scalar_type()) +
                             ", the result has " + c10::toString(value.scalar_type()));
  put_cast(out, value);
}

void put_cast(Tensor out, const Tensor& value) {
  if (value.sizes() == out.sizes()) {
    out.copy_(value);
    return;
  }
  if (value.numel() != out.numel()) {
    std::ostringstream text;
    text << "its output has shape " << out.sizes() << ", the result has " << value.sizes();
    throw std::runtime_error(text.str());
  }
  out.copy_(value.reshape(out.sizes()));
}

aclError refuse(const char* name, const std::string& why) {
  return sim::fail(acl::kOpParamInvalid, std::string(name) + ": " + why);
}

void require(bool holds, const std::string& otherwise) {
  if (!holds) throw std::runtime_error(otherwise);
}

void require_by(sim::Limit limit, bool holds, const std::string& otherwise) {
  if (!holds && sim::is_on(limit)) throw std::runtime_error(sim::by_limit(limit, otherwise));
}

std::string dtype_of(const TensorHandle& tensor) { return c10::toString(scalar_type(tensor.type)); }

bool is_floating(const TensorHandle& tensor) {
  return tensor.type == acl::kHalf || tensor.type == acl::kBFloat16 || tensor.type == acl::kFloat;
}

bool on_stack(const void* pointer) {
  auto distance = static_cast<const char*>(pointer) - static_cast<const char*>(__builtin_frame_address(0));
  return distance > -65536 && distance < (1 << 20);
}

void prepare_thread() {
  static thread_local c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  (void)no_autograd;
}

// Which cores an op's kernel runs on. By name: attention mixes both, products of matrices take the cube.
static sim::Kernel kernel_of(const std::string& name) {
  if (name.find("Attention") != std::string::npos) return sim::Kernel::mix;
  for (auto* each : {"Mm", "Matmul", "MatMul", "aclnnMv", "Addmm", "Baddbmm", "aclnnDot", "Linear"})
    if (name.find(each) != std::string::npos) return sim::Kernel::cube;
  return sim::Kernel::vector;
}

aclError launch(void* workspace, uint64_t bytes, Executor* executor, aclrtStream stream) {
  if (!sim::remove_handle(executor, sim::Kind::executor))
    return sim::fail(acl::kInvalidHandle, "an op is launched with " + sim::describe_handle(executor));
  std::unique_ptr<Executor> mine(executor);
  if (mine->workspace) {
    if (bytes < mine->workspace)
      return refuse(mine->name, "needs a workspace of " + std::to_string(mine->workspace) + " bytes, got " +
                                    std::to_string(bytes));
    if (!sim::device_range(workspace, mine->workspace))
      return refuse(mine->name, "its workspace is no live device memory of " + std::to_string(mine->workspace) +
                                    " bytes");
  }
  auto on = sim::stream_of(stream);
  if (on)
    if (auto why = check(*mine, on->device); !why.empty()) return refuse(mine->name, why);
  return sim::enqueue(stream, {mine->name, std::move(mine->run), nullptr, nullptr, kernel_of(mine->name)});
}

}  // namespace op

using namespace op;
using sim::Kind;

extern "C" {

TensorHandle* aclCreateTensor(const int64_t* sizes, uint64_t dims, int type, const int64_t* strides, int64_t offset,
                              int, const int64_t*, uint64_t, void* data) {
  return make<TensorHandle>(Kind::tensor, data, Ints(sizes, sizes + dims), Ints(strides, strides + dims), offset, type);
}
ScalarHandle* aclCreateScalar(void* value, int type) {
  Scalar scalar = at::from_blob(value, {}, at::TensorOptions().dtype(scalar_type(type))).item();
  return make<ScalarHandle>(Kind::scalar, scalar);
}
IntArray* aclCreateIntArray(const int64_t* v, uint64_t n) { return make<IntArray>(Kind::int_array, Ints(v, v + n)); }
FloatArray* aclCreateFloatArray(const float* v, uint64_t n) {
  return make<FloatArray>(Kind::float_array, std::vector<float>(v, v + n));
}
BoolArray* aclCreateBoolArray(const bool* v, uint64_t n) {
  return make<BoolArray>(Kind::bool_array, std::vector<uint8_t>(v, v + n));
}
TensorList* aclCreateTensorList(const TensorHandle* const* v, uint64_t n) {
  return make<TensorList>(Kind::tensor_list, std::vector<const TensorHandle*>(v, v + n));
}
ScalarList* aclCreateScalarList(const ScalarHandle* const* v, uint64_t n) {
  return make<ScalarList>(Kind::scalar_list, std::vector<const ScalarHandle*>(v, v + n));
}
aclError aclDestroyTensor(const TensorHandle* t) { return destroy(t, Kind::tensor); }
aclError aclDestroyScalar(const ScalarHandle* t) { return destroy(t, Kind::scalar); }
aclError aclDestroyIntArray(const IntArray* t) { return destroy(t, Kind::int_array); }
aclError aclDestroyFloatArray(const FloatArray* t) { return destroy(t, Kind::float_array); }
aclError aclDestroyBoolArray(const BoolArray* t) { return destroy(t, Kind::bool_array); }
aclError aclDestroyTensorList(const TensorList* t) {
  if (!t) return acl::kSuccess;
  for (auto* each : t->values) destroy(each, Kind::tensor);  // a list owns its tensors
  return destroy(t, Kind::tensor_list);
}
aclError aclDestroyScalarList(const ScalarList* t) {
  if (!t) return acl::kSuccess;
  for (auto* each : t->values) destroy(each, Kind::scalar);
  return destroy(t, Kind::scalar_list);
}
aclError aclDestroyAclOpExecutor(Executor* executor) { return destroy(executor, Kind::executor); }
aclError aclGetViewShape(const TensorHandle* t, int64_t** sizes, uint64_t* dims) {
  *dims = t->sizes.size();
  *sizes = new int64_t[*dims];  // the caller deletes it
  std::copy(t->sizes.begin(), t->sizes.end(), *sizes);
  return acl::kSuccess;
}

}  // extern "C"
