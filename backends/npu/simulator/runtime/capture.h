// Graph capture: what streams record, in which order it must run, and which of it a task update may rewrite.
#pragma once

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "scheduler.h"

namespace sim {

// Tasks whose parameters an update rewrites. All fields under the world's lock.
struct TaskGroup {
  std::vector<Task> tasks;
  Graph* graph = nullptr;
  long updates = 0;     // updates that took effect
  long executions = 0;  // replays that ran the group
  long base = 0;        // updates seen by the last execution
  long openings = 0;    // openings of external events up to the last update
  bool torn = false;    // an update failed after it had rewritten some of the tasks
  bool is_updating = false;
};

struct Node {
  Task task;
  std::shared_ptr<TaskGroup> group;  // null: `task` alone
  std::vector<int> after;            // nodes that come before this one
};

struct Graph {
  uint32_t id = 0;
  int device = 0;
  int mode = 0;
  std::thread::id thread;
  bool active = true;                       // still capturing
  std::string broken;                       // why the capture is invalid
  Stream* origin = nullptr;
  std::vector<std::shared_ptr<Stream>> streams;
  int cascades = 0;                         // further device streams, for long captures
  std::vector<Node> nodes;
  std::vector<std::vector<int>> followers;  // made at the end of capture
  std::vector<std::shared_ptr<TaskGroup>> groups;
  long pending = 0;                         // replays launched and not finished
};

// With the world's lock held.
aclError record(Stream& stream, Task task);
aclError update(Stream& stream, Task task);
// Count an opening of an external event: what waited for it may run on.
void opened();
void invalidate(Graph& graph, const std::string& why);
int graph_streams(int device);

// Why this thread may not call what a capture under way forbids; empty when it may. Takes the lock.
std::string forbidden_in_capture();

}  // namespace sim
