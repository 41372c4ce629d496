#include "scheduler.h"

#include <sys/prctl.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <map>
#include <unordered_map>

#include "capture.h"
#include "handles.h"
#include "report.h"

namespace sim {

namespace {

using Clock = std::chrono::steady_clock;

struct Streams {
  std::unordered_map<void*, std::shared_ptr<Stream>> live;
  std::map<int, std::shared_ptr<Stream>> defaults;
  int next_id = 1;
};
Streams& streams() {
  static auto* streams = new Streams;
  return *streams;
}

std::atomic<unsigned long> progress{0};
std::atomic<unsigned long> epoch{1};
thread_local int this_device = 0;

void worker(std::shared_ptr<Stream> stream) {
  prctl(PR_SET_TIMERSLACK, 1);
  std::unique_lock lock(world());
  for (;;) {
    stream->work.wait(lock, [&] { return stream->stop || !stream->queue.empty(); });
    if (stream->queue.empty()) return;
    stream->busy = true;
    if (auto& ready = stream->queue.front().ready) {
      stream->standing_at = stream->queue.front().name;
      while (stream->error.empty() && !ready()) signals().wait(lock);
      stream->standing_at = nullptr;
    }
    Task task = std::move(stream->queue.front());
    stream->queue.pop_front();
    bool skip = !stream->error.empty();
    if (task.run && !skip) {
      lock.unlock();
      random_delay(*stream);
      std::string error;
      try {
        task.run();
      } catch (const std::exception& e) {
        error = std::string(task.name) + " failed: " + e.what();
      }
      task.run = nullptr;
      lock.lock();
      if (!error.empty() && stream->error.empty()) stream->error = error;
    }
    if (task.done) task.done();
    made_progress();
    stream->busy = false;
    if (stream->queue.empty()) stream->idle.notify_all();
  }
}

std::shared_ptr<Stream> make_stream(int device) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  stream->id = streams().next_id++;
  std::thread(worker, stream).detach();
  return stream;
}

// With the lock held: wait until the stream is idle. Empty, or why it never will be.
std::string wait_idle(std::unique_lock<std::mutex>& lock, Stream& stream, int timeout_ms) {
  auto begin = Clock::now(), moved = begin;
  unsigned long seen = progress;
  auto idle = [&] { return stream.queue.empty() && !stream.busy; };
  while (!stream.idle.wait_for(lock, std::chrono::milliseconds(50), idle)) {
    auto now = Clock::now();
    if (progress != seen) seen = progress, moved = now;
    if (timeout_ms >= 0 && now - begin > std::chrono::milliseconds(timeout_ms)) return "the given timeout passed";
    if (std::chrono::duration<double>(now - moved).count() < patience()) continue;
    std::string why = "hang: nothing moved for " + std::to_string(settings().hang_seconds.load()) + " s; ";
    for (auto& [handle, other] : streams().live)
      if (other->standing_at)
        why += "stream " + std::to_string(other->id) + " stands at '" + other->standing_at + "'; ";
    for (auto& [device, other] : streams().defaults)
      if (other->standing_at) why += "the default stream stands at '" + std::string(other->standing_at) + "'; ";
    why += "its event or value is never recorded";
    auto give_up = [&](Stream& other) {
      if (other.standing_at && other.error.empty()) other.error = why;
    };
    for (auto& [handle, other] : streams().live) give_up(*other);
    for (auto& [device, other] : streams().defaults) give_up(*other);
    if (stream.error.empty()) stream.error = why;
    violation(why);
    signals().notify_all();
    stream.idle.wait_for(lock, std::chrono::seconds(5), idle);
    return why;
  }
  return stream.error;
}

aclError synchronize(aclrtStream handle, int timeout_ms, const char* what) {
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, std::string(what) + ": " + describe_handle(handle));
  std::unique_lock lock(world());
  if (stream->capture) {
    invalidate(*stream->capture, std::string(what) + " on a stream that is being captured");
    return fail(acl::kStreamCaptured, stream->capture->broken);
  }
  auto why = wait_idle(lock, *stream, timeout_ms);
  if (why.empty()) return acl::kSuccess;
  bool timed_out = why.starts_with("hang") || why.starts_with("the given");
  return fail(timed_out ? acl::kSyncTimeout : acl::kKernelFailed, why);
}

aclError synchronize_device(const char* what) {
  if (auto why = forbidden_in_capture(); !why.empty()) return fail(acl::kStreamCaptured, std::string(what) + ": " + why);
  std::unique_lock lock(world());
  std::vector<std::shared_ptr<Stream>> mine;
  for (auto& [handle, stream] : streams().live)
    if (stream->device == this_device) mine.push_back(stream);
  if (auto it = streams().defaults.find(this_device); it != streams().defaults.end()) mine.push_back(it->second);
  for (auto& stream : mine)
    if (stream->capture) {
      invalidate(*stream->capture, std::string(what) + " while a stream is being captured");
      return fail(acl::kStreamCaptured, stream->capture->broken);
    }
  std::string first;
  for (auto& stream : mine)
    if (auto why = wait_idle(lock, *stream, -1); !why.empty() && first.empty()) first = why;
  if (first.empty()) return acl::kSuccess;
  return fail(first.starts_with("hang") ? acl::kSyncTimeout : acl::kKernelFailed, first);
}

}  // namespace

std::mutex& world() {
  static auto* mutex = new std::mutex;
  return *mutex;
}
std::condition_variable& signals() {
  static auto* signals = new std::condition_variable;
  return *signals;
}
void made_progress() { progress++; }

int current_device() { return this_device; }

std::shared_ptr<Stream> stream_of(aclrtStream handle) {
  std::lock_guard lock(world());
  if (!handle) {
    auto& stream = streams().defaults[this_device];
    if (!stream) stream = make_stream(this_device);
    return stream;
  }
  auto found = streams().live.find(handle);
  return found == streams().live.end() ? nullptr : found->second;
}

