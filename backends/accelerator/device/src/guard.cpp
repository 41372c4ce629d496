// What torch asks of an accelerator: devices, streams, events (DeviceGuardImplInterface) and the hooks of the host side.
#include "allocator.h"
#include "capture.h"
#include "ops.h"
#include "random.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>

namespace asynccpu {
namespace {

struct Event {
  bool has_timing = false;
  std::shared_ptr<Mark> mark; // of the last record outside of captures
  std::shared_ptr<Recording> recording; // of the last record, if that was in a capture
  Frontier frontier; // what of that capture comes before the event
};

Queue& queue_of(const c10::Stream& stream) {
  return queue(stream.device_index(), stream.id());
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kDevice;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return {kDevice, current_device()};
  }
  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(device.index(), current_stream(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return as_stream(device.index(), next_stream(device.index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return as_stream(device.index(), next_stream(device.index()));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& asked = queue_of(stream);
    refuse_in_capture(&asked, "asking whether a stream is done");
    return asked.is_idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(queue_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return queue_of(stream).recording() != nullptr;
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) {
      *event = new Event{flag == c10::EventFlag::BACKEND_DEFAULT, nullptr, nullptr, {}};
    }
    auto& made = *static_cast<Event*>(*event);
    auto& point = queue_of(stream);
    made.recording = point.recording();
    if (made.recording) {
      made.frontier = made.recording->frontier(&point);
    } else {
      made.mark = point.mark();
    }
  }

  // A stream that waits for an event of a capture takes part in it from then on.
  void block(void* event, const c10::Stream& stream) const override {
    if (!event) {
      return;
    }
    auto& awaited = *static_cast<Event*>(event);
    auto& waiting = queue_of(stream);
    const auto recording = waiting.recording();
    if (awaited.recording) {
      TORCH_CHECK(awaited.recording->origin->recording() == awaited.recording,
                  "asynccpu: a wait for an event of a capture that is over");
      TORCH_CHECK(!recording || recording == awaited.recording, "asynccpu: a wait for an event of another capture");
      waiting.set_recording(awaited.recording);
      awaited.recording->join(&waiting, awaited.frontier);
      return;
    }
    if (recording) {
      recording->refuse("a wait for work outside of the capture");
    }
    if (awaited.mark) {
      waiting.push([mark = awaited.mark] { mark->wait(); });
    }
  }

  bool queryEvent(void* event) const override {
    return !event || mark_of(event, "asking for an event of a capture")->is_reached();
  }
  void synchronizeEvent(void* event) const override {
    if (event) {
      refuse_in_capture(nullptr, "waiting for an event on the host");
      mark_of(event, "waiting for an event of a capture")->wait();
    }
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first && second, "asynccpu: both events must be recorded before their times are compared");
    TORCH_CHECK(static_cast<Event*>(first)->has_timing && static_cast<Event*>(second)->has_timing,
                "asynccpu: both events need enable_timing=True");
    const auto start = mark_of(first, "timing an event of a capture"), end = mark_of(second, "timing an event of a capture");
    TORCH_CHECK(start->is_reached() && end->is_reached(), "asynccpu: an event is not reached yet");
    return std::chrono::duration<double, std::milli>(end->time() - start->time()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

 private:
  static std::shared_ptr<Mark> mark_of(void* event, const char* what) {
    auto& asked = *static_cast<Event*>(event);
    if (asked.recording) {
      asked.recording->refuse(what);
    }
    return asked.mark;
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_current_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? current_device() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(kDevice);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), bytes);
  }
};

std::mutex holds_mutex;
std::map<int64_t, std::shared_ptr<Mark>> holds; // by number, until they are let go

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  std::atexit([] {
    for (auto& [number, gate] : holds) {
      gate->reach();
    }
    drain_everything();
  });
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// For the Python module
TORCH_LIBRARY(asynccpu, library) {
  library.def("device_count() -> int", [] { return static_cast<int64_t>(device_count()); });
  library.def("manual_seed(int seed) -> ()", [](int64_t seed) {
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      auto generator = default_generator(i);
      std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_current_seed(static_cast<uint64_t>(seed));
    }
  });
  // For tests: the current stream stands still until let_go() of the number that hold() returns.
  library.def("hold() -> int", [] {
    auto gate = std::make_shared<Mark>();
    submit(current_queue(), [gate](const Draw&) { gate->wait(); });
    std::lock_guard<std::mutex> lock(holds_mutex);
    const int64_t number = holds.empty() ? 0 : holds.rbegin()->first + 1;
    holds[number] = gate;
    return number;
  });
  library.def("let_go(int number) -> ()", [](int64_t number) {
    std::lock_guard<std::mutex> lock(holds_mutex);
    holds.at(number)->reach();
    holds.erase(number);
  });
  library.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    return default_generator(static_cast<c10::DeviceIndex>(device)).get_state();
  });
  library.def("set_rng_state(int device, Tensor state) -> ()", [](int64_t device, const at::Tensor& state) {
    at::Generator(default_generator(static_cast<c10::DeviceIndex>(device))).set_state(state);
  });
}

} // namespace
} // namespace asynccpu
