"""Paged attention with host lengths on a GPU: the lengths are parameters of a kernel that stores them.

The attention kernel itself reads them from device memory, as with device lengths, so both give the same bits. A graph
holds the lengths in the storing kernel's node, which a task update rewrites.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from cuda.bindings import driver as cu  # pyright: ignore[reportMissingImports]
from cuda.bindings import nvrtc  # pyright: ignore[reportMissingImports]
from torch import Tensor

from specgraph import kernels
from specgraph_cuda.tasks import host_values

_PER_LAUNCH = 960
"""Values per launch: kernel parameters may take 4 KiB."""

_SOURCE = b"""
struct Values { int at[960]; };
extern "C" __global__ void store(int* out, int count, const __grid_constant__ Values values) {
    for (int i = threadIdx.x; i < count; i += blockDim.x) out[i] = values.at[i];
}
"""

_Values = ctypes.c_int * _PER_LAUNCH


def register_host_attention() -> None:
    """Make this the implementation of `kernels.paged_attention_host` for CUDA tensors."""
    kernels.implement("paged_attention_host", "CUDA", paged_attention_host)


def paged_attention_host(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    *,
    scale: float,
    causal: bool = True,
    out: Tensor,
) -> None:
    """See `specgraph.kernels.paged_attention_host`.

    The launches depend on shapes, and on whether all requests have the same number of rows, but not on the lengths: an
    update may change those.
    """
    requests, rows = len(seq_lens), query.shape[0]
    each = rows // max(requests, 1)
    uniform = requests == 1 or (each * requests == rows and all(count == each for count in query_lens))
    starts = -(-requests // 4) * 4  # aligned, as compiled kernels expect of pointers
    values = [*seq_lens, *[0] * (starts - requests), 0, *accumulate(query_lens)]
    lengths, is_rest_needed = host_values(
        lambda: torch.empty(len(values), dtype=torch.int32, device=query.device),
        lambda memory: store(memory, values),
        ("paged_attention_host", query.data_ptr(), out.data_ptr(), requests, uniform, scale, causal),
    )
    if not is_rest_needed:
        return
    result = kernels.paged_attention(
        query, key_cache, value_cache, block_table, lengths[:requests], lengths[starts:],
        query_len=each if uniform else rows, scale=scale, causal=causal,
    )  # fmt: skip
    if not uniform or 1 == requests < rows:  # rows after the last request's are not written by the kernel
        after = torch.arange(rows, device=query.device) >= lengths[starts + requests]
        result.masked_fill_(after[:, None, None], 0.0)
    out.copy_(result)


def store(out: Tensor, values: Sequence[int]) -> None:
    """Write `values` to `out`, int32 and contiguous, on the current stream. A graph captures the values themselves."""
    function = _function(out.device)
    stream = torch._C._cuda_getCurrentRawStream(out.device.index)  # pyright: ignore[reportPrivateUsage]
    for start in range(0, len(values), _PER_LAUNCH):
        part = values[start : start + _PER_LAUNCH]
        address, count, packed = ctypes.c_void_p(out.data_ptr() + 4 * start), ctypes.c_int(len(part)), _Values(*part)
        arguments = (ctypes.c_void_p * 3)(*(ctypes.addressof(value) for value in (address, count, packed)))
        (status,) = cu.cuLaunchKernel(function, 1, 1, 1, 128, 1, 1, 0, stream, ctypes.addressof(arguments), 0)
        if status != cu.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"storing lengths failed: {status.name}")


@cache
def _function(device: torch.device) -> Any:
    """The compiled kernel, loaded into the context of `device`, which must be the current one."""
    major, minor = torch.cuda.get_device_capability(device)
    program = _checked(nvrtc.nvrtcCreateProgram(_SOURCE, b"store_lengths.cu", 0, [], []))
    options = [f"--gpu-architecture=sm_{major}{minor}".encode()]
    _checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    binary = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, binary))
    return _checked(cu.cuModuleGetFunction(_checked(cu.cuModuleLoadData(binary)), b"store"))


def _checked(answer: tuple[Any, ...]) -> Any:
    status, *results = answer
    if int(status):
        raise RuntimeError(f"compiling the kernel that stores lengths failed: {status.name}")
    return results[0] if results else None