bool is_capturing(aclrtStream handle) {
  auto stream = stream_of(handle);
  std::lock_guard lock(world());
  return stream && stream->capture;
}

void push(Stream& stream, Task task) {
  stream.queue.push_back(std::move(task));
  stream.work.notify_one();
}

aclError enqueue(aclrtStream handle, Task task) {
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, std::string(task.name) + " on " + describe_handle(handle));
  std::lock_guard lock(world());
  if (stream->update) return update(*stream, std::move(task));
  if (stream->capture) return record(*stream, std::move(task));
  if (!stream->error.empty()) return fail(acl::kKernelFailed, stream->error);
  push(*stream, std::move(task));
  return acl::kSuccess;
}

void random_delay(Stream& stream) {
  int limit = settings().delay_us, percent = settings().delay_percent;
  if (limit <= 0 || percent <= 0) return;
  if (random_pick(stream, 100) < static_cast<size_t>(percent))
    std::this_thread::sleep_for(std::chrono::microseconds(random_pick(stream, static_cast<size_t>(limit))));
}

size_t random_pick(Stream& stream, size_t n) {
  if (n < 2 || settings().delay_percent <= 0) return 0;
  if (stream.epoch != epoch) {
    stream.epoch = epoch;
    stream.random.seed(static_cast<unsigned>(settings().seed * 7919 + static_cast<unsigned long>(stream.id)));
  }
  return stream.random() % n;
}

void reseed() { epoch++; }

std::string first_error() {
  for (auto& [handle, stream] : streams().live)
    if (!stream->error.empty()) return stream->error;
  for (auto& [device, stream] : streams().defaults)
    if (!stream->error.empty()) return stream->error;
  return "";
}

int streams_left(int device) {
  int used = graph_streams(device);
  for (auto& [handle, stream] : streams().live) used += stream->device == device;
  return settings().streams - used;
}

std::string streams_used_json() {
  std::lock_guard lock(world());
  std::string text = "[";
  for (int device = 0; device < settings().devices; device++)
    text += (device ? ", " : "") + std::to_string(settings().streams - streams_left(device));
  return text + "]";
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclrtSetDevice(int32_t device) {
  SIM_API(aclrtSetDevice);
  if (device < 0 || device >= settings().devices)
    return fail(acl::kInvalidDevice, "device " + std::to_string(device) + " of " + std::to_string(settings().devices));
  this_device = device;
  return acl::kSuccess;
}
aclError aclrtGetDevice(int32_t* device) {
  *device = this_device;
  return acl::kSuccess;
}

aclError aclrtCreateStreamWithConfig(aclrtStream* out, uint32_t, uint32_t) {
  SIM_API(aclrtCreateStreamWithConfig);
  std::lock_guard lock(world());
  if (streams_left(this_device) <= 0)
    return fail(acl::kNoStreamResource, "device " + std::to_string(this_device) + " has no stream left of " +
                                            std::to_string(settings().streams) + " (live graphs hold streams too)");
  auto stream = make_stream(this_device);
  streams().live[stream.get()] = stream;
  add_handle(stream.get(), Kind::stream);
  *out = stream.get();
  return acl::kSuccess;
}
aclError aclrtCreateStream(aclrtStream* out) { return aclrtCreateStreamWithConfig(out, 0, 0); }
aclError aclrtDestroyStream(aclrtStream handle) {
  SIM_API(aclrtDestroyStream);
  std::lock_guard lock(world());
  auto found = streams().live.find(handle);
  if (found == streams().live.end()) return fail(acl::kInvalidHandle, "aclrtDestroyStream: " + describe_handle(handle));
  found->second->stop = true;
  found->second->work.notify_all();
  streams().live.erase(found);
  remove_handle(handle, Kind::stream);
  return acl::kSuccess;
}
aclError aclrtDestroyStreamForce(aclrtStream handle) { return aclrtDestroyStream(handle); }
aclError aclrtStreamGetId(aclrtStream handle, int32_t* id) {
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclrtStreamGetId: " + describe_handle(handle));
  *id = stream->id;
  return acl::kSuccess;
}
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream handle, int32_t timeout_ms) {
  SIM_API(aclrtSynchronizeStream);
  return synchronize(handle, timeout_ms, "aclrtSynchronizeStream");
}
aclError aclrtSynchronizeStream(aclrtStream handle) { return aclrtSynchronizeStreamWithTimeout(handle, -1); }
aclError aclrtSynchronizeDevice() {
  SIM_API(aclrtSynchronizeDevice);
  return synchronize_device("aclrtSynchronizeDevice");
}
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) {
  SIM_API(aclrtSynchronizeDevice);
  return synchronize_device("aclrtSynchronizeDevice");
}
aclError aclrtStreamQuery(aclrtStream handle, int* status) {
  SIM_API(aclrtStreamQuery);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclrtStreamQuery: " + describe_handle(handle));
  std::lock_guard lock(world());
  if (stream->capture) {
    invalidate(*stream->capture, "aclrtStreamQuery on a stream that is being captured");
    return fail(acl::kStreamCaptured, stream->capture->broken);
  }
  *status = stream->queue.empty() && !stream->busy ? 0 : 1;
  return acl::kSuccess;
}

aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc function, void* argument) {
  SIM_API(aclrtLaunchHostFunc);
  return enqueue(stream, {"host function", [=] { function(argument); }});
}
aclError aclrtLaunchCallback(aclrtHostFunc function, void* argument, int, aclrtStream stream) {
  SIM_API(aclrtLaunchCallback);
  return enqueue(stream, {"host callback", [=] { function(argument); }});
}

}  // extern "C"
