// Random numbers: counter-based, so that an op's numbers depend on the seed and on how many random ops came before it.
#pragma once

#include "capture.h"

#include <ATen/core/Generator.h>

namespace asynccpu {

// Takes the next `count` draws of a device's default generator.
Draw take_draws(c10::DeviceIndex device, uint64_t count);

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// A generator of the CPU that gives the numbers of one draw.
at::Generator host_generator(const Draw& draw);

} // namespace asynccpu
