// How an op is added: one line. `OP(aclnnName, (parameters as plain C++ types), body)` defines the pair of functions
// that torch_npu looks up, aclnnNameGetWorkspaceSize and aclnnName. The parameters must be those of torch_npu's call
// site, in its order; the body runs on a stream's thread with ATen CPU tensors that view device memory.
//
//   Tensor aclTensor*    Tensors aclTensorList*    Scalar aclScalar*    Ints aclIntArray*    Str char*
//   int64_t, double, bool, int8_t as they are      DType aclDataType    Opt<Scalar> a scalar that may be null
//
// Every argument is checked when the adapter calls: a handle must be alive and of the right kind, tensors must lie in
// live memory of the stream's device, and the two trailing result pointers must be on the caller's stack, which they
// are not when the parameter list above is wrong.
#pragma once

#include <ATen/TensorOperators.h>
#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "../runtime/handles.h"
#include "../runtime/limits.h"
#include "../runtime/memory.h"
#include "../runtime/report.h"
#include "../runtime/scheduler.h"

namespace op {

using at::Scalar;
using at::Tensor;
using Ints = std::vector<int64_t>;
using Tensors = std::vector<Tensor>;
using Str = std::string;
template <class T>
using Opt = std::optional<T>;
struct DType {
  at::ScalarType type;
};

// The handle types. They are created and destroyed through the functions in tensors.cpp.
struct TensorHandle {
  void* data;
  Ints sizes, strides;
  int64_t offset;
  int type;
};
struct ScalarHandle {
  Scalar value;
};
struct IntArray {
  Ints values;
};
struct FloatArray {
  std::vector<float> values;
};
struct BoolArray {
  std::vector<uint8_t> values;
};
struct TensorList {
  std::vector<const TensorHandle*> values;
};
struct ScalarList {
  std::vector<const ScalarHandle*> values;
};
struct Executor {
  const char* name;
  uint64_t workspace;
  std::vector<TensorHandle> tensors;  // all tensors that the op reads or writes
  std::function<void()> run;
};

at::ScalarType scalar_type(int type);
// The CPU tensor over the device memory of `tensor`. Throws when that memory is not alive.
Tensor look(const TensorHandle& tensor);
aclError launch(void* workspace, uint64_t bytes, Executor* executor, aclrtStream stream);
aclError refuse(const char* name, const std::string& why);
// For checks when an op is issued: throw `otherwise` unless `holds`, or unless it does or the limit is off.
void require(bool holds, const std::string& otherwise);
void require_by(sim::Limit limit, bool holds, const std::string& otherwise);
// The dtype's name, for messages; whether it is one of float16, bfloat16 and float32.
std::string dtype_of(const TensorHandle& tensor);
bool is_floating(const TensorHandle& tensor);

// out = value, refusing another dtype or number of elements: kernels on the device don't cast for free.
void put(Tensor out, const Tensor& value);
// out = value for in-place ops, whose result may be cast to their own dtype as torch does.
void put_cast(Tensor out, const Tensor& value);

// One parameter: how it comes in (`In`), how it is kept until the op runs (`Kept`), how the body gets it.
struct Checker {
  std::vector<TensorHandle>* tensors;
  std::string error;
  int index = 0;
  template <class H>
  bool handle(const H* pointer, sim::Kind kind, bool optional) {
    index++;
    if (!pointer) {
      if (!optional) error = at_position(std::string("is null, a ") + sim::kind_name(kind) + " is needed");
      return false;
    }
    if (sim::is_handle(pointer, kind)) return true;
    if (error.empty())
      error = at_position("is " + sim::describe_handle(pointer) + ", not " + sim::kind_name(kind) +
                          ": is the parameter list the one of torch_npu's call site?");
    return false;
  }
  std::string at_position(const std::string& what) const { return "argument " + std::to_string(index) + " " + what; }
};

template <class T>
struct Param {
  using In = T;
  using Kept = T;
  static Kept keep(Checker& c, In in) { return c.index++, in; }
  static T give(Kept& kept) { return kept; }
};
template <>
struct Param<Tensor> {
  using In = const TensorHandle*;
  using Kept = Opt<TensorHandle>;
  static Kept keep(Checker& c, In in) {
    if (!c.handle(in, sim::Kind::tensor, true)) return {};
    c.tensors->push_back(*in);
    return *in;
  }
  static Tensor give(Kept& kept) { return kept ? look(*kept) : Tensor(); }
};
template <>
struct Param<Tensors> {
  using In = const TensorList*;
  using Kept = std::vector<Opt<TensorHandle>>;
  static Kept keep(Checker& c, In in) {
    Kept kept;
    if (!c.handle(in, sim::Kind::tensor_list, true)) return kept;
    for (auto* each : in->values) {
      // torch_npu passes an undefined tensor as one of shape [0] without memory
      bool defined = each && (each->data || each->sizes != Ints{0});
      if (defined) c.tensors->push_back(*each);
      kept.push_back(defined ? Opt<TensorHandle>(*each) : std::nullopt);
    }
    return kept;
  }
  static Tensors give(Kept& kept) {
    Tensors out;
    for (auto& each : kept) out.push_back(each ? look(*each) : Tensor());
    return out;
  }
};
template <>
struct Param<Scalar> {
  using In = const ScalarHandle*;
  using Kept = Scalar;
  static Kept keep(Checker& c, In in) { return c.handle(in, sim::Kind::scalar, false) ? in->value : Scalar(); }
  static Scalar give(Kept& kept) { return kept; }
};
template <>
struct Param<Opt<Scalar>> {
  using In = const ScalarHandle*;
  using Kept = Opt<Scalar>;
  static Kept keep(Checker& c, In in) { return c.handle(in, sim::Kind::scalar, true) ? Kept(in->value) : Kept(); }
  static Kept give(Kept& kept) { return kept; }
};
template <>
struct Param<Ints> {
  using In = const IntArray*;
  using Kept = Ints;
  static Kept keep(Checker& c, In in) { return c.handle(in, sim::Kind::int_array, true) ? in->values : Kept(); }
  static Ints give(Kept& kept) { return kept; }
};
template <>
struct Param<Str> {
  using In = const char*;
  using Kept = Str;
  static Kept keep(Checker& c, In in) { return c.index++, Kept(in ? in : ""); }
  static Str give(Kept& kept) { return kept; }
};
template <>
struct Param<DType> {
  using In = int;
  using Kept = int;
  static Kept keep(Checker& c, In in) { return c.index++, in; }
  static DType give(Kept& kept) { return {scalar_type(kept)}; }
};

bool on_stack(const void* pointer);
void prepare_thread();

using Need = uint64_t;  // workspace bytes; ops that need some declare how much in NEEDS

template <class F>
struct Make;
template <class... A>
struct Make<void (*)(A...)> {
  using Kept = std::tuple<typename Param<A>::Kept...>;

