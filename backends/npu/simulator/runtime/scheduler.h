// Streams: a worker thread each, so that work really is asynchronous and a missing order can show.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../abi/acl.h"

namespace sim {

struct Graph;
struct TaskGroup;

// Which cores a task runs on, as far as a task update compares it; none: it is no kernel.
enum class Kernel { none, vector, cube, mix };

// One piece of device work. `run` works without the world's lock and may throw; `done` runs with the lock held.
struct Task {
  const char* name;
  std::function<void()> run;
  std::function<void()> done = nullptr;
  std::function<bool()> ready = nullptr;  // with the lock held; the task waits in its queue until true
  Kernel kernel = Kernel::none;
};

struct Stream {
  int device;
  int id;
  std::condition_variable work, idle;
  std::deque<Task> queue;
  bool busy = false;
  bool stop = false;
  bool destroyed = false;
  const char* standing_at = nullptr;  // the wait that it stands at
  std::string error;                  // sticky: a kernel failed, or the stream was given up after a hang
  unsigned long epoch = 0;            // of the random generator below
  std::mt19937 random;

  // Capture.
  std::shared_ptr<Graph> capture;
  std::vector<int> frontier;                 // the graph nodes that the next one follows
  std::shared_ptr<TaskGroup> group;          // open task group
  int captured_tasks = 0;                    // since the capture took its latest stream for this one
  std::shared_ptr<TaskGroup> update;         // open task update, and how many kernels it issued
  size_t updated = 0;
};

// One lock for all bookkeeping. Kernels run without it.
std::mutex& world();
// Wakes the tasks that stand at a wait, after anything they may wait for has changed.
std::condition_variable& signals();
void made_progress();

int current_device();
// The live stream behind a handle (null means the current device's default stream), or nullptr.
std::shared_ptr<Stream> stream_of(aclrtStream handle);
bool is_capturing(aclrtStream handle);

// Queue a task on a stream, or record it where the stream is capturing or collecting a task update.
aclError enqueue(aclrtStream handle, Task task);
// The same for a stream that is neither; with the world's lock held.
void push(Stream& stream, Task task);

// Sleep for a random time now and then, as the schedule in force says. Call without the lock.
void random_delay(Stream& stream);
// A number in [0, n), random where a schedule is in force, else 0.
size_t random_pick(Stream& stream, size_t n);
void reseed();
// The first sticky error of any stream, or empty; with the world's lock held.
std::string first_error();
std::string streams_used_json();
// Streams that a device has left, captured graphs counted; with the world's lock held.
int streams_left(int device);

}  // namespace sim
