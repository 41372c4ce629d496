"""One CUDA graph, with torch's capture underneath and errors that leave the device usable."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from specgraph.errors import CaptureError, HostReadError, SpecgraphError
from specgraph.platforms import ErrorMode, Graph, Stream
from specgraph_cuda.driver import swap_capture

if TYPE_CHECKING:
    from specgraph_cuda.platform import CudaPlatform


class CudaGraphPool:
    """A private pool of torch's caching allocator. Its memory goes back when it and its graphs are closed."""

    def __init__(self, platform: CudaPlatform) -> None:
        self._platform = platform
        self.handle: Any = torch.cuda.graph_pool_handle()
        self.is_closed = False
        self._graphs = 0

    def count(self, change: int) -> None:
        """A graph in this pool was captured (+1) or dropped (-1)."""
        self._graphs += change
        if self._graphs == 0:
            # torch retires a pool when its last graph goes, and keeps its memory until the cache is emptied. The next
            # capture starts a new pool.
            self.handle = torch.cuda.graph_pool_handle()
            if not self._platform.capture_lock.locked():  # freeing memory would break another thread's capture
                torch.cuda.empty_cache()

    def close(self) -> None:
        """Refuse new captures; the graphs in it stay until they are closed."""
        self.is_closed = True


class CudaGraph(Graph):
    """See `specgraph.platforms.Graph`."""

    def __init__(self, platform: CudaPlatform, pool: CudaGraphPool) -> None:
        self._platform, self._pool = platform, pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._is_closed = False

    @property
    def pool(self) -> CudaGraphPool:
        """The pool this graph allocates from."""
        return self._pool

    @property
    def is_closed(self) -> bool:
        """True once `close()` was called."""
        return self._is_closed

    @contextmanager
    def capture(self, *, stream: Stream | None = None, error_mode: ErrorMode = "thread_local") -> Iterator[None]:
        """See `Graph.capture`. Without a stream: the current one, or a side stream where that is the default stream.

        Warm the work up on the same stream first: compilers and libraries initialise, and allocate, on first use.
        """
        self._refuse_unless_empty()
        if not self._platform.capture_lock.acquire(blocking=False):
            raise CaptureError("another thread is capturing on this device: capture one graph at a time")
        try:
            with self._recorded(stream, error_mode):
                yield
        except BaseException:
            self._platform.capture_lock.release()
            self._pool.count(0)
            raise
        self._platform.capture_lock.release()
        self._pool.count(+1)

    @contextmanager
    def _recorded(self, stream: Stream | None, error_mode: ErrorMode) -> Iterator[None]:
        with torch.cuda.device(self._platform.device):
            side = self._platform.capture_stream(stream)
            graph = torch.cuda.CUDAGraph()
            collecting = gc.isenabled()
            gc.disable()  # a collection could free another graph's memory, which a capture must not see
            try:
                with torch.cuda.stream(side):
                    try:
                        graph.capture_begin(pool=self._pool.handle, capture_error_mode=error_mode)
                    except Exception as error:
                        self._abandon(graph, side)
                        raise CaptureError(f"capture could not begin: {_first_line(error)}") from error
                    try:
                        yield
                    except BaseException as error:
                        self._abandon(graph, side)
                        if (explained := _explained(error)) is None:
                            raise
                        try:
                            raise explained from error
                        finally:
                            del explained  # its traceback holds this frame: a cycle would keep what was captured
                    try:
                        graph.capture_end()
                    except Exception as error:
                        self._abandon(graph, side)
                        raise _explained(error) or CaptureError(f"capture failed: {error}") from error
            finally:
                if collecting:
                    gc.enable()
        self._graph = graph

    def replay(self) -> None:
        """See `Graph.replay`."""
        if self._graph is None:
            state = "closed" if self._is_closed else "empty: capture it first"
            raise CaptureError(f"replay of a graph that is {state}")
        self._graph.replay()

    def reset(self) -> None:
        """See `Graph.reset`."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None
            self._pool.count(-1)

    def close(self) -> None:
        """See `Graph.close`."""
        self.reset()
        self._is_closed = True

    def raw(self) -> int:
        """The cudaGraphExec_t as an integer, for tools of the CUDA driver. Owned by this graph.

        Raises:
            CaptureError: nothing is captured.
        """
        if self._graph is None:
            raise CaptureError("no captured graph to hand out")
        return int(self._graph.raw_cuda_graph_exec())

    def _refuse_unless_empty(self) -> None:
        if self._is_closed or self._pool.is_closed:
            raise CaptureError("capture into a closed graph or pool")
        if self._graph is not None:
            raise CaptureError("this graph holds a capture already: reset() it first")
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("nested capture: the current stream is being captured already")

    def _abandon(self, graph: torch.cuda.CUDAGraph, side: torch.cuda.Stream) -> None:
        """End a failed capture, so that its stream, the allocators, the generator and the next capture work."""
        with warnings.catch_warnings(), contextlib.suppress(Exception):  # the reason is the error that brought us here
            warnings.simplefilter("ignore")  # torch warns of empty graphs
            try:
                graph.capture_end()
            except Exception:
                # torch stops at the driver's error, with its pools and generator still in capture. Put an empty, sound
                # capture in the place of the invalid one, and let torch end that.
                swap_capture(side.cuda_stream)
                graph.capture_end()
        graph.reset()


_HOST_READS = (
    "operation not permitted when stream is capturing",
    "StreamCaptureUnsupported",
    "Cannot copy between CPU and CUDA tensors during CUDA graph capture",
)


def _explained(error: BaseException) -> CaptureError | None:
    """The driver's words for what a capture can't hold, in ours; None for an exception of the captured code's own."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        free, total = (value / 2**30 for value in torch.cuda.mem_get_info())
        return CaptureError(
            f"out of memory during capture ({free:.1f} of {total:.1f} GiB free): what was captured of this graph is "
            f"released; capture smaller sizes, or give the KV cache less. {_first_line(error)}"
        )
    if isinstance(error, SpecgraphError) or not isinstance(error, RuntimeError) or "captur" not in str(error).lower():
        return None
    if any(words in str(error) for words in _HOST_READS):
        return HostReadError(
            f"captured code synchronises or reads a device value on the host ({_first_line(error)}). Keep the value on "
            "the device: no .item(), .tolist(), .cpu(), boolean test or data-dependent shape in a capture."
        )
    return CaptureError(f"capture failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
