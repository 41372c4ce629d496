// Events between streams, and external events (a semaphore that graphs wait for and the outside opens).
#include <algorithm>
#include <chrono>
#include <cstring>
#include <unordered_map>

#include "capture.h"
#include "handles.h"
#include "limits.h"
#include "report.h"
#include "scheduler.h"

namespace sim {

namespace {

struct Event {
  uint32_t flag = 0;
  long recorded = 0;  // records issued
  long done = 0;      // records reached
  bool open = false;  // external events: recorded and not reset
  double milliseconds = 0;
  std::weak_ptr<Graph> capture;  // the capture that recorded it last, and the nodes it stands for
  std::vector<int> frontier;
};

std::unordered_map<void*, std::shared_ptr<Event>>& events() {
  static auto* events = new std::unordered_map<void*, std::shared_ptr<Event>>;
  return *events;
}

std::shared_ptr<Event> event_of(aclrtEvent handle) {
  std::lock_guard lock(world());
  auto found = events().find(handle);
  return found == events().end() ? nullptr : found->second;
}

double now_ms() {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

aclError unknown(const char* what, const void* handle) {
  return fail(acl::kInvalidHandle, std::string(what) + ": " + describe_handle(handle));
}

// With the lock held: the active capture that the event belongs to.
std::shared_ptr<Graph> capturing(const Event& event) {
  auto graph = event.capture.lock();
  return graph && graph->active ? graph : nullptr;
}

aclError create(aclrtEvent* out, uint32_t flag) {
  auto event = std::make_shared<Event>();
  event->flag = flag;
  std::lock_guard lock(world());
  events()[event.get()] = event;
  add_handle(event.get(), Kind::event);
  *out = event.get();
  return acl::kSuccess;
}

// Empty, or why the host may not ask for the state of this event.
std::string hidden_from_host(const Event& event) {
  if (event.flag != acl::kEventExternal || !is_on(Limit::external_event_host)) return "";
  return by_limit(Limit::external_event_host, "the host asks for the state or time of an external event");
}

aclError record_external(std::shared_ptr<Event> event, aclrtStream stream) {
  event->recorded++;
  return enqueue(stream, {"external event record", nullptr, [event] {
                            event->open = true;
                            opened();
                            event->done++;
                            signals().notify_all();
                          }});
}

}  // namespace

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclrtCreateEventWithFlag(aclrtEvent* out, uint32_t flag) {
  SIM_API(aclrtCreateEvent);
  return create(out, flag);
}
aclError aclrtCreateEventExWithFlag(aclrtEvent* out, uint32_t flag) {
  SIM_API(aclrtCreateEvent);
  return create(out, flag);
}
aclError aclrtCreateEvent(aclrtEvent* out) {
  SIM_API(aclrtCreateEvent);
  return create(out, 0);
}
aclError aclrtDestroyEvent(aclrtEvent handle) {
  SIM_API(aclrtDestroyEvent);
  std::lock_guard lock(world());
  if (!remove_handle(handle, Kind::event)) return unknown("aclrtDestroyEvent", handle);
  events().erase(handle);  // tasks under way keep their own reference
  return acl::kSuccess;
}

aclError aclrtRecordEvent(aclrtEvent handle, aclrtStream stream_handle) {
  SIM_API(aclrtRecordEvent);
  auto event = event_of(handle);
  if (!event) return unknown("aclrtRecordEvent", handle);
  if (event->flag == acl::kEventExternal) return record_external(event, stream_handle);
  auto stream = stream_of(stream_handle);
  if (!stream) return unknown("aclrtRecordEvent on", stream_handle);
  long turn;
  {
    std::lock_guard lock(world());
    if (stream->capture) {
      event->capture = stream->capture;
      event->frontier = stream->frontier;
      return acl::kSuccess;
    }
    event->capture.reset();
    turn = ++event->recorded;
  }
  return enqueue(stream_handle, {"event record", nullptr, [event, turn] {
                                   event->done = std::max(event->done, turn);
                                   event->milliseconds = now_ms();
                                   signals().notify_all();
                                 }});
}

aclError aclrtStreamWaitEvent(aclrtStream stream_handle, aclrtEvent handle) {
  SIM_API(aclrtStreamWaitEvent);
  auto event = event_of(handle);
  if (!event) return unknown("aclrtStreamWaitEvent", handle);
  auto stream = stream_of(stream_handle);
  if (!stream) return unknown("aclrtStreamWaitEvent on", stream_handle);
  if (event->flag == acl::kEventExternal)
    return enqueue(stream_handle, {"external event wait", nullptr, nullptr, [event] { return event->open; }});
  long turn;
  {
    std::lock_guard lock(world());
    auto graph = capturing(*event);
    if (graph) {
      if (stream->capture && stream->capture != graph) {
        invalidate(*stream->capture, "a wait for an event of another capture");
        return fail(acl::kCaptureDependency, stream->capture->broken);
      }
      if (!stream->capture) {
        if (stream->device != graph->device)
          return fail(acl::kCaptureDependency, "a stream of another device joins the capture");
        stream->capture = graph;
        stream->captured_tasks = 0;
        stream->frontier = event->frontier;
        graph->streams.push_back(stream);
      } else {
        for (int at : event->frontier)
          if (std::find(stream->frontier.begin(), stream->frontier.end(), at) == stream->frontier.end())
            stream->frontier.push_back(at);
      }
      return acl::kSuccess;
    }
    bool outside = is_on(Limit::capture_outside_event) ? event->recorded > 0 : event->done < event->recorded;
    if (stream->capture && outside) {
      invalidate(*stream->capture,
                 by_limit(Limit::capture_outside_event, "a wait, inside a capture, for an event recorded outside of it"));
      return fail(acl::kCaptureDependency, stream->capture->broken);
    }
    if (stream->capture) return acl::kSuccess;
    turn = event->recorded;
  }
  return enqueue(stream_handle, {"event wait", nullptr, nullptr, [event, turn] { return event->done >= turn; }});
}

aclError aclrtResetEvent(aclrtEvent handle, aclrtStream stream) {
  SIM_API(aclrtResetEvent);
  auto event = event_of(handle);
  if (!event) return unknown("aclrtResetEvent", handle);
  if (event->flag != acl::kEventExternal) return fail(acl::kUnsupported, "aclrtResetEvent of an event that resets itself");
  return enqueue(stream, {"external event reset", nullptr, [event] { event->open = false; }});
}

aclError aclrtSynchronizeEvent(aclrtEvent handle) {
  SIM_API(aclrtSynchronizeEvent);
  auto event = event_of(handle);
  if (!event) return unknown("aclrtSynchronizeEvent", handle);
  if (auto why = hidden_from_host(*event); !why.empty()) return fail(acl::kUnsupported, why);
  std::unique_lock lock(world());
  if (auto graph = capturing(*event)) {
    invalidate(*graph, "aclrtSynchronizeEvent of an event recorded in a capture");
    return fail(acl::kEventCaptured, graph->broken);
  }
  long turn = event->recorded;
  if (!signals().wait_for(lock, std::chrono::duration<double>(patience()), [&] { return event->done >= turn; }))
    return fail(acl::kSyncTimeout, "hang: the event was not reached within " +
                                       std::to_string(settings().hang_seconds.load()) + " s");
  if (auto why = first_error(); !why.empty()) return fail(acl::kKernelFailed, why);
  return acl::kSuccess;
}

aclError aclrtQueryEventStatus(aclrtEvent handle, int* status) {
  SIM_API(aclrtQueryEventStatus);
  auto event = event_of(handle);
  if (!event) return unknown("aclrtQueryEventStatus", handle);
  if (auto why = hidden_from_host(*event); !why.empty()) return fail(acl::kUnsupported, why);
  std::lock_guard lock(world());
  if (auto graph = capturing(*event)) {
    invalidate(*graph, "aclrtQueryEventStatus of an event recorded in a capture");
    return fail(acl::kEventCaptured, graph->broken);
  }
  *status = event->done >= event->recorded ? 1 : 0;
  return acl::kSuccess;
}

aclError aclrtQueryEventWaitStatus(aclrtEvent handle, int* status) {
  auto event = event_of(handle);
  if (!event) return unknown("aclrtQueryEventWaitStatus", handle);
  if (auto why = hidden_from_host(*event); !why.empty()) return fail(acl::kUnsupported, why);
  std::lock_guard lock(world());
  *status = event->done >= event->recorded ? 0 : 1;
  return acl::kSuccess;
}

aclError aclrtEventElapsedTime(float* out, aclrtEvent from, aclrtEvent to) {
  auto first = event_of(from), last = event_of(to);
  if (!first || !last) return unknown("aclrtEventElapsedTime", first ? to : from);
  for (auto& event : {first, last}) {
    if (auto why = hidden_from_host(*event); !why.empty()) return fail(acl::kUnsupported, why);
    if (event->flag && !(event->flag & acl::kEventTimeLine))
      return fail(acl::kEventTimestampInvalid, "aclrtEventElapsedTime of an event that keeps no time");
  }
  std::lock_guard lock(world());
  *out = static_cast<float>(last->milliseconds - first->milliseconds);
  return acl::kSuccess;
}
aclError aclrtEventGetTimestamp(aclrtEvent handle, uint64_t* out) {
  auto event = event_of(handle);
  if (!event) return unknown("aclrtEventGetTimestamp", handle);
  if (auto why = hidden_from_host(*event); !why.empty()) return fail(acl::kUnsupported, why);
  std::lock_guard lock(world());
  *out = static_cast<uint64_t>(event->milliseconds * 1000);
  return acl::kSuccess;
}

}  // extern "C"
