// A torch built for another accelerator has registered settings of its allocator under names that torch_npu registers
// too, which ends the process: forgotten before torch_npu is loaded. No machine with an NPU runs such a build of torch.
#include <c10/core/AllocatorConfig.h>

extern "C" void ascendsim_forget_shared_settings() {
  for (auto name : {"backend", "graph_capture_record_stream_reuse", "per_process_memory_fraction",
                    "pinned_num_register_threads", "pinned_reserve_segment_size_mb"})
    c10::CachingAllocator::AcceleratorAllocatorConfig::getMutableKeys().erase(name);
}
