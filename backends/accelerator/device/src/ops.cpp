#include "ops.h"

#include "allocator.h"
#include "capture.h"
#include "random.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <functional>
#include <vector>

namespace asynccpu {
namespace {

using c10::IValue;
using Stack = torch::jit::Stack;
using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kDevice;
}

// The same memory as a tensor of the CPU. It doesn't hold the memory: what is queued on the stream of an allocation runs
// before anything that reuses it.
at::Tensor on_host(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

// What a queued op keeps of an argument: device tensors by address, host tensors by a copy of their values now.
at::Tensor queued(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    return tensor;
  }
  return is_ours(tensor) ? on_host(tensor) : tensor.clone();
}

// A tensor without data of the same shape, for the Meta kernel that says what an op returns.
at::Tensor without_data(const at::Tensor& tensor) {
  if (!is_ours(tensor)) {
    return tensor;
  }
  return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type(), std::nullopt, at::kMeta,
                                        std::nullopt);
}

// `value` with every tensor in it replaced, and every device by `device`.
IValue replaced(const IValue& value, const OnTensor& replace, c10::Device device) {
  if (value.isTensor()) {
    return replace(value.toTensor());
  }
  if (value.isDevice()) {
    return device;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const auto& tensor : value.toTensorVector()) {
      list.push_back(replace(tensor));
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(tensor ? std::optional<at::Tensor>(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

Stack all_replaced(c10::ArrayRef<IValue> values, const OnTensor& replace, c10::Device device) {
  Stack made;
  for (const auto& value : values) {
    made.push_back(replaced(value, replace, device));
  }
  return made;
}

void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  replaced(value, [&](const at::Tensor& tensor) { return visit(tensor), tensor; }, at::kCPU);
}

// The device that an op runs on: its tensors', else the one that it was given to make tensors on.
c10::Device device_of(c10::ArrayRef<IValue> arguments) {
  std::optional<c10::Device> tensors, given;
  for (const auto& value : arguments) {
    if (value.isDevice() && value.toDevice().type() == kDevice) {
      given = value.toDevice();
    }
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (is_ours(tensor)) {
        TORCH_CHECK(!tensors || *tensors == tensor.device(), "asynccpu: an op has tensors of ", *tensors, " and of ",
                    tensor.device());
        tensors = tensor.device();
      } else {
        TORCH_CHECK(!tensor.defined() || tensor.device().is_cpu(), "asynccpu: an op has tensors of this device and of ",
                    tensor.device());
      }
    });
  }
  const auto device = tensors ? *tensors : given.value_or(c10::Device(kDevice, -1));
  return {kDevice, device.has_index() ? device.index() : current_device()};
}

at::Tensor empty_like_meta(const at::Tensor& meta, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type());
}

// How an op relates its results to its arguments
struct Signature {
  explicit Signature(const c10::FunctionSchema& schema) {
    for (const auto& result : schema.returns()) {
      is_view |= result.alias_info() && !result.alias_info()->isWrite();
      makes_tensors |= !result.alias_info();
    }
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      if (argument.alias_info() && argument.alias_info()->isWrite()) {
        (argument.is_out() ? outs : inplace).push_back(i);
      }
      if (argument.name() == "generator") {
        generator = static_cast<int>(i);
      }
    }
  }
  bool is_view = false, makes_tensors = false;
  std::vector<size_t> outs, inplace;
  int generator = -1;
};

void call(const c10::OperatorHandle& op, Stack& stack) {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  op.callBoxed(stack);
}

// Calls the CPU kernel on queued arguments; the generator, if it takes one, gives the numbers of `draw`.
Stack run_on_host(const c10::OperatorHandle& op, Stack arguments, int generator, const Draw& draw) {
  if (generator >= 0) {
    arguments[generator] = host_generator(draw);
  }
  call(op, arguments);
  return arguments;
}

