// What public sources say that a real device refuses, one row each. All rows are on by default; a test or a person may
// turn one off (ASCENDSIM_LENIENT, or ascendsim_limit) to run shapes or dtypes that only this simulation takes.
#pragma once

#include <string>

#include "../abi/acl.h"

namespace sim {

enum class Limit {
  fia_dtype,
  fia_head_dim,
  fia_block_size,
  fia_mask,
  fia_lengths,
  fia_latent,
  fia_sink,
  atb_paged,
  atb_rope,
  atb_cache,
  cache_write,
  top_k,
  group_kernels_only,
  group_other_streams,
  group_prefetch,
  update_kernel_types,
  capture_outside_event,
  capture_cascade,
  external_event_host,
  replay_device,
  count
};

bool is_on(Limit limit);
// `why`, with the row's name and source: for the message of a refusal.
std::string by_limit(Limit limit, const std::string& why);
// Turn one row, or "all", on or off; false when there is no such row.
bool set_limit(const std::string& name, bool on);
std::string limits_json();

}  // namespace sim
