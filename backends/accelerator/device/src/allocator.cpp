#include "allocator.h"

#include "capture.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <unistd.h>

#include <cstdlib>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

namespace asynccpu {
namespace {

constexpr size_t kAlign = 512;

size_t rounded(size_t bytes) {
  return std::max(kAlign, (bytes + kAlign - 1) / kAlign * kAlign);
}

struct Block {
  void* address;
  size_t size;
  c10::DeviceIndex device;
  Queue* stream; // whose order makes reuse safe
  c10::MempoolId_t pool; // {0, 0}: of no graph
  std::set<Queue*> other_streams; // from recordStream
  std::vector<std::shared_ptr<Mark>> marks; // on those, once the block is dropped
};

// Free blocks of one stream in one pool, by size
using Shelf = std::multimap<size_t, Block*>;

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    if (bytes == 0) {
      return {nullptr, nullptr, &drop, c10::Device(kDevice, device)};
    }
    auto& stream = current_queue();
    const auto recording = stream.recording();
    const c10::MempoolId_t pool = recording ? recording->pool : c10::MempoolId_t{0, 0};
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_pending();
    Block* block = take(shelf(pool, &stream), rounded(bytes));
    if (!block) {
      block = make(rounded(bytes), device, &stream, pool);
    }
    auto& stats = stats_[device];
    stats.allocation[0].increase(1);
    stats.allocated_bytes[0].increase(block->size);
    stats.active[0].increase(1);
    stats.active_bytes[0].increase(block->size);
    return {block->address, block, &drop, c10::Device(kDevice, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr; // the context of a DataPtr is a Block, not the address
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    submit(current_queue(), [=](const Draw&) { std::memcpy(to, from, bytes); });
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    refuse_in_capture(nullptr, "giving memory back to the system");
    drain_everything(); // as a device's own free call does
    std::lock_guard<std::mutex> lock(mutex_);
    take_back_pending();
    for (auto it = pools_.begin(); it != pools_.end();) {
      auto& [id, pool] = *it;
      if (!pool.graphs) {
        for (auto& [stream, free] : pool.shelves) {
          for (auto& [size, block] : free) {
            give_back(block);
          }
          free.clear();
        }
      }
      it = !pool.graphs && !pool.live ? pools_.erase(it) : std::next(it);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    auto* block = static_cast<Block*>(pointer.get_context());
    if (!block) {
      return;
    }
    TORCH_CHECK(pointer.get_deleter() == &drop, "asynccpu: record_stream of memory that this device didn't allocate");
    auto& other = queue(stream.device_index(), stream.id());
    std::lock_guard<std::mutex> lock(mutex_);
    if (&other != block->stream) {
      block->other_streams.insert(&other);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_[device];
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all(device)) {
      stat->reset_accumulated();
    }
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all(device)) {
      stat->reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t used = stats_[device].reserved_bytes[0].current;
    return {total() - std::min(total(), used), total()};
  }

  void hold(c10::MempoolId_t pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pools_[pool].graphs;
  }

  void release(c10::MempoolId_t pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    --pools_[pool].graphs;
  }

 private:
  struct Pool {
    size_t graphs = 0; // that allocate, or allocated, from it; their replays write its free blocks too
    size_t live = 0; // blocks that a tensor holds
    std::map<Queue*, Shelf> shelves;
  };

  static void drop(void* context);

  static size_t total() {
    static const size_t bytes = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
    return bytes;
  }

  std::vector<c10::CachingAllocator::Stat*> all(c10::DeviceIndex device) {
    auto& stats = stats_[device];
    return {&stats.allocation[0], &stats.allocated_bytes[0], &stats.active[0], &stats.active_bytes[0],
            &stats.reserved_bytes[0], &stats.segment[0]};
  }

  Shelf& shelf(c10::MempoolId_t pool, Queue* stream) {
    return pools_[pool].shelves[stream];
  }

  // The smallest free block that fits and wastes at most half of itself; null if there is none.
  Block* take(Shelf& free, size_t size) {
    const auto found = free.lower_bound(size);
    if (found == free.end() || found->first > 2 * size) {
      return nullptr;
    }
    auto* block = found->second;
    free.erase(found);
    ++pools_[block->pool].live;
    return block;
  }

  Block* make(size_t size, c10::DeviceIndex device, Queue* stream, c10::MempoolId_t pool) {
    auto& stats = stats_[device];
    const bool fits = size <= total() - std::min<size_t>(total(), stats.reserved_bytes[0].current);
    void* address = fits ? std::aligned_alloc(kAlign, size) : nullptr;
    if (!address) {
      stats.num_ooms += 1;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "asynccpu: out of memory: ", size, " bytes were asked for, ",
                       stats.reserved_bytes[0].current, " of ", total(), " are reserved");
    }
    stats.segment[0].increase(1);
    stats.reserved_bytes[0].increase(size);
    ++pools_[pool].live;
    return new Block{address, size, device, stream, pool, {}, {}};
  }

  void put_back(Block* block) { // the lock is held
    auto& pool = pools_[block->pool];
    --pool.live;
    stats_[block->device].active[0].decrease(1);
    stats_[block->device].active_bytes[0].decrease(block->size);
    pool.shelves[block->stream].emplace(block->size, block);
  }

  void give_back(Block* block) {
    auto& stats = stats_[block->device];
    stats.segment[0].decrease(1);
    stats.reserved_bytes[0].decrease(block->size);
    std::free(block->address);
    delete block;
  }

  // Dropped blocks that other streams used: reused once those have passed the point of the drop.
  void take_back_pending() {
    for (auto it = pending_.begin(); it != pending_.end();) {
      auto* block = *it;
      for (auto stream = block->other_streams.begin(); stream != block->other_streams.end();) {
        if ((*stream)->recording()) { // its later work, in replays, is not known yet
          ++stream;
          continue;
        }
        block->marks.push_back((*stream)->mark());
        stream = block->other_streams.erase(stream);
      }
      bool is_free = block->other_streams.empty();
      for (const auto& mark : block->marks) {
        is_free = is_free && mark->is_reached();
      }
      if (is_free) {
        block->marks.clear();
        put_back(block);
        it = pending_.erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mutex mutex_;
  std::map<c10::MempoolId_t, Pool> pools_;
  std::list<Block*> pending_;
  std::unordered_map<c10::DeviceIndex, c10::CachingDeviceAllocator::DeviceStats> stats_;
};

Allocator& instance() {
  static auto* made = new Allocator();
  return *made;
}

void Allocator::drop(void* context) {
  auto* block = static_cast<Block*>(context);
  if (!block) {
    return;
  }
  auto& self = instance();
  std::lock_guard<std::mutex> lock(self.mutex_);
  auto& stats = self.stats_[block->device];
  stats.allocation[0].decrease(1);
  stats.allocated_bytes[0].decrease(block->size);
  if (block->other_streams.empty()) {
    self.put_back(block);
  } else {
    self.pending_.push_back(block);
  }
}

// Pinned memory. A queued copy holds the storage it reads or writes, so memory that comes back here is unused.
class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* address = bytes ? std::aligned_alloc(kAlign, rounded(bytes)) : nullptr;
    TORCH_CHECK_WITH(OutOfMemoryError, address || !bytes, "asynccpu: out of host memory: ", bytes, " bytes");
    if (address) {
      std::lock_guard<std::mutex> lock(mutex_);
      ranges_[address] = bytes;
    }
    return {address, address, &drop, c10::Device(c10::kCPU)};
  }

  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = ranges_.upper_bound(const_cast<void*>(pointer));
    if (after == ranges_.begin()) {
      return false;
    }
    --after;
    return static_cast<const char*>(pointer) < static_cast<const char*>(after->first) + after->second;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &drop;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void drop(void* address);

  std::mutex mutex_;
  std::map<void*, size_t> ranges_;
};

HostAllocator& pinned() {
  static auto* made = new HostAllocator();
  return *made;
}

void HostAllocator::drop(void* address) {
  if (address) {
    auto& self = pinned();
    std::lock_guard<std::mutex> lock(self.mutex_);
    self.ranges_.erase(address);
    std::free(address);
  }
}

} // namespace

c10::DeviceAllocator& allocator() {
  return instance();
}

void hold_pool(c10::MempoolId_t pool) {
  instance().hold(pool);
}

void release_pool(c10::MempoolId_t pool) {
  instance().release(pool);
}

bool is_pinned(const void* pointer) {
  return pinned().holds(pointer);
}

namespace {
REGISTER_ALLOCATOR(kDevice, &instance())
REGISTER_HOST_ALLOCATOR(kDevice, &pinned())
} // namespace

} // namespace asynccpu
