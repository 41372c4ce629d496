"""The life of a captured graph, the same on every device.

A backend subclasses `Graph` and `GraphPool` and writes the primitives only: begin, end, abandon, launch and destroy for
the graph, a new handle and its release for the pool. States, counts, locks, the cleaning up after errors and the texts
of errors are here. Users call the methods marked final. This file calls the primitives, which have a leading
underscore.
"""

from __future__ import annotations

import gc
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, final

from specgraph.device.pool import GraphPool
from specgraph.errors import CaptureError, HostReadError, SpecgraphError, first_line

if TYPE_CHECKING:
    from specgraph.device.interface import Platform


class VendorMessage(NamedTuple):
    """One entry of the table that turns a vendor's exception during capture into one of ours."""

    words: str
    """In lower case. The entry applies if the message of a RuntimeError contains them."""
    error: type[CaptureError]
    text: str
    """Our message. The vendor's first line follows it in parentheses."""


_HOST_READ = (
    "captured code waits for the device or reads a device value on the host. Keep the value on the device: no .item(), "
    ".tolist(), .cpu(), boolean test or data-dependent shape in a capture"
)

MESSAGES = (
    VendorMessage(
        "out of memory",
        CaptureError,
        "out of memory during capture: what was captured of this graph is released. Capture smaller sizes, or give "
        "the KV cache less memory",
    ),
    VendorMessage(
        "out of resources", CaptureError, "the runtime holds no more graphs: close some, or capture fewer sizes"
    ),
    VendorMessage("not permitted when stream is capturing", HostReadError, _HOST_READ),
    VendorMessage("captureunsupported", HostReadError, _HOST_READ),
)
"""Entries for messages of several vendors' runtimes. A backend adds its own in `Graph.messages`."""


