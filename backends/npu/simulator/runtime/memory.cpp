#include "memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "capture.h"
#include "report.h"
#include "scheduler.h"

namespace sim {

namespace {

constexpr size_t kAlign = 512;
constexpr int kPoison = 0xFF;  // fresh memory reads as NaN, or -1

struct Arena {
  char* device = nullptr;  // no access: what callers hold
  char* access = nullptr;  // readable: what kernels use
  int file = -1;
  size_t size = 0;
  size_t used = 0;
  std::mutex mutex;
  std::map<size_t, size_t> live;  // offset -> bytes asked for
  std::map<size_t, size_t> free;  // offset -> bytes
};

std::vector<std::unique_ptr<Arena>>& arenas();

struct sigaction previous_segv;
void on_segv(int signal, siginfo_t* info, void* context) {
  for (auto& arena : arenas()) {
    auto* at = static_cast<char*>(info->si_addr);
    if (arena->device <= at && at < arena->device + arena->size) {
      static const char text[] =
          "[simulated Ascend runtime] the host read or wrote device memory directly; copy it with aclrtMemcpy\n";
      (void)!write(2, text, sizeof text - 1);
      break;
    }
  }
  if (previous_segv.sa_flags & SA_SIGINFO) return previous_segv.sa_sigaction(signal, info, context);
  sigaction(SIGSEGV, &previous_segv, nullptr);  // the faulting access runs again and ends the process
}

std::vector<std::unique_ptr<Arena>>& arenas() {
  static auto* made = [] {
    auto* list = new std::vector<std::unique_ptr<Arena>>;
    for (int device = 0; device < settings().devices; device++) {
      auto arena = std::make_unique<Arena>();
      arena->size = static_cast<size_t>(settings().memory_mib) << 20;
      arena->file = memfd_create("ascendsim-device", MFD_CLOEXEC);
      void* device_side = MAP_FAILED;
      void* access_side = MAP_FAILED;
      if (arena->file >= 0 && ftruncate(arena->file, static_cast<off_t>(arena->size)) == 0) {
        device_side = mmap(nullptr, arena->size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, arena->file, 0);
        access_side = mmap(nullptr, arena->size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena->file, 0);
      }
      if (device_side == MAP_FAILED || access_side == MAP_FAILED) {
        perror("[simulated Ascend runtime] device memory");
        abort();
      }
      arena->device = static_cast<char*>(device_side);
      arena->access = static_cast<char*>(access_side);
      arena->free[0] = arena->size;
      list->push_back(std::move(arena));
    }
    return list;
  }();
  static bool once = [] {
    struct sigaction action {};
    action.sa_sigaction = on_segv;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &previous_segv);
    return true;
  }();
  (void)once;
  return *made;
}

struct HostBlocks {
  std::mutex mutex;
  std::map<uintptr_t, size_t> live;
};
HostBlocks& host_blocks() {
  static auto* blocks = new HostBlocks;
  return *blocks;
}

aclError device_malloc(void** out, size_t bytes) {
  if (!out || !bytes) return fail(acl::kInvalidParam, "a device allocation of 0 bytes");
  auto& arena = *arenas()[current_device()];
  size_t need = (bytes + 32 + kAlign - 1) / kAlign * kAlign;
  std::lock_guard lock(arena.mutex);
  for (auto it = arena.free.begin(); it != arena.free.end(); ++it) {
    if (it->second < need) continue;
    size_t offset = it->first, left = it->second - need;
    arena.free.erase(it);
    if (left) arena.free[offset + need] = left;
    arena.live[offset] = bytes;
    arena.used += need;
    memset(arena.access + offset, kPoison, need);
    *out = arena.device + offset;
    return acl::kSuccess;
  }
  return fail(acl::kOutOfMemory, "device " + std::to_string(current_device()) + " has no " + std::to_string(bytes) +
                                     " bytes in one piece: " + std::to_string(arena.used) + " of " +
                                     std::to_string(arena.size) + " are in use");
}

aclError device_free(void* address) {
  int device = device_of(address);
  if (device < 0) return fail(acl::kInvalidParam, "aclrtFree of an address that is not device memory");
  auto& arena = *arenas()[device];
  std::lock_guard lock(arena.mutex);
  size_t offset = static_cast<char*>(address) - arena.device;
  auto found = arena.live.find(offset);
  if (found == arena.live.end()) return fail(acl::kInvalidParam, "aclrtFree of an address that is not allocated");
  size_t bytes = (found->second + 32 + kAlign - 1) / kAlign * kAlign;
  arena.live.erase(found);
  arena.used -= bytes;
  auto it = arena.free.emplace(offset, bytes).first;
  if (auto next = std::next(it); next != arena.free.end() && offset + it->second == next->first) {
    it->second += next->second;
    arena.free.erase(next);
  }
  if (it != arena.free.begin()) {
    auto before = std::prev(it);
    if (before->first + before->second == it->first) {
      before->second += it->second;
      arena.free.erase(it);
    }
  }
  size_t page = 4096, first = (offset + page - 1) / page * page, last = (offset + bytes) / page * page;
  if (first < last) fallocate(arena.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, first, last - first);
  return acl::kSuccess;
}

aclError host_malloc(void** out, size_t bytes) {
  if (posix_memalign(out, 4096, bytes ? bytes : 1)) return fail(acl::kOutOfMemory, "no pinned host memory");
  std::lock_guard lock(host_blocks().mutex);
  host_blocks().live[reinterpret_cast<uintptr_t>(*out)] = bytes;
  return acl::kSuccess;
}

bool pinned(const void* address) {
  std::lock_guard lock(host_blocks().mutex);
  auto at = reinterpret_cast<uintptr_t>(address);
  auto it = host_blocks().live.upper_bound(at);
  return it != host_blocks().live.begin() && at < std::prev(it)->first + std::prev(it)->second;
}

// Empty when a copy of that kind may touch these addresses, else what is wrong.
std::string check_copy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  if (bytes > room) return "copies " + std::to_string(bytes) + " bytes into " + std::to_string(room);
  bool to_device = kind == acl::kHostToDevice || kind == acl::kDeviceToDevice;
  bool from_device = kind == acl::kDeviceToHost || kind == acl::kDeviceToDevice;
  if (bytes && to_device != device_range(to, bytes))
    return to_device ? "its destination is no live device memory" : "its destination is device memory";
  if (bytes && from_device != device_range(from, bytes))
    return from_device ? "its source is no live device memory" : "its source is device memory";
  return "";
}

}  // namespace

