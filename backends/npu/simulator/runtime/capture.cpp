#include "capture.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <unordered_map>

#include "handles.h"
#include "limits.h"
#include "report.h"

namespace sim {

namespace {

std::unordered_map<void*, std::shared_ptr<Graph>>& graphs() {
  static auto* graphs = new std::unordered_map<void*, std::shared_ptr<Graph>>;
  return *graphs;
}
std::unordered_map<void*, std::shared_ptr<TaskGroup>>& groups() {
  static auto* groups = new std::unordered_map<void*, std::shared_ptr<TaskGroup>>;
  return *groups;
}
std::atomic<uint32_t> next_graph{1};
thread_local int thread_mode = acl::kGlobal;
long openings = 0;  // how often external events were opened; guarded by world()
constexpr int kStreamTasks = 2048 - 32;  // what one device stream of a graph holds
constexpr int kGroupPrefetch = 8;        // empty tasks before each task group

const char* kernel_name(Kernel kernel) {
  static const char* names[] = {"no kernel", "a vector kernel", "a cube kernel", "a mixed kernel"};
  return names[static_cast<size_t>(kernel)];
}

// Count `tasks` on a captured stream, and take another stream of the device where they don't fit.
aclError occupy(Stream& stream, int tasks) {
  auto& graph = *stream.capture;
  stream.captured_tasks += tasks;
  if (!is_on(Limit::capture_cascade) || stream.captured_tasks < kStreamTasks) return acl::kSuccess;
  if (streams_left(graph.device) <= 0) {
    invalidate(graph, by_limit(Limit::capture_cascade, "no stream left of " + std::to_string(settings().streams) +
                                                           " for a capture of more than " +
                                                           std::to_string(kStreamTasks) + " tasks on one stream"));
    return fail(acl::kNoStreamResource, graph.broken);
  }
  graph.cascades++;
  stream.captured_tasks = 0;
  return acl::kSuccess;
}

// A side stream whose last work the capture's own stream does not follow, in words; empty when all are joined.
std::string unjoined(const Graph& graph) {
  std::vector<char> reached(graph.nodes.size(), 0);
  std::vector<int> todo = graph.origin->frontier;
  while (!todo.empty()) {
    int at = todo.back();
    todo.pop_back();
    if (reached[at]) continue;
    reached[at] = 1;
    todo.insert(todo.end(), graph.nodes[at].after.begin(), graph.nodes[at].after.end());
  }
  for (auto& stream : graph.streams)
    for (int at : stream->frontier)
      if (!reached[at])
        return "stream " + std::to_string(stream->id) + " was forked into the capture and never joined back: its '" +
               graph.nodes[at].task.name + "' is not waited for";
  return "";
}

// Run one graph's nodes in an order that its edges allow, random where a schedule is in force. A node that stands at
// an external event holds back only what follows it.
void run_graph(Stream& stream, Graph& graph) {
  size_t count = graph.nodes.size();
  std::vector<int> missing(count);
  std::vector<int> ready;
  for (size_t i = 0; i < count; i++)
    if (!(missing[i] = static_cast<int>(graph.nodes[i].after.size()))) ready.push_back(static_cast<int>(i));
  std::unique_lock lock(world());
  for (size_t left = count; left; left--) {
    std::vector<size_t> able;
    for (;;) {
      for (size_t i = 0; i < ready.size(); i++) {
        auto& wait = graph.nodes[ready[i]].task.ready;
        if (!wait || wait()) able.push_back(i);
      }
      if (!able.empty()) break;
      stream.standing_at = graph.nodes[ready.front()].task.name;
      if (stream.error.empty()) signals().wait(lock);
      stream.standing_at = nullptr;
      if (!stream.error.empty()) return;
    }
    size_t picked = able[random_pick(stream, able.size())];
    int at = ready[picked];
    ready.erase(ready.begin() + static_cast<long>(picked));
    std::vector<Task> tasks;
    if (auto& group = graph.nodes[at].group) {
      if (group->torn)
        violation("a replay ran a task group of which an update had failed midway: some of its tasks are new, others old");
      tasks = group->tasks;
      group->executions++;
      group->base = group->updates;
    } else {
      tasks.push_back(graph.nodes[at].task);
    }
    for (auto& task : tasks) {
      if (task.run) {
        lock.unlock();
        random_delay(stream);
        if (settings().trace) fprintf(stderr, "[ascendsim]   graph %u: %s\n", graph.id, task.name);
        try {
          task.run();
        } catch (const std::exception& e) {
          throw std::runtime_error("graph " + std::to_string(graph.id) + ": " + task.name + ": " + e.what());
        }
        lock.lock();
      }
      if (task.done) task.done();
    }
    made_progress();
    for (int next : graph.followers[at])
      if (!--missing[next]) ready.insert(std::upper_bound(ready.begin(), ready.end(), next), next);
  }
}

std::shared_ptr<Graph> graph_of(aclmdlRI handle) {
  auto found = graphs().find(handle);
  return found == graphs().end() ? nullptr : found->second;
}

}  // namespace

aclError record(Stream& stream, Task task) {
  auto& graph = *stream.capture;
  if (!graph.broken.empty()) return fail(acl::kCaptureInvalidated, graph.broken);
  if (settings().trace)
    fprintf(stderr, "[ascendsim] capture %u, stream %d: %s%s\n", graph.id, stream.id, task.name,
            stream.group ? " (task group)" : "");
  if (auto code = occupy(stream, 1)) return code;
  if (stream.group) {
    if (task.kernel == Kernel::none && (is_on(Limit::group_kernels_only) || task.ready || task.done)) {
      invalidate(graph, by_limit(Limit::group_kernels_only, std::string("'") + task.name + "' inside a task group"));
      return fail(acl::kTaskNotSupported, graph.broken);
    }
    stream.group->tasks.push_back(std::move(task));
    return acl::kSuccess;
  }
  if (is_on(Limit::group_other_streams))
    for (auto& other : graph.streams)
      if (other->group) {
        invalidate(graph, by_limit(Limit::group_other_streams, std::string("'") + task.name + "' on stream " +
                                                                   std::to_string(stream.id) + " while a task group is "
                                                                   "open on stream " + std::to_string(other->id)));
        return fail(acl::kTaskGroupInterrupted, graph.broken);
      }
  graph.nodes.push_back({std::move(task), nullptr, stream.frontier});
  stream.frontier = {static_cast<int>(graph.nodes.size()) - 1};
  return acl::kSuccess;
}

// As hicann/runtime 681ef76 does it (stream.cc:4702, context_aclgraph.cc:878): each kernel of an update rewrites its task
// when it is issued. An extra kernel fails alone. The end checks the count, and undoes nothing.
aclError update(Stream& stream, Task task) {
  auto group = stream.update;
  if (task.kernel == Kernel::none)
    return fail(acl::kTaskNotSupported, by_limit(Limit::group_kernels_only, std::string("'") + task.name +
                                                                                "' in a task update"));
  size_t at = stream.updated;
  if (at >= group->tasks.size())
    return fail(acl::kInternalError, std::string("'") + task.name + "' is one kernel more than the " +
                                         std::to_string(group->tasks.size()) + " of the updated task group");
  stream.updated++;  // also when the kernel is refused below: the end of the update counts it
  auto& captured = group->tasks[at];
  bool differs = is_on(Limit::update_kernel_types) ? captured.kernel != task.kernel
                                                   : std::string(captured.name) != task.name;
  if (differs) {
    push(stream, {"failed task update", nullptr, [group] { group->torn = group->tasks.size() > 1; }});
    return fail(acl::kInternalError, by_limit(Limit::update_kernel_types,
                                              std::string("a task update issues '") + task.name + "', " +
                                                  kernel_name(task.kernel) + ", for a captured '" + captured.name +
                                                  "', " + kernel_name(captured.kernel)));
  }
  push(stream, {"task update", nullptr, [group, at, task] { group->tasks[at] = task; }});
  return acl::kSuccess;
}

void opened() { openings++; }

void invalidate(Graph& graph, const std::string& why) {
  if (graph.broken.empty()) graph.broken = why;
}

int graph_streams(int device) {
  int used = 0;
  for (auto& [handle, graph] : graphs())
    if (graph->device == device) used += static_cast<int>(graph->streams.size()) + graph->cascades;
  return used;
}

std::string forbidden_in_capture() {
  if (thread_mode == acl::kRelaxed) return "";
  std::lock_guard lock(world());
  for (auto& [handle, graph] : graphs()) {
    if (!graph->active || graph->mode == acl::kRelaxed) continue;
    bool mine = graph->thread == std::this_thread::get_id();
    if (!mine && !(graph->mode == acl::kGlobal && thread_mode == acl::kGlobal)) continue;
    invalidate(*graph, "a call that waits for the device was made while a graph is being captured");
    return graph->broken;
  }
  return "";
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclmdlRICaptureBegin(aclrtStream handle, int mode) {
  SIM_API(aclmdlRICaptureBegin);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureBegin: " + describe_handle(handle));
  if (!handle) return fail(acl::kCaptureModeForbids, "aclmdlRICaptureBegin: the default stream can't be captured");
  std::lock_guard lock(world());
  if (stream->capture) return fail(acl::kStreamCaptured, "aclmdlRICaptureBegin: the stream is already being captured");
  if (stream->update) return fail(acl::kTaskGroupStatus, "aclmdlRICaptureBegin: a task update is open on the stream");
  if (streams_left(stream->device) <= 0)
    return fail(acl::kNoStreamResource, "aclmdlRICaptureBegin: no stream left of " +
                                            std::to_string(settings().streams) + " for the graph's own");
  auto graph = std::make_shared<Graph>();
  graph->id = next_graph++;
  graph->device = stream->device;
  graph->mode = mode;
  graph->thread = std::this_thread::get_id();
  graph->origin = stream.get();
  graph->streams = {stream};
  stream->capture = graph;
  stream->frontier.clear();
  stream->captured_tasks = 0;
  graphs()[graph.get()] = graph;
  add_handle(graph.get(), Kind::graph);
  return acl::kSuccess;
}

aclError aclmdlRICaptureGetInfo(aclrtStream handle, int* status, aclmdlRI* out) {
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureGetInfo: " + describe_handle(handle));
  std::lock_guard lock(world());
  auto* graph = stream->capture.get();
  *status = !graph ? acl::kNotCapturing : graph->broken.empty() ? acl::kCapturing : acl::kInvalidated;
  if (out) *out = graph;
  return acl::kSuccess;
}

aclError aclmdlRIGetId(aclmdlRI handle, uint32_t* id) {
  std::lock_guard lock(world());
  auto graph = graph_of(handle);
  if (!graph) return fail(acl::kInvalidHandle, "aclmdlRIGetId: " + describe_handle(handle));
  *id = graph->id;
  return acl::kSuccess;
}

aclError aclmdlRICaptureEnd(aclrtStream handle, aclmdlRI* out) {
  SIM_API(aclmdlRICaptureEnd);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureEnd: " + describe_handle(handle));
  std::lock_guard lock(world());
  auto graph = stream->capture;
  if (!graph) return fail(acl::kStreamNotCaptured, "aclmdlRICaptureEnd: the stream is not being captured");
  if (graph->origin != stream.get())
    return fail(acl::kCaptureUnmatched, "aclmdlRICaptureEnd: the capture began on another stream");
  if (graph->mode != acl::kRelaxed && graph->thread != std::this_thread::get_id())
    return fail(acl::kCaptureWrongThread, "aclmdlRICaptureEnd: the capture began on another thread");
  acl::Code code = acl::kSuccess;
  std::string why;
  if (!graph->broken.empty()) code = acl::kCaptureInvalidated, why = graph->broken;
  if (!code)
    for (auto& each : graph->streams)
      if (each->group) code = acl::kTaskGroupStatus, why = "the capture ends inside a task group";
  if (!code)
    if (why = unjoined(*graph); !why.empty()) code = acl::kStreamUnjoined;
  for (auto& each : graph->streams) {
    each->capture.reset();
    each->group.reset();
    each->frontier.clear();
  }
  graph->active = false;
  *out = graph.get();
  if (code) {
    remove_handle(graph.get(), Kind::graph);
    graphs().erase(graph.get());
    return fail(code, "aclmdlRICaptureEnd: " + why);
  }
  graph->followers.resize(graph->nodes.size());
  for (size_t i = 0; i < graph->nodes.size(); i++) {
    auto& after = graph->nodes[i].after;
    std::sort(after.begin(), after.end());
    after.erase(std::unique(after.begin(), after.end()), after.end());
    for (int before : after) graph->followers[before].push_back(static_cast<int>(i));
  }
  return acl::kSuccess;
}

aclError aclmdlRICaptureThreadExchangeMode(int* mode) {
  std::swap(thread_mode, *mode);
  return acl::kSuccess;
}

aclError aclmdlRIExecuteAsync(aclmdlRI handle, aclrtStream stream_handle) {
  SIM_API(aclmdlRIExecuteAsync);
  std::shared_ptr<Graph> graph;
  {
    std::lock_guard lock(world());
    graph = graph_of(handle);
    if (!graph || graph->active) return fail(acl::kInvalidHandle, "aclmdlRIExecuteAsync: " + describe_handle(handle));
    graph->pending++;
  }
  auto stream = stream_of(stream_handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRIExecuteAsync on " + describe_handle(stream_handle));
  if (is_capturing(stream_handle))
    return fail(acl::kCaptureModeForbids, "aclmdlRIExecuteAsync: a replay can't be captured into another graph");
  if (is_on(Limit::replay_device) && (graph->device != current_device() || graph->device != stream->device)) {
    std::lock_guard lock(world());
    graph->pending--;
    return fail(acl::kModelContext,
                by_limit(Limit::replay_device, "a graph of device " + std::to_string(graph->device) +
                                                   " replayed on a stream of device " + std::to_string(stream->device) +
                                                   " while device " + std::to_string(current_device()) + " is current"));
  }
  return enqueue(stream_handle, {"graph replay", [stream, graph] { run_graph(*stream, *graph); },
                                 [graph] { graph->pending--; }});
}

aclError aclmdlRIDestroy(aclmdlRI handle) {
  SIM_API(aclmdlRIDestroy);
  std::lock_guard lock(world());
  auto graph = graph_of(handle);
  if (!graph) return fail(acl::kInvalidHandle, "aclmdlRIDestroy: " + describe_handle(handle));
  for (auto& group : graph->groups) {
    groups().erase(group.get());
    remove_handle(group.get(), Kind::task_group);
  }
  remove_handle(handle, Kind::graph);
  graphs().erase(handle);  // replays under way keep their own reference
  return acl::kSuccess;
}

aclError aclmdlRIDebugJsonPrint(aclmdlRI handle, const char* path, uint32_t) {
  std::lock_guard lock(world());
  auto graph = graph_of(handle);
  if (!graph) return fail(acl::kInvalidHandle, "aclmdlRIDebugJsonPrint: " + describe_handle(handle));
  FILE* file = fopen(path, "w");
  if (!file) return fail(acl::kInvalidFile, std::string("can't write ") + path);
  // Chrome's trace events, as the device writes them: a microsecond per node, in the order of their capture
  fprintf(file, "[");
  for (size_t i = 0; i < graph->nodes.size(); i++)
    fprintf(file, "%s{\"name\": \"%s\", \"ph\": \"X\", \"pid\": 0, \"tid\": \"stream0\", \"ts\": %zu, \"dur\": 1}",
            i ? ",\n " : "", graph->nodes[i].task.name, i);
  fprintf(file, "]\n");
  fclose(file);
  return acl::kSuccess;
}

// ---- task groups and their updates ----

aclError aclmdlRICaptureTaskGrpBegin(aclrtStream handle) {
  SIM_API(aclmdlRICaptureTaskGrpBegin);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureTaskGrpBegin: " + describe_handle(handle));
  std::lock_guard lock(world());
  if (!stream->capture) return fail(acl::kStreamNotCaptured, "a task group begins on a stream that is not captured");
  if (stream->group) return fail(acl::kTaskGroupStatus, "a task group begins inside another one");
  if (is_on(Limit::group_prefetch))
    if (auto code = occupy(*stream, kGroupPrefetch)) return code;
  stream->group = std::make_shared<TaskGroup>();
  stream->group->graph = stream->capture.get();
  return acl::kSuccess;
}

aclError aclmdlRICaptureTaskGrpEnd(aclrtStream handle, aclrtTaskGrp* out) {
  SIM_API(aclmdlRICaptureTaskGrpEnd);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureTaskGrpEnd: " + describe_handle(handle));
  std::lock_guard lock(world());
  if (!stream->group) return fail(acl::kTaskGroupStatus, "a task group ends that was not begun");
  auto group = std::move(stream->group);
  auto& graph = *stream->capture;
  if (group->tasks.empty()) return fail(acl::kTaskGroupStatus, "a task group without a task");
  graph.nodes.push_back({{"task group", nullptr}, group, stream->frontier});
  stream->frontier = {static_cast<int>(graph.nodes.size()) - 1};
  graph.groups.push_back(group);
  groups()[group.get()] = group;
  add_handle(group.get(), Kind::task_group);
  *out = group.get();
  return acl::kSuccess;
}

aclError aclmdlRICaptureTaskUpdateBegin(aclrtStream handle, aclrtTaskGrp group_handle) {
  SIM_API(aclmdlRICaptureTaskUpdateBegin);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureTaskUpdateBegin: " + describe_handle(handle));
  std::lock_guard lock(world());
  auto found = groups().find(group_handle);
  if (found == groups().end())
    return fail(acl::kInvalidHandle, "task update of " + describe_handle(group_handle) + " (was its graph destroyed?)");
  if (found->second->graph->active)
    return fail(acl::kTaskGroupStatus, "task update of a graph that is still being captured");
  if (stream->capture) return fail(acl::kStreamCaptured, "task update on a stream that is being captured");
  if (stream->update) return fail(acl::kTaskGroupStatus, "a task update begins inside another one");
  if (found->second->is_updating) return fail(acl::kTaskGroupStatus, "a task group is updated on two streams at once");
  stream->update = found->second;
  stream->update->is_updating = true;
  stream->updated = 0;
  return acl::kSuccess;
}

aclError aclmdlRICaptureTaskUpdateEnd(aclrtStream handle) {
  SIM_API(aclmdlRICaptureTaskUpdateEnd);
  auto stream = stream_of(handle);
  if (!stream) return fail(acl::kInvalidHandle, "aclmdlRICaptureTaskUpdateEnd: " + describe_handle(handle));
  std::lock_guard lock(world());
  if (!stream->update) return fail(acl::kTaskGroupStatus, "a task update ends that was not begun");
  auto group = std::move(stream->update);
  stream->update.reset();
  group->is_updating = false;
  if (stream->updated != group->tasks.size()) {
    bool torn = stream->updated > 0;
    push(*stream, {"failed task update", nullptr, [group, torn] { group->torn |= torn; }});
    return fail(acl::kInternalError, "a task update issued " + std::to_string(stream->updated) + " of " +
                                         std::to_string(group->tasks.size()) + " captured kernels");
  }
  push(*stream, {"task update end", nullptr, [group] {
                   // if no event was opened in between, the second update may replace the first
                   if (group->updates > group->base && group->updates > 0 && openings > group->openings)
                     violation("a task update overwrote one that no replay had used yet: it ran before the previous "
                               "replay of its graph ended");
                   group->torn = false;
                   group->openings = openings;
                   group->updates++;
                   signals().notify_all();
                 }});
  return acl::kSuccess;
}

}  // extern "C"