// An op that returns views of its first argument, which no kernel needs to run for
void return_view(const c10::OperatorHandle& op, Stack& stack, c10::ArrayRef<IValue> arguments, c10::Device device) {
  at::Tensor base;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) { base = base.defined() ? base : tensor; });
  }
  auto views = all_replaced(arguments, [](const at::Tensor& t) { return is_ours(t) ? on_host(t) : t; }, at::kCPU);
  call(op, views);
  const auto as_view = [&](const at::Tensor& view) {
    TORCH_CHECK(view.scalar_type() == base.scalar_type(), "asynccpu: no kernel for ", op.schema().operator_name());
    const auto offset = (static_cast<char*>(view.data_ptr()) - static_cast<char*>(base.data_ptr())) / base.itemsize();
    return at::native::as_strided_tensorimpl(base, view.sizes(), view.strides(), base.storage_offset() + offset);
  };
  auto results = all_replaced(views, as_view, device);
  torch::jit::drop(stack, arguments.size());
  for (auto& result : results) {
    stack.push_back(std::move(result));
  }
}

// An op whose results' shapes depend on values: the host waits for the device and runs it at once.
void run_at_once(const c10::OperatorHandle& op, Stack& stack, c10::ArrayRef<IValue> arguments, c10::Device device) {
  if (auto recording = current_queue().recording()) {
    recording->refuse(c10::str(op.schema().operator_name(), ", which reads device values on the host,"));
  }
  synchronize_stream(current_queue());
  Stack results = all_replaced(arguments, queued, at::kCPU);
  call(op, results);
  const auto on_device = [&](const at::Tensor& result) {
    return result.defined() ? result.to(device) : result;
  };
  results = all_replaced(results, on_device, device);
  torch::jit::drop(stack, arguments.size());
  for (auto& result : results) {
    stack.push_back(std::move(result));
  }
}

// Whether torch has given an out tensor its shape: one that it made itself for this call, so that Python has not seen it
// (some such are made empty, to be resized), or one that is an argument too, as in an op in place.
bool is_shaped(const at::Tensor& out, c10::ArrayRef<IValue> arguments) {
  size_t uses = 0;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& tensor) { uses += tensor.is_same(out); });
  }
  return uses > 1 || (out.numel() && !out.unsafeGetTensorImpl()->pyobj_slot()->load_pyobj());
}

