"""The calls of the binary module that reach the allocator's pools. torch_musa's own Python code uses them."""

from torch_musa.forms import form


def _musa_beginAllocateToPool(device, mempool_id):
    form.begin_allocate(device, mempool_id)


def _musa_endAllocateCurrentStreamToPool(device, mempool_id):
    form.end_allocate(device, mempool_id)


def _musa_releasePool(device, mempool_id):
    form.release_pool(device, mempool_id)
