// Device memory: blocks are reused in the order of their stream; each graph pool keeps its own.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

namespace asynccpu {

c10::DeviceAllocator& allocator();

void hold_pool(c10::MempoolId_t pool); // one more graph allocates, or allocated, from this pool
void release_pool(c10::MempoolId_t pool); // one graph less; with the last, the pool's free blocks leave with the cache

bool is_pinned(const void* pointer);

} // namespace asynccpu
