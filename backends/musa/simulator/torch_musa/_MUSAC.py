"""The calls of torch_musa's binary module that act on the allocator's pools. torch_musa's own Python code uses them."""

from torch_musa import runtime, simulated


def _musa_releasePool(device, mempool_id):
    runtime.release_pool(mempool_id)


def __getattr__(name):
    """Return the call that ends the recording to a pool. Its name in 2.7.1 is not its name in 2.11."""
    if name == f"_musa_endAllocate{'CurrentStream' if simulated.machine.release == '2.7.1' else ''}ToPool":
        return lambda device, mempool_id: runtime.end_allocate(mempool_id)
    raise AttributeError(name)