class Graph(ABC):
    """One captured, replayable piece of device work.

    All memory allocated during the capture is in `pool`, at fixed addresses. Python scalars keep their values of the
    capture. The graph does not keep the tensors that it reads alive: their owner does (see
    `specgraph.capture.read_set`).
    """

    messages: ClassVar[tuple[VendorMessage, ...]] = MESSAGES
    """The vendor's messages during capture, and our error for each. The first entry that applies is used."""

    def __init__(self, platform: Platform, pool: GraphPool, *, owns_pool: bool = False) -> None:
        """Make an empty graph, as `Platform.graph()` does. `owns_pool`: close the pool with the graph."""
        self.platform = platform
        self.pool = pool
        """The pool this graph allocates from. Used by: suite."""
        self.is_captured = False
        """True once there is something to replay. Used by: host engines."""
        self.is_closed = False
        """True once `close()` was called. Used by: suite."""
        self.pool_handle: Any = None
        """The handle of the vendor's pool that this graph is captured with, or None."""
        self._owns_pool = owns_pool

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "captured" if self.is_captured else "empty"
        return f"{type(self).__name__} at {id(self):#x} ({state})"

    def __del__(self) -> None:
        if getattr(self, "pool_handle", None) is not None and not sys.is_finalizing():
            self.reset()  # a graph that was never closed gives its share of the pool back

    @final
    @contextmanager
    def capture(self) -> Generator[None]:
        """Record the work issued in the `with` block instead of running it. Used by: core.

        The block runs on `platform.capture_stream`. Other streams take part in the capture once they wait for it. Warm
        the work up on the capture stream first: libraries initialise, and allocate, on first use.

        Raises:
            CaptureError: the work can't be captured (host read, nested capture, ...), or this graph already holds a
                capture. After a failed capture the platform and its streams are usable, and this graph is empty.
                Exceptions of the block itself pass through.
            PlatformError: the platform is closed.
        """
        self.platform.require_open()
        if self.is_closed:
            raise CaptureError("this graph is closed: make a new one with platform.graph()")
        if self.is_captured:
            raise CaptureError("this graph holds a capture already: reset() it first")
        captures, key = self.platform.captures, object()
        try:
            captures.acquire(self, key)
            self.pool_handle = self.pool.enter(self)
            with self._recording():
                yield
            self.is_captured = True
        finally:
            if captures.release(key) and not self.is_captured:
                self.pool_handle = None
                self.pool.leave(self)

    @final
    def replay(self) -> None:
        """Launch the captured work on the current stream. Used by: core.

        Raises:
            CaptureError: nothing is captured, the graph is closed, or this thread is capturing.
            StaleInputError: a tensor that it reads was freed, moved or resized (on platforms that can tell).
            UpdateError: a task group of this graph has had no update (on platforms that can tell).
        """
        if not self.is_captured:
            state = "closed" if self.is_closed else "empty: capture it first"
            raise CaptureError(f"replay of a graph that is {state}")
        captures = self.platform.captures
        if captures.taken and captures.is_here:
            raise CaptureError("replay of a graph inside the capture of another: replay it before, or after")
        self._launch()

    @final
    def reset(self) -> None:
        """Drop the captured work; the graph can capture again. Used by: host engines, suite."""
        try:
            if self.is_captured:
                self.is_captured = False
                self._destroy()
        finally:  # not in the `if`: if an interrupt prevents this, the next call does it
            if self.platform.captures.graph is not self:
                self.pool.leave(self)
                self.pool_handle = None

    @final
    def close(self) -> None:
        """Release the graph and its share of the pool; closing twice is harmless. Used by: core."""
        if not self.is_closed:
            self.reset()
            self.is_closed = True
            if self._owns_pool:
                self.pool.close()

    @contextmanager
    def _recording(self) -> Generator[None]:
        platform, stream = self.platform, self.platform.capture_stream
        stream.wait_stream(platform.current_stream())
        collecting = gc.isenabled()
        try:
            gc.disable()  # a collection could free another graph's memory, which a capture must not see
            with platform.use(stream):
                try:
                    self._begin(self.pool_handle)
                except BaseException as error:
                    self._abandon(began=False)
                    self._raise(error, "the capture could not begin")
                try:
                    yield
                except BaseException as error:
                    with platform.use(stream):  # the block may have set another stream
                        sound = self._drop_failed()
                    self._raise(error, "" if sound or not isinstance(error, RuntimeError) else "the capture failed")
                with platform.use(stream):
                    try:
                        self._end()
                    except BaseException as error:
                        self._abandon(began=True)
                        self._raise(error, "the capture failed")
        finally:
            if collecting:
                gc.enable()

    def _drop_failed(self) -> bool:
        """End the capture after its block raised. Return False if that fails too."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vendors warn of empty graphs; the reason is the block's exception
            try:
                self._end()
            except Exception:
                self._abandon(began=True)
                return False
            self._destroy()
            return True

    def _raise(self, error: BaseException, otherwise: str) -> NoReturn:
        """Raise our error for `error`, or `error` itself.

        Args:
            error: the exception being handled.
            otherwise: our message if no entry of `messages` applies. If it is empty too, `error` itself is raised.
        """
        named = None
        if isinstance(error, Exception) and not isinstance(error, SpecgraphError):
            named = self._named(error, otherwise)
        if named is None:
            raise error
        try:
            raise named from error
        finally:
            del named  # its traceback holds this frame: the cycle would keep the captured tensors alive

    def _named(self, error: Exception, otherwise: str) -> CaptureError | None:
        reason = self._reason(error)
        if isinstance(error, RuntimeError):
            text = str(error).lower()
            for message in self.messages:
                if message.words in text:
                    return message.error(f"{message.text} ({reason})")
        return CaptureError(f"{otherwise}: {reason}") if otherwise else None

    # ---- primitives ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self, handle: Any) -> None:
        """Start recording the work issued to the current stream, with memory from the vendor's pool `handle`."""

    @abstractmethod
    def _end(self) -> None:
        """Finish the recording and keep the result, ready to launch. Raises the vendor's error if that fails."""

    @abstractmethod
    def _abandon(self, began: bool) -> None:
        """Clean up after `_begin` (`began` False) or `_end` (`began` True) raised; must not raise itself.

        Afterwards the stream, allocators, random generator and the next capture must work.
        """

    @abstractmethod
    def _launch(self) -> None:
        """Launch the result that `_end` kept, on the current stream."""

    @abstractmethod
    def _destroy(self) -> None:
        """Drop the result that `_end` kept. The graph leaves the pool after this."""

    def _reason(self, error: Exception) -> str:
        """Return the vendor's reason in `error`, in one line. A backend overrides it if the first line has none."""
        return first_line(error)
