#include "limits.h"

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace sim {

namespace {

struct Row {
  const char* name;
  const char* rule;
  const char* source;
};

// Sources: "runtime" is hicann/runtime at 681ef76 (2026-08-22), "ops-transformer" is hicann/ops-transformer at c29bc10
// (2025-11-15), "op-plugin's document" is docs/zh/custom_APIs/torch_npu/torch_npu-npu_fused_infer_attention_score.md of
// Ascend/op-plugin at 517f2e7 (2026-08-21). Where two of them differ, the row has the
// stricter rule and names both.
constexpr std::array<Row, static_cast<size_t>(Limit::count)> kRows{{
    {"fia-dtype", "layout TND: query, key and value are bfloat16",
     "ops-transformer prompt_flash_attention_tiling.cpp:3814; op-plugin's document also has float16"},
    {"fia-head-dim", "layout TND without rope: head_dim 128, or 192 with value head_dim 128, or 192 for both without "
                     "grouped heads; with rope: 128 and 64",
     "op-plugin's document, TND section; ops-transformer prompt_flash_attention_tiling.cpp:3800 also has 64"},
    {"fia-block-size", "layout TND with a block table: block_size a multiple of 128, at most 512",
     "ops-transformer prompt_flash_attention_tiling.cpp:2053 (up to 1024); op-plugin's document, block_size (up to 512)"},
    {"fia-mask", "layout TND: sparse_mode 0 without a mask, or 3 or 4 with a mask of 2048 x 2048; 4 with a value "
                 "head_dim of 64 or 128",
     "ops-transformer prompt_flash_attention_tiling.cpp:4910 to 4920, incre_flash_attention_tiling_check.cpp:1353"},
    {"fia-lengths", "layout TND: at most 4096 sequences; sparse_mode 3: no sequence with keys has more query rows than keys",
     "ops-transformer prompt_flash_attention_tiling.cpp:4275 and :4969. Since CANN 8.5.0 another path, which compares no "
     "lengths, takes these shapes (IsUsingFAI in fused_infer_attention_score_tiling.cpp at cf59d0d; vllm-ascend #6076 has "
     "an error of it), and its kernel writes the rows of a sequence without keys (flash_attention_regular.h)"},
    {"fia-latent", "query head_dim 512: rope of 64, 1 key head, 1 to 128 query heads in powers of 2, block_size 16 or "
                   "128, float16 or bfloat16, no log-sum-exp",
     "ops-transformer incre_flash_attention_tiling_check.cpp:1764 and :1803; op-plugin's document, MLA section"},
    {"fia-sink", "layout TND: learnable_sink is bfloat16, one per query head, with a value head_dim of 128",
     "ops-transformer prompt_flash_attention_tiling.cpp:3649 also has 64; op-plugin's document of "
     "npu_fused_infer_attention_score_v2, learnable_sink"},
    {"atb-paged", "ATB paged attention: float16 or bfloat16, block_size a multiple of 16, head_size at most 256, head_size * "
                  "block_size at most 128 * 128",
     "CANN 8.5 ascendtb_01_0202 (dtypes, context_lens on the host), CANN 8.0.RC2 ascendtb_01_0070 (sizes)"},
    {"atb-rope", "ATB rotary embedding: query and key float16 or bfloat16, cos and sin likewise (or float32 for float16), "
                 "heads of 16 to 4096",
     "hicann/ascend-transformer-boost at ddcc8b6, rope_operation.cpp and ops_configs/atb_ops_info.ini"},
    {"atb-cache", "ATB cache write: rows and caches float16 or bfloat16 (or int8), slots int32, none twice",
     "hicann/ascend-transformer-boost at ddcc8b6, ops_configs/atb_ops_info.ini; two rows of one slot are a race"},
    {"cache-write", "npu_scatter_pa_kv_cache: rows and caches are bfloat16 or float16 (or int8), dense, of one dtype; "
                    "no slot twice",
     "aclnnScatterPaKvCache.md of hicann/ops-transformer at 107749e, Atlas A2 and A3; op-plugin's document of "
     "npu_scatter_pa_kv_cache"},
    {"top-k", "npu_top_k_top_p: k from 1 to 1024, or the whole vocabulary",
     "op-plugin's document of npu_top_k_top_p; aclnnApplyTopKTopP.md of hicann/ops-nn at 0c8fd4c takes any"},
    {"group-kernels-only", "a task group holds kernels of cube and vector cores only, no copies, events or host calls",
     "runtime src/runtime/core/src/stream/stream.cc:5189"},
    {"group-other-streams", "while a task group is open, the capture's other streams take no task",
     "runtime src/runtime/feature/aclgraph/stream_capture.cc:84, docs/zh/dev_guide/04-03_task_update.md"},
    {"group-prefetch", "each task group adds 8 empty tasks to its stream",
     "runtime src/runtime/feature/aclgraph/context_aclgraph.cc:793, config/910_B_93/dev_info_reg.cc:177"},
    {"update-kernel-types", "a task update compares the kernels' core types, not their names",
     "runtime src/runtime/core/src/launch/aix_stars.cc:165"},
    {"capture-outside-event", "in capture, a wait for an event that was recorded outside of it is refused",
     "runtime src/runtime/api/impl/api_impl.cc:1654"},
    {"capture-cascade", "a captured stream of more than 2048 - 32 tasks takes a further stream of the device",
     "runtime src/runtime/feature/aclgraph/stream_capture.cc:87, config/910_B_93/dev_info_reg.cc:257"},
    {"external-event-host", "external events are not queried, waited for by the host, or timed",
     "runtime src/runtime/api/impl/api_error.cc:1777"},
    {"replay-device", "a graph is replayed while its device is current, on a stream of that device",
     "runtime src/runtime/api/impl/api_impl.cc:4413"},
}};

std::array<std::atomic<bool>, static_cast<size_t>(Limit::count)>& states() {
  static auto* made = new std::array<std::atomic<bool>, static_cast<size_t>(Limit::count)>;
  return *made;
}

void start() {
  static bool once = [] {
    for (auto& state : states()) state = true;
    if (const char* names = getenv("ASCENDSIM_LENIENT")) {
      std::stringstream list(names);
      for (std::string name; std::getline(list, name, ',');) set_limit(name, false);
    }
    return true;
  }();
  (void)once;
}

}  // namespace

bool is_on(Limit limit) {
  start();
  return states()[static_cast<size_t>(limit)];
}

std::string by_limit(Limit limit, const std::string& why) {
  auto& row = kRows[static_cast<size_t>(limit)];
  return why + " (limit '" + row.name + "': " + row.source + ")";
}

bool set_limit(const std::string& name, bool on) {
  bool found = name == "all";
  for (size_t i = 0; i < kRows.size(); i++)
    if (name == "all" || name == kRows[i].name) states()[i] = on, found = true;
  return found;
}

std::string limits_json() {
  start();
  std::string text = "[";
  for (size_t i = 0; i < kRows.size(); i++)
    text += std::string(i ? ", " : "") + "{\"name\": \"" + kRows[i].name + "\", \"rule\": \"" + kRows[i].rule +
            "\", \"source\": \"" + kRows[i].source + "\", \"on\": " + (states()[i] ? "true" : "false") + "}";
  return text + "]";
}

}  // namespace sim

extern "C" {

// 0, or -1 when there is no row of that name. `on` 0 turns the row off.
int ascendsim_limit(const char* name, int on) {
  sim::is_on(sim::Limit::fia_dtype);  // reads the environment first
  return sim::set_limit(name, on != 0) ? 0 : -1;
}

}  // extern "C"