int device_of(const void* address) {
  auto& list = arenas();
  for (size_t i = 0; i < list.size(); i++) {
    auto* at = static_cast<const char*>(address);
    if (list[i]->device <= at && at < list[i]->device + list[i]->size) return static_cast<int>(i);
  }
  return -1;
}

bool device_range(const void* address, size_t bytes) {
  int device = device_of(address);
  if (device < 0) return false;
  auto& arena = *arenas()[device];
  size_t offset = static_cast<const char*>(address) - arena.device;
  std::lock_guard lock(arena.mutex);
  auto it = arena.live.upper_bound(offset);
  if (it == arena.live.begin()) return false;
  --it;
  return offset + bytes <= it->first + it->second;
}

void* view(const void* address) {
  int device = device_of(address);
  if (device < 0) return const_cast<void*>(address);
  auto& arena = *arenas()[device];
  return arena.access + (static_cast<const char*>(address) - arena.device);
}

size_t device_bytes_total(int device) { return arenas()[device]->size; }
size_t device_bytes_used(int device) {
  std::lock_guard lock(arenas()[device]->mutex);
  return arenas()[device]->used;
}

std::string device_bytes_json() {
  std::string text = "[";
  for (size_t i = 0; i < arenas().size(); i++)
    text += (i ? ", " : "") + std::to_string(device_bytes_used(static_cast<int>(i)));
  return text + "]";
}

}  // namespace sim

using namespace sim;

