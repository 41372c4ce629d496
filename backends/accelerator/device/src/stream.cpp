#include "stream.h"

#include "capture.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace asynccpu {
namespace {

struct Device {
  std::array<Queue, kStreams> streams;
  std::atomic<uint64_t> handed_out{0};
};

// Never destroyed: threads may still use it while the process ends.
std::vector<std::unique_ptr<Device>>& devices() {
  static auto* all = [] {
    const char* asked = std::getenv("ASYNCCPU_DEVICES");
    const int count = asked ? std::atoi(asked) : 2;
    auto* made = new std::vector<std::unique_ptr<Device>>();
    for (int i = 0; i < count; ++i) {
      made->push_back(std::make_unique<Device>());
    }
    return made;
  }();
  return *all;
}

thread_local c10::DeviceIndex current_device_ = 0;
thread_local std::array<c10::StreamId, 64> current_streams_{};

std::mutex error_mutex;
std::string error; // what the first failing task since the last wait said; empty for none

void keep_error(const char* message) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (error.empty()) {
    error = message;
  }
}

void raise_error() {
  std::string message;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    std::swap(message, error);
  }
  TORCH_CHECK(message.empty(), "asynccpu: an op failed on the device, after it was issued: ", message);
}

} // namespace

void Mark::reach() {
  std::lock_guard<std::mutex> lock(mutex_);
  time_ = std::chrono::steady_clock::now();
  is_reached_ = true;
  reached_.notify_all();
}

void Mark::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  reached_.wait(lock, [this] { return is_reached_; });
}

bool Mark::is_reached() {
  std::lock_guard<std::mutex> lock(mutex_);
  return is_reached_;
}

std::chrono::steady_clock::time_point Mark::time() {
  std::lock_guard<std::mutex> lock(mutex_);
  return time_;
}

void Queue::push(std::function<void()> task) {
  std::vector<std::function<void()>> spent; // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(mutex_);
  spent.swap(spent_);
  add(std::move(task));
}

void Queue::add(std::function<void()> task) {
  tasks_.push_back(std::move(task));
  ++pushed_;
  if (!has_thread_) {
    has_thread_ = true;
    std::thread([this] { run(); }).detach();
  }
  changed_.notify_one();
}

std::shared_ptr<Mark> Queue::mark() {
  auto made = std::make_shared<Mark>();
  std::lock_guard<std::mutex> lock(mutex_); // and destroys nothing: the allocator calls this under its own lock
  add([made] { made->reach(); });
  return made;
}

bool Queue::is_idle() {
  std::lock_guard<std::mutex> lock(mutex_);
  return done_ == pushed_;
}

void Queue::drain() {
  std::vector<std::function<void()>> spent;
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this, wanted = pushed_] { return done_ >= wanted; });
  spent.swap(spent_);
}

std::shared_ptr<Recording> Queue::recording() {
  std::lock_guard<std::mutex> lock(mutex_);
  return recording_;
}

void Queue::set_recording(std::shared_ptr<Recording> recording) {
  std::lock_guard<std::mutex> lock(mutex_);
  recording_ = std::move(recording);
}

void Queue::run() {
  c10::InferenceMode no_autograd;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return !tasks_.empty(); });
    auto task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    try {
      task();
    } catch (const c10::Error& failure) {
      keep_error(failure.what_without_backtrace());
    } catch (const std::exception& failure) {
      keep_error(failure.what());
    }
    lock.lock();
    spent_.push_back(std::move(task));
    ++done_;
    finished_.notify_all();
  }
}

c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(devices().size());
}

c10::DeviceIndex current_device() {
  return current_device_;
}

void set_current_device(c10::DeviceIndex index) {
  TORCH_CHECK(index >= 0 && index < device_count(), "asynccpu: there are ", static_cast<int>(device_count()),
              " devices, index ", static_cast<int>(index), " was asked for");
  current_device_ = index;
}

c10::StreamId current_stream(c10::DeviceIndex device) {
  return current_streams_[device < 0 ? current_device_ : device];
}

void set_current_stream(c10::DeviceIndex device, c10::StreamId stream) {
  current_streams_[device < 0 ? current_device_ : device] = stream;
}

c10::StreamId next_stream(c10::DeviceIndex device) {
  auto& counter = devices().at(device < 0 ? current_device_ : device)->handed_out;
  return 1 + static_cast<c10::StreamId>(counter++ % (kStreams - 1));
}

c10::Stream as_stream(c10::DeviceIndex device, c10::StreamId stream) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kDevice, device < 0 ? current_device_ : device), stream);
}

Queue& queue(c10::DeviceIndex device, c10::StreamId stream) {
  return devices().at(device < 0 ? current_device_ : device)->streams.at(stream);
}

Queue& current_queue() {
  return queue(current_device_, current_stream(current_device_));
}

void refuse_in_capture(Queue* stream, const char* what) {
  if (auto recording = stream ? stream->recording() : nullptr) {
    recording->refuse(what);
  }
  if (auto recording = capture_here()) {
    recording->refuse(what);
  }
}

void synchronize_stream(Queue& stream) {
  refuse_in_capture(&stream, "waiting for a stream on the host");
  stream.drain();
  raise_error();
}

void synchronize_device(c10::DeviceIndex device) {
  refuse_in_capture(nullptr, "waiting for the device on the host");
  for (auto& stream : devices().at(device < 0 ? current_device_ : device)->streams) {
    stream.drain();
  }
  raise_error();
}

void drain_everything() noexcept {
  for (auto& device : devices()) {
    for (auto& stream : device->streams) {
      stream.drain();
    }
  }
}

} // namespace asynccpu
