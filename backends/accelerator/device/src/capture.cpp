#include "capture.h"

#include "allocator.h"
#include "random.h"

#include <ATen/core/GraphImplInterface.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <fstream>
#include <string>

namespace asynccpu {
namespace {

thread_local std::shared_ptr<Recording> capture_of_this_thread;

} // namespace

std::shared_ptr<Recording> capture_here() {
  return capture_of_this_thread;
}

void Recording::add(Queue* stream, Work work, bool draws) {
  std::lock_guard<std::mutex> lock(mutex_);
  nodes.push_back({std::move(work), num_draws});
  num_draws += draws;
  known_[stream][stream] = ++counts_[stream];
}

Frontier Recording::frontier(Queue* stream) {
  std::lock_guard<std::mutex> lock(mutex_);
  return known_[stream];
}

void Recording::join(Queue* stream, const Frontier& known) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto& own = known_[stream];
  for (const auto& [other, count] : known) {
    own[other] = std::max(own[other], count);
  }
}

bool Recording::is_joined() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [stream, count] : counts_) {
    if (known_[origin][stream] < count) {
      return false;
    }
  }
  return true;
}

void Recording::refuse(const std::string& what) {
  const auto why = "asynccpu: " + what + " is not permitted when stream is capturing";
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (refused_.empty()) {
      refused_ = why;
    }
  }
  TORCH_CHECK(false, why);
}

std::string Recording::refused() {
  std::lock_guard<std::mutex> lock(mutex_);
  return refused_;
}

void Recording::finish() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [stream, known] : known_) {
    stream->set_recording(nullptr);
  }
  origin->set_recording(nullptr);
}

void submit(Queue& stream, Work work, bool draws) {
  if (auto recording = stream.recording()) {
    recording->add(&stream, std::move(work), draws);
    return;
  }
  const Draw draw = draws ? take_draws(current_device(), 1) : Draw{};
  stream.push([work = std::move(work), draw] { work(draw); });
}

namespace {

std::atomic<c10::CaptureId_t> next_pool{1};

// torch.accelerator.Graph on this device.
class Graph final : public at::GraphImplInterface {
 public:
  explicit Graph(const at::GraphImplArgs& args) : keep_graph_(args.keep_graph) {}

  ~Graph() override {
    reset();
  }

  void capture_begin(c10::MempoolId_t pool, at::GraphCaptureMode mode) override {
    TORCH_CHECK(mode != at::GraphCaptureMode::Global && mode != at::GraphCaptureMode::Relaxed,
                "asynccpu: the capture modes of this device are 'default' and 'thread_local', which are the same");
    TORCH_CHECK(!recording_ && !nodes_, "asynccpu: this graph holds a capture already");
    TORCH_CHECK(!capture_here(), "asynccpu: this thread is capturing already");
    auto& stream = current_queue();
    TORCH_CHECK(!stream.recording(), "asynccpu: the stream is being captured by another thread");
    if (pool == c10::MempoolId_t{0, 0}) {
      pool = {next_pool++, 0};
    }
    device_ = current_device();
    recording_ = std::make_shared<Recording>(&stream, pool);
    stream.set_recording(recording_);
    capture_of_this_thread = recording_;
    hold_pool(pool);
  }

  void capture_end() override {
    TORCH_CHECK(recording_, "asynccpu: there is no capture to end");
    const auto recording = std::exchange(recording_, nullptr);
    const bool is_origin = recording->origin == &current_queue(), is_joined = recording->is_joined();
    const auto refused = recording->refused();
    recording->finish();
    capture_of_this_thread = nullptr;
    if (!is_origin || !is_joined || !refused.empty()) {
      release_pool(recording->pool);
      TORCH_CHECK(is_origin, "asynccpu: a capture ends on the stream on which it began");
      TORCH_CHECK(refused.empty(), "asynccpu: a refusal invalidated the capture: ", refused);
      TORCH_CHECK(is_joined, "asynccpu: the capture has work on a stream that was never joined to its own");
    }
    if (recording->nodes.empty()) {
      TORCH_WARN("asynccpu: the captured graph is empty");
    }
    pool_ = recording->pool;
    num_draws_ = recording->num_draws;
    nodes_ = std::make_shared<const std::vector<Recording::Node>>(std::move(recording->nodes));
    is_ready_ = !keep_graph_;
  }

  void instantiate() override {
    TORCH_CHECK(nodes_, "asynccpu: capture before instantiate()");
    is_ready_ = true;
  }

  // The nodes run one after the other, in the order in which they were issued.
  void replay() override {
    TORCH_CHECK(nodes_, "asynccpu: replay of a graph without a capture");
    TORCH_CHECK(current_device() == device_, "asynccpu: a graph of another device");
    is_ready_ = true;
    auto& stream = current_queue();
    TORCH_CHECK(!stream.recording(), "asynccpu: replay of a graph is not permitted when stream is capturing");
    const Draw base = take_draws(device_, num_draws_);
    stream.push([nodes = nodes_, base] {
      for (const auto& node : *nodes) {
        node.work({base.seed, base.number + node.draw});
      }
    });
  }

  void reset() override {
    if (recording_) { // a capture that never ended
      recording_->finish();
      capture_of_this_thread = nullptr;
      release_pool(recording_->pool);
      recording_ = nullptr;
    }
    if (nodes_) {
      nodes_ = nullptr;
      release_pool(pool_);
    }
    is_ready_ = false;
  }

  c10::MempoolId_t pool() const override {
    TORCH_CHECK(nodes_, "asynccpu: pool() of a graph without a capture");
    return pool_;
  }

  void enable_debug_mode() override {}

  void debug_dump(const std::string& path) override {
    TORCH_CHECK(nodes_, "asynccpu: debug_dump() of a graph without a capture");
    std::ofstream(path) << nodes_->size() << " nodes, " << num_draws_ << " of them random\n";
  }

 private:
  const bool keep_graph_;
  c10::DeviceIndex device_ = 0;
  std::shared_ptr<Recording> recording_;
  std::shared_ptr<const std::vector<Recording::Node>> nodes_;
  c10::MempoolId_t pool_{0, 0};
  uint64_t num_draws_ = 0;
  bool is_ready_ = false;
};

} // namespace
} // namespace asynccpu

namespace at {
// The name of the registration is what c10::DeviceTypeName gives for the renamed backend.
using AsyncCpuGraph = asynccpu::Graph;
REGISTER_GRAPH_IMPL(ASYNCCPU, AsyncCpuGraph)
} // namespace at
