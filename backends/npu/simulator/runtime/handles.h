// Every handle given out is on a list by kind, so that a stale, foreign or forgotten one is known by name.
#pragma once

#include <string>

namespace sim {

enum class Kind { context, stream, event, graph, task_group, tensor, scalar, int_array, float_array, bool_array,
                  tensor_list, scalar_list, executor, count };

const char* kind_name(Kind kind);
void add_handle(const void* handle, Kind kind);
// False when `handle` is not a live handle of that kind.
bool remove_handle(const void* handle, Kind kind);
bool is_handle(const void* handle, Kind kind);
// "a stream", "not a handle", ... for messages.
std::string describe_handle(const void* handle);
std::string live_handles_json();

}  // namespace sim