extern "C" {

aclError aclrtMalloc(void** out, size_t bytes, int) {
  SIM_API(aclrtMalloc);
  return device_malloc(out, bytes);
}
aclError aclrtMallocAlign32(void** out, size_t bytes, int) {
  SIM_API(aclrtMallocAlign32);
  return device_malloc(out, bytes);
}
aclError aclrtFree(void* address) {
  SIM_API(aclrtFree);
  return device_free(address);
}
aclError aclrtMallocHost(void** out, size_t bytes) {
  SIM_API(aclrtMallocHost);
  return host_malloc(out, bytes);
}
aclError aclrtMallocHostWithCfg(void** out, uint64_t bytes, void*) {
  SIM_API(aclrtMallocHostWithCfg);
  return host_malloc(out, bytes);
}
aclError aclrtFreeHost(void* address) {
  SIM_API(aclrtFreeHost);
  {
    std::lock_guard lock(host_blocks().mutex);
    if (!host_blocks().live.erase(reinterpret_cast<uintptr_t>(address)))
      return fail(acl::kInvalidParam, "aclrtFreeHost of an address that is not allocated");
  }
  free(address);
  return acl::kSuccess;
}
aclError aclrtGetMemInfo(int, size_t* free, size_t* total) {
  SIM_API(aclrtGetMemInfo);
  *total = device_bytes_total(current_device());
  *free = *total - device_bytes_used(current_device());
  return acl::kSuccess;
}
aclError aclrtPointerGetAttributes(const void* address, acl::PointerAttributes* out) {
  SIM_API(aclrtPointerGetAttributes);
  *out = {};
  int device = device_of(address);
  out->location_id = device < 0 ? 0 : static_cast<uint32_t>(device);
  out->location_type = device >= 0        ? acl::kLocationDevice
                       : pinned(address) ? acl::kLocationHost
                                         : acl::kLocationUnregistered;
  return acl::kSuccess;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  SIM_API(aclrtMemcpy);
  if (auto why = forbidden_in_capture(); !why.empty()) return fail(acl::kCaptureModeForbids, "aclrtMemcpy: " + why);
  if (auto why = check_copy(to, room, from, bytes, kind); !why.empty())
    return fail(acl::kInvalidParam, "aclrtMemcpy: " + why);
  memmove(view(to), view(from), bytes);
  return acl::kSuccess;
}
aclError aclrtMemset(void* at, size_t room, int32_t value, size_t bytes) {
  SIM_API(aclrtMemset);
  if (auto why = forbidden_in_capture(); !why.empty()) return fail(acl::kCaptureModeForbids, "aclrtMemset: " + why);
  if (bytes > room || !device_range(at, bytes)) return fail(acl::kInvalidParam, "aclrtMemset: no live device memory");
  memset(view(at), value, bytes);
  return acl::kSuccess;
}
aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind, aclrtStream stream) {
  static const char* names[] = {"copy host to host", "copy host to device", "copy device to host",
                                "copy device to device"};
  SIM_API(aclrtMemcpyAsync);
  if (kind < 0 || kind > 3) return fail(acl::kInvalidParam, "aclrtMemcpyAsync: kind " + std::to_string(kind));
  if (auto why = check_copy(to, room, from, bytes, kind); !why.empty())
    return fail(acl::kInvalidParam, "aclrtMemcpyAsync: " + why);
  if (kind == acl::kHostToDevice) { SIM_API(copy_host_to_device); }
  if (kind == acl::kDeviceToHost) { SIM_API(copy_device_to_host); }
  if (kind == acl::kDeviceToDevice) { SIM_API(copy_device_to_device); }
  bool host_side = kind == acl::kHostToDevice || kind == acl::kDeviceToHost;
  if (host_side && is_capturing(stream) && !pinned(kind == acl::kHostToDevice ? from : to))
    return fail(acl::kCaptureModeForbids,
                "aclrtMemcpyAsync in capture with pageable host memory: the graph would keep a dangling address");
  return enqueue(stream, {names[kind], [=] { memmove(view(to), view(from), bytes); }});
}
aclError aclrtMemsetAsync(void* at, size_t room, int32_t value, size_t bytes, aclrtStream stream) {
  SIM_API(aclrtMemsetAsync);
  if (bytes > room || !device_range(at, bytes))
    return fail(acl::kInvalidParam, "aclrtMemsetAsync: no live device memory");
  return enqueue(stream, {"memset", [=] { memset(view(at), value, bytes); }});
}

}  // extern "C"
