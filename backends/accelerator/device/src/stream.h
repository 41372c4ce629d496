// Streams that run asynchronously: each is a thread that takes tasks from a queue, in order.
#pragma once

#include <c10/core/Stream.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace asynccpu {

class Recording; // capture.h

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kStreams = 33; // per device: the default stream, 0, and 32 that are handed out in turn

// A point in a stream. Threads wait for it; it keeps the time at which it was reached.
class Mark {
 public:
  void reach();
  void wait();
  bool is_reached();
  std::chrono::steady_clock::time_point time(); // call it once the mark is reached

 private:
  std::mutex mutex_;
  std::condition_variable reached_;
  bool is_reached_ = false;
  std::chrono::steady_clock::time_point time_;
};

// One stream. Its thread starts with its first task and is never joined: at exit the process drains all streams.
class Queue {
 public:
  void push(std::function<void()> task);
  std::shared_ptr<Mark> mark(); // pushes a task that reaches the mark
  bool is_idle();
  void drain(); // waits on the host until all tasks pushed before are done

  // The capture that this stream takes part in, or null. Work issued to the stream is then recorded, not run.
  std::shared_ptr<Recording> recording();
  void set_recording(std::shared_ptr<Recording> recording);

 private:
  void add(std::function<void()> task); // the lock is held
  void run();

  std::mutex mutex_;
  std::condition_variable changed_, finished_;
  std::deque<std::function<void()>> tasks_;
  // Tasks that are done. What they hold may belong to Python, whose lock a waiting host thread may have: they are
  // destroyed by host threads, never by the stream's.
  std::vector<std::function<void()>> spent_;
  uint64_t pushed_ = 0, done_ = 0;
  bool has_thread_ = false;
  std::shared_ptr<Recording> recording_;
};

c10::DeviceIndex device_count(); // the environment variable ASYNCCPU_DEVICES, or 2
c10::DeviceIndex current_device(); // of this thread
void set_current_device(c10::DeviceIndex index);

c10::StreamId current_stream(c10::DeviceIndex device); // of this thread
void set_current_stream(c10::DeviceIndex device, c10::StreamId stream);
c10::StreamId next_stream(c10::DeviceIndex device); // one of the 32, in turn
c10::Stream as_stream(c10::DeviceIndex device, c10::StreamId stream);
Queue& queue(c10::DeviceIndex device, c10::StreamId stream);
Queue& current_queue();

// Waits that the host may not do in a capture of this thread, or on a stream that is being captured: these raise
// RuntimeError there. They also raise, once, what a task raised since the last wait.
void synchronize_stream(Queue& stream);
void synchronize_device(c10::DeviceIndex device);
void refuse_in_capture(Queue* stream, const char* what);

void drain_everything() noexcept; // also in a capture, and whatever tasks raised

} // namespace asynccpu
