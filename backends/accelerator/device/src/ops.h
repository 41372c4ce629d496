// Ops of the device: torch's own CPU kernels, run by the thread of a stream on device memory.
#pragma once

#include <c10/core/StorageImpl.h>

namespace asynccpu {

// Gives a storage `bytes` bytes; what it held is copied in stream order.
void resize_storage(c10::StorageImpl& storage, size_t bytes);

} // namespace asynccpu
