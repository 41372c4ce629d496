"""The calls of torch_musa's binary module that act on the allocator's pools (2.7.1: csrc/core/Module.cpp:1278, 1284).

torch_musa's compiler integration uses both; at e205050 (2.11.0.post2) the first by its newer name.
"""

from torch_musa import runtime, simulated


def _musa_releasePool(device, mempool_id):
    runtime.release_pool(mempool_id)


def __getattr__(name):
    if name == f"_musa_endAllocate{'CurrentStream' if simulated.machine.release == '2.7.1' else ''}ToPool":
        return lambda device, mempool_id: runtime.end_allocate(mempool_id)
    raise AttributeError(name)
