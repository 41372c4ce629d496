#include "report.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include <unistd.h>

#include "handles.h"
#include "limits.h"
#include "memory.h"
#include "scheduler.h"

namespace sim {

namespace {
struct Log {
  std::mutex mutex;
  std::string message;
  std::vector<std::string> violations;
  std::map<std::string, Counter*> counters;
};
Log& log() {
  static auto* log = new Log;  // never destroyed: worker threads outlive static destructors
  return *log;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    if (c == '\n') out += "\\n";
    else if (static_cast<unsigned char>(c) >= 0x20) out += c;
  }
  return out + "\"";
}

long number(const char* name, long fallback) {
  const char* text = getenv(name);
  return text ? atol(text) : fallback;
}
}  // namespace

Settings& settings() {
  static auto* made = [] {
    auto* s = new Settings;
    s->trace = number("ASCENDSIM_TRACE", 0) != 0;
    s->hang_seconds = static_cast<double>(number("ASCENDSIM_HANG_SECONDS", 20));
    s->seed = static_cast<unsigned long>(number("ASCENDSIM_SEED", 0));
    s->delay_us = static_cast<int>(number("ASCENDSIM_DELAY_US", 0));
    s->delay_percent = static_cast<int>(number("ASCENDSIM_DELAY_PERCENT", 0));
    s->devices = static_cast<int>(number("ASCENDSIM_DEVICES", 1));
    s->streams = static_cast<int>(number("ASCENDSIM_STREAMS", 1984));
    s->memory_mib = number("ASCENDSIM_MEMORY_MIB", 4096);
    if (const char* soc = getenv("ASCENDSIM_SOC")) s->soc = soc;
    return s;
  }();
  return *made;
}

double patience() {
  double load = 0;
  long cores = sysconf(_SC_NPROCESSORS_ONLN);
  if (getloadavg(&load, 1) != 1 || cores < 1) load = 0;
  return settings().hang_seconds * std::max(1.0, load / static_cast<double>(std::max(cores, 1L)));
}

aclError fail(acl::Code code, const std::string& message) {
  std::lock_guard lock(log().mutex);
  log().message = "[simulated Ascend runtime] " + message;
  if (settings().trace) fprintf(stderr, "[ascendsim] error %d: %s\n", code, message.c_str());
  return code;
}

void violation(const std::string& message) {
  std::lock_guard lock(log().mutex);
  log().violations.push_back(message);
  if (settings().trace) fprintf(stderr, "[ascendsim] violation: %s\n", message.c_str());
}

Counter::Counter(const char* name) : name(name) {
  std::lock_guard lock(log().mutex);
  log().counters[name] = this;
}

}  // namespace sim

extern "C" {

const char* aclGetRecentErrMsg() {
  static thread_local std::string mine;
  std::lock_guard lock(sim::log().mutex);
  if (sim::log().message.empty()) return nullptr;
  mine = std::move(sim::log().message);
  sim::log().message.clear();
  return mine.c_str();
}

// ---- control, used by tests through ctypes ----

// Writes a JSON report into `out` (at most `size` bytes, NUL-terminated); returns the bytes it needs.
size_t ascendsim_report(char* out, size_t size) {
  std::string text = "{\"calls\": {";
  {
    std::lock_guard lock(sim::log().mutex);
    const char* comma = "";
    for (auto& [name, counter] : sim::log().counters) {
      text += std::string(comma) + sim::quoted(name) + ": " + std::to_string(counter->calls.load());
      comma = ", ";
    }
    text += "}, \"violations\": [";
    comma = "";
    for (auto& line : sim::log().violations) {
      text += comma + sim::quoted(line);
      comma = ", ";
    }
  }
  text += "], \"live\": " + sim::live_handles_json() + ", \"device_bytes\": " + sim::device_bytes_json() +
          ", \"streams_used\": " + sim::streams_used_json() + ", \"limits\": " + sim::limits_json() + "}";
  if (size) {
    strncpy(out, text.c_str(), size - 1);
    out[size - 1] = 0;
  }
  return text.size() + 1;
}

void ascendsim_reset_report() {
  std::lock_guard lock(sim::log().mutex);
  for (auto& [name, counter] : sim::log().counters) counter->calls = 0;
  sim::log().violations.clear();
}

void ascendsim_schedule(unsigned long seed, int delay_us, int delay_percent) {
  sim::settings().delay_us = delay_us;
  sim::settings().delay_percent = delay_percent;
  sim::settings().seed = seed;
  sim::reseed();
}

void ascendsim_hang_seconds(double seconds) { sim::settings().hang_seconds = seconds; }

// Called by the generated stubs: a function of the vendor's libraries that this runtime doesn't have.
aclError ascendsim_unsupported(const char* name) {
  return sim::fail(acl::kUnsupported, std::string(name) + " is not implemented");
}

}  // extern "C"
