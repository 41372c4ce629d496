"""The calls of the binary module that reach the allocator's pools. torch_musa's own Python code uses them."""

from torch_musa import runtime, simulated


def _musa_releasePool(device, mempool_id):
    runtime.release_pool(mempool_id)


def __getattr__(name):
    """Ending a recording has one name in 2.7.1 and another in 2.11."""
    if name == f"_musa_endAllocate{'CurrentStream' if simulated.machine.release == '2.7.1' else ''}ToPool":
        return lambda device, mempool_id: runtime.end_allocate(mempool_id)
    raise AttributeError(name)
