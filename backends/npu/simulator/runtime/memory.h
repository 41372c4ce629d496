// Device memory that the host can't read: each device is one memory file mapped twice. The addresses given out lie in
// a mapping without any access right; kernels and copies use the other mapping.
#pragma once

#include <cstddef>
#include <string>

#include "../abi/acl.h"

namespace sim {

// The device that `address` belongs to, or -1 for host memory.
int device_of(const void* address);
// True when [address, address + bytes) lies in one live device allocation.
bool device_range(const void* address, size_t bytes);
// The runtime's own view of a device address; a host address comes back as it is.
void* view(const void* address);
std::string device_bytes_json();
size_t device_bytes_total(int device);
size_t device_bytes_used(int device);

}  // namespace sim
