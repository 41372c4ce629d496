// Graphs: what is issued to the streams of a capture is recorded as nodes, and run by each replay.
#pragma once

#include "stream.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace asynccpu {

// Where an op that draws random numbers takes them from. One draw is one op, whatever it fills.
struct Draw {
  uint64_t seed = 0;
  uint64_t number = 0;
};

using Work = std::function<void(const Draw&)>;

// How many nodes of each stream (by address) are known to come before a point.
using Frontier = std::map<Queue*, size_t>;

// A capture under way: nodes in the order in which they were issued, and which stream knows of which.
class Recording {
 public:
  struct Node {
    Work work;
    uint64_t draw = 0; // the number of its draw within the graph
  };

  Recording(Queue* origin, c10::MempoolId_t pool) : origin(origin), pool(pool) {}

  void add(Queue* stream, Work work, bool draws);
  Frontier frontier(Queue* stream); // of a stream that takes part
  void join(Queue* stream, const Frontier& known); // `stream` takes part, after the work that `known` names
  bool is_joined(); // whether the origin comes after all nodes
  // Raises RuntimeError: `what` is not permitted. The capture fails at its end, also where the caller swallows this.
  [[noreturn]] void refuse(const std::string& what);
  std::string refused(); // what the first refusal said; empty for none
  void finish(); // no stream takes part any longer

  Queue* const origin;
  const c10::MempoolId_t pool;
  std::vector<Node> nodes;
  uint64_t num_draws = 0;

 private:
  std::mutex mutex_;
  std::map<Queue*, size_t> counts_;
  std::map<Queue*, Frontier> known_;
  std::string refused_;
};

// Records work on `stream` if that is being captured, else runs it there. `draws`: it takes random numbers.
void submit(Queue& stream, Work work, bool draws = false);

std::shared_ptr<Recording> capture_here(); // the capture under way that this thread began, or null

} // namespace asynccpu