  // `need` looks at the kept arguments and answers the workspace in bytes, or throws what is wrong with them.
  // Compiled once for all ops of the same parameters.
  static aclError size(void (*body)(A...), const char* name, uint64_t (*need)(const Kept&), typename Param<A>::In... in,
                       uint64_t* bytes, Executor** executor) {
    if (!on_stack(bytes) || !on_stack(executor) || sim::is_handle(bytes, sim::Kind::tensor))
      return refuse(name, "the number of arguments is not the one expected: is the parameter list right?");
    auto made = std::make_unique<Executor>();
    Checker checker{&made->tensors, {}};
    auto kept = std::make_shared<Kept>(Kept{Param<A>::keep(checker, in)...});  // braces: left to right
    if (!checker.error.empty()) return refuse(name, checker.error);
    try {
      made->workspace = need(*kept);
    } catch (const std::exception& e) {
      return refuse(name, e.what());
    }
    made->name = name;
    made->run = [kept, body] {
      prepare_thread();
      at::NoGradGuard no_grad;
      try {
        std::apply([body](auto&... each) { body(Param<A>::give(each)...); }, *kept);
      } catch (const c10::Error& error) {
        throw std::runtime_error(error.msg());  // without ATen's C++ stack
      }
    };
    *bytes = made->workspace;
    sim::add_handle(made.get(), sim::Kind::executor);
    *executor = made.release();
    return acl::kSuccess;
  }
  template <void (*body)(A...), const char* name, uint64_t (*need)(const Kept&)>
  static aclError workspace_size(typename Param<A>::In... in, uint64_t* bytes, Executor** executor) {
    return size(body, name, need, in..., bytes, executor);
  }
  static uint64_t none(const Kept&) { return 0; }
};

}  // namespace op

#define OP_WITH_WORKSPACE(name, parameters, need, ...)                                                       \
  static constexpr char name##_name[] = #name;                                                               \
  static void name##_body parameters { __VA_ARGS__; }                                                        \
  using name##_make = op::Make<decltype(&name##_body)>;                                                      \
  extern "C" {                                                                                               \
  __attribute__((used)) static void* name##_resolve() {                                                      \
    return reinterpret_cast<void*>(&name##_make::workspace_size<&name##_body, name##_name, need>);           \
  }                                                                                                          \
  int name##GetWorkspaceSize() __attribute__((ifunc(#name "_resolve")));                                     \
  aclError name(void* workspace, uint64_t bytes, op::Executor* executor, aclrtStream stream) {               \
    SIM_API(name);                                                                                           \
    return op::launch(workspace, bytes, executor, stream);                                                   \
  }                                                                                                          \
  }

#define OP(name, parameters, ...) OP_WITH_WORKSPACE(name, parameters, &name##_make::none, __VA_ARGS__)
