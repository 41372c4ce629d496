#include "random.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>

namespace asynccpu {
namespace {

class GeneratorImpl final : public c10::GeneratorImpl {
 public:
  explicit GeneratorImpl(c10::DeviceIndex device)
      : c10::GeneratorImpl(c10::Device(kDevice, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  void set_current_seed(uint64_t seed) override {
    state_ = {seed, 0};
  }
  void set_offset(uint64_t offset) override {
    state_.number = offset;
  }
  uint64_t get_offset() const override {
    return state_.number;
  }
  uint64_t current_seed() const override {
    return state_.seed;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state_.seed;
  }

  // 16 bytes on the host: the seed and the number of draws taken.
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::detail::empty_cpu({sizeof(Draw)}, c10::kByte);
    std::memcpy(bytes.mutable_data_ptr(), &state_, sizeof(Draw));
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.device().is_cpu() && bytes.numel() * bytes.itemsize() == sizeof(Draw) && bytes.is_contiguous(),
                "asynccpu: the state of a generator is ", sizeof(Draw), " bytes in host memory");
    std::memcpy(&state_, bytes.data(), sizeof(Draw));
  }

  Draw take(uint64_t count) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Draw first = state_;
    state_.number += count;
    return first;
  }

 private:
  GeneratorImpl* clone_impl() const override {
    auto* copy = new GeneratorImpl(device_.index());
    copy->state_ = state_;
    return copy;
  }

  Draw state_{c10::default_rng_seed_val, 0};
};

} // namespace

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (c10::DeviceIndex i = 0; i < device_count(); ++i) {
      made->push_back(at::make_generator<GeneratorImpl>(i));
    }
    return made;
  }();
  return all->at(device < 0 ? current_device() : device);
}

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<GeneratorImpl>(device < 0 ? current_device() : device);
}

Draw take_draws(c10::DeviceIndex device, uint64_t count) {
  return static_cast<GeneratorImpl*>(default_generator(device).unsafeGetGeneratorImpl())->take(count);
}

at::Generator host_generator(const Draw& draw) {
  uint64_t mixed = draw.seed + 0x9E3779B97F4A7C15ull * (draw.number + 1); // splitmix64 over (seed, number)
  mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ull;
  mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBull;
  return at::make_generator<at::CPUGeneratorImpl>(mixed ^ (mixed >> 31));
}

} // namespace asynccpu