// Every op without a kernel below: queues its CPU kernel. Shapes are checked, and results allocated, at once.
void queue_op(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const Signature signature(schema);
  const auto count = schema.arguments().size();
  const Stack kept(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  const c10::ArrayRef<IValue> arguments(kept);
  const auto device = device_of(arguments);
  const c10::DeviceGuard guard(device);
  if (signature.is_view) {
    return return_view(op, *stack, arguments, device);
  }
  const bool depends_on_values =
      op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
      schema.name() == "aten::index"; // its out variant has no tag; torch has given the result its shape before
  const bool has_meta = op.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta);
  if (signature.makes_tensors && (depends_on_values || !has_meta)) {
    return run_at_once(op, *stack, arguments, device);
  }

  std::vector<at::Tensor> made, written;
  Stack results;
  bool has_shapes = !signature.inplace.empty() || depends_on_values;
  for (const auto i : signature.outs) {
    has_shapes = has_shapes || is_shaped(kept[i].toTensor(), arguments);
  }
  if (has_meta && !has_shapes) {
    Stack metas = all_replaced(arguments, without_data, at::kMeta);
    if (signature.generator >= 0) {
      metas[signature.generator] = IValue();
    }
    Stack returned = metas;
    call(op, returned);
    for (const auto i : signature.outs) {
      const auto out = kept[i].toTensor();
      const auto wanted = metas[i].toTensor().sizes();
      if (out.sizes() != wanted) {
        out.resize_(wanted);
      }
    }
    const auto allocate = [&](const at::Tensor& meta) {
      if (!meta.defined()) {
        return meta;
      }
      made.push_back(empty_like_meta(meta, device));
      return made.back();
    };
    if (signature.makes_tensors) {
      results = all_replaced(returned, allocate, device);
    }
  }

  std::vector<at::Tensor> into;
  for (const auto& tensor : made) {
    into.push_back(on_host(tensor));
  }
  const int generator = signature.generator;
  if (generator >= 0 && kept[generator].isGenerator()) {
    TORCH_CHECK(kept[generator].toGenerator() == default_generator(device.index()),
                "asynccpu: ops draw from the default generator only");
  }
  submit(
      current_queue(),
      [op, generator, host = all_replaced(arguments, queued, at::kCPU), into = std::move(into)](const Draw& draw) {
        const auto returned = run_on_host(op, host, generator, draw);
        size_t i = 0;
        for (const auto& value : returned) {
          each_tensor(value, [&](const at::Tensor& tensor) {
            if (i < into.size() && tensor.defined()) {
              into[i++].copy_(tensor);
            }
          });
        }
      },
      generator >= 0);

  if (!signature.makes_tensors) { // returns what it wrote
    for (const auto i : signature.outs.empty() ? signature.inplace : signature.outs) {
      results.push_back(kept[i]);
    }
    results.resize(schema.returns().size());
  }
  torch::jit::drop(*stack, count);
  for (auto& result : results) {
    stack->push_back(std::move(result));
  }
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

void queue_copy(Queue& stream, at::Tensor from, at::Tensor to) {
  submit(stream, [from = std::move(from), to = std::move(to)](const Draw&) { to.copy_(from); });
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& dst, bool non_blocking) {
  const c10::DeviceGuard guard(is_ours(self) ? self.device() : dst.device());
  auto& stream = current_queue();
  if (is_ours(self) && is_ours(dst)) {
    if (self.device() != dst.device()) {
      synchronize_stream(queue(dst.device().index(), current_stream(dst.device().index())));
    }
    queue_copy(stream, on_host(self), on_host(dst));
    if (self.device() != dst.device()) {
      synchronize_stream(stream);
    }
  } else if (is_ours(self)) {
    const bool is_queued = non_blocking && is_pinned(dst.data_ptr());
    if (!is_queued) {
      refuse_in_capture(&stream, "a copy to pageable memory on the host, or one that the host waits for,");
    }
    queue_copy(stream, on_host(self), dst);
    if (!is_queued) {
      synchronize_stream(stream);
    }
  } else {
    const bool is_queued = non_blocking && is_pinned(self.data_ptr());
    if (!is_queued) {
      refuse_in_capture(&stream, "a copy from pageable memory on the host");
    }
    queue_copy(stream, is_queued ? self : self.clone(), on_host(dst));
  }
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& dst) {
  dst.resize_(self.sizes());
  return copy_from(self, dst, false);
}

at::Scalar read_scalar(const at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  synchronize_stream(current_queue());
  return on_host(self).item();
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  const auto bytes = at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (bytes > self.storage().nbytes()) {
    resize_storage(*self.storage().unsafeGetStorageImpl(), bytes);
  }
  if (format && *format != at::MemoryFormat::Contiguous) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.storage().data_ptr(), stream);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", read_scalar);
  library.impl("resize_", resize);
  library.impl("record_stream", record_stream);
  library.impl("as_strided", at::native::as_strided_tensorimpl);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("view", at::native::view);
  library.impl("unfold", at::native::unfold);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(at::native::set_));
  library.impl("set_.source_Storage_storage_offset",
               static_cast<at::Tensor& (*)(at::Tensor&, at::Storage, int64_t, at::IntArrayRef, at::IntArrayRef)>(
                   at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&queue_op>());
}

} // namespace

void resize_storage(c10::StorageImpl& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto fresh = allocator().allocate(bytes);
  const auto kept = std::min(bytes, storage.nbytes());
  if (kept) {
    allocator().copy_data(fresh.get(), storage.data(), kept);
  }
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

} // namespace asynccpu
