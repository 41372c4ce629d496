"""The few calls of the CUDA driver that torch has no binding for."""

from __future__ import annotations

import ctypes

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def swap_capture(stream: int) -> None:
    """End the invalid capture on a stream (a CUstream), and begin an empty one.

    Raises:
        OSError: there is no driver library.
        RuntimeError: the driver refuses a new capture.
    """
    driver = ctypes.CDLL("libcuda.so.1")
    graph = ctypes.c_void_p()
    driver.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))  # fails by design, and ends the capture
    if status := driver.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), _THREAD_LOCAL):
        raise RuntimeError(f"cuStreamBeginCapture_v2 returned {status}")
