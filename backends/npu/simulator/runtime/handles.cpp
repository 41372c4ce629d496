#include "handles.h"

#include <array>
#include <mutex>
#include <unordered_map>

namespace sim {

namespace {
struct Table {
  std::mutex mutex;
  std::unordered_map<const void*, Kind> live;
  std::array<long, static_cast<size_t>(Kind::count)> count{};
};
Table& table() {
  static auto* table = new Table;
  return *table;
}
}  // namespace

const char* kind_name(Kind kind) {
  static const char* names[] = {"context", "stream", "event", "graph", "task_group", "tensor", "scalar", "int_array",
                                "float_array", "bool_array", "tensor_list", "scalar_list", "executor"};
  return names[static_cast<size_t>(kind)];
}

void add_handle(const void* handle, Kind kind) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  t.live[handle] = kind;
  t.count[static_cast<size_t>(kind)]++;
}

bool remove_handle(const void* handle, Kind kind) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  auto found = t.live.find(handle);
  if (found == t.live.end() || found->second != kind) return false;
  t.live.erase(found);
  t.count[static_cast<size_t>(kind)]--;
  return true;
}

bool is_handle(const void* handle, Kind kind) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  auto found = t.live.find(handle);
  return found != t.live.end() && found->second == kind;
}

std::string describe_handle(const void* handle) {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  auto found = t.live.find(handle);
  return found == t.live.end() ? "no live handle" : std::string("a handle of kind ") + kind_name(found->second);
}

std::string live_handles_json() {
  auto& t = table();
  std::lock_guard lock(t.mutex);
  std::string text = "{";
  for (size_t i = 0; i < t.count.size(); i++)
    text += std::string(i ? ", " : "") + "\"" + kind_name(static_cast<Kind>(i)) + "\": " + std::to_string(t.count[i]);
  return text + "}";
}

}  // namespace sim
