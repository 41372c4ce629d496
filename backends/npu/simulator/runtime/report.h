// Errors in words, a counter for each API call, and the list of protocol violations.
#pragma once

#include <atomic>
#include <string>

#include "../abi/acl.h"

namespace sim {

// Remember `message` as what aclGetRecentErrMsg answers, and return `code`.
aclError fail(acl::Code code, const std::string& message);

// A breach of the capture/update protocol that a real device would answer with wrong tokens or a hang.
// Kept in the report.
void violation(const std::string& message);

struct Counter {
  explicit Counter(const char* name);
  const char* name;
  std::atomic<long> calls{0};
};

struct Settings {
  std::atomic<bool> trace{false};
  std::atomic<double> hang_seconds{20};
  std::atomic<unsigned long> seed{0};
  std::atomic<int> delay_us{0};       // upper bound of one random delay
  std::atomic<int> delay_percent{0};  // share of tasks that are delayed
  int devices = 1;
  int streams = 1984;                 // a device's stream budget, captured graphs included
  long memory_mib = 4096;             // per device
  std::string soc = "Ascend910B3";
};
Settings& settings();

// hang_seconds times the machine's load per core: a process that waits for a core is not taken for a hang.
double patience();

}  // namespace sim

#define SIM_API(name)                  \
  static sim::Counter counter_(#name); \
  counter_.calls++
