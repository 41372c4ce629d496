"""The graph runner: captures bodies of device work by descriptor, and replays them.

A captured body is a list of pieces. In a piecewise pass, graphs alternate with attention calls that stay eager. A body
that is captured whole is one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from specgraph.attention import HostLengths
from specgraph.capture.dispatch import BatchDescriptor
from specgraph.capture.read_set import Fingerprint, ReadSet, ReadSetGuard, fingerprint
from specgraph.capture.update_plan import UpdatePlan
from specgraph.device import Graph, GraphPool, Platform
from specgraph.errors import CaptureError

StepLengths = Mapping[int, HostLengths]
"""Host lengths by captured step; empty for attention with device lengths."""

EagerPiece = Callable[[StepLengths], None]

Body = Callable[["Recording | None"], None]
"""Device work: `body(None)` runs it, `body(recording)` captures it."""


class Recording:
    """An ongoing capture: the object that a body gets while it is captured."""

    def __init__(
        self, platform: Platform, pool: GraphPool, guard: ReadSetGuard, num_requests: int, live_graphs: int
    ) -> None:
        """live_graphs: the number of graphs that the runner holds already."""
        self.updates = UpdatePlan(platform, num_requests)
        self.pieces: list[Graph | EagerPiece] = []
        self._platform, self._pool, self._guard, self._live_graphs = platform, pool, guard, live_graphs
        self._segment: AbstractContextManager[object] | None = None

    def __enter__(self) -> Recording:
        self._begin()
        return self

    def __exit__(self, *error: Any) -> None:
        """Finish the current graph, or abandon it if there is an exception."""
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.__exit__(*error)

    def split(self, piece: EagerPiece) -> None:
        """End the current graph, have each replay run `piece` eagerly, and go on in a new graph.

        Raises CaptureError if the platform can't hold another graph.
        """
        self.__exit__(None, None, None)
        self.pieces.append(piece)
        self._begin()

    def _begin(self) -> None:
        limit = self._platform.capabilities.max_live_graphs
        held = self._live_graphs + sum(isinstance(piece, Graph) for piece in self.pieces)
        if limit is not None and held >= limit:
            raise CaptureError(
                f"platform '{self._platform.info.name}' holds at most {limit} graphs and this model has {held}; name "
                "fewer capture sizes"
            )
        graph = self._platform.graph(self._pool)
        self.pieces.append(graph)
        segment = self._capture(graph)
        segment.__enter__()
        self._segment = segment

    @contextmanager
    def _capture(self, graph: Graph) -> Generator[None]:
        with graph.capture(), self._guard:
            yield

    def close(self) -> None:
        """Drop the graphs captured so far."""
        for piece in self.pieces:
            if isinstance(piece, Graph):
                piece.close()


@dataclass(frozen=True, slots=True)
class Captured:
    """The capture of one descriptor: its pieces, their update plan, and the addresses of their inputs."""

    pieces: tuple[Graph | EagerPiece, ...]
    num_graphs: int
    updates: UpdatePlan
    inputs: Fingerprint


class GraphRunner:
    """Captures and replays the graphs of one model on one platform. It owns the graphs, and one pool for all."""

    def __init__(self, platform: Platform, reads: ReadSet, *, check_inputs: bool = False) -> None:
        """Make an empty runner. `reads` returns the persistent tensors that bodies may touch. check_inputs: see
        `DraftOptions`."""
        self._platform, self._reads, self._check_inputs = platform, reads, check_inputs
        self._pool = platform.graph_pool()
        self._captured: dict[BatchDescriptor, Captured] = {}
        self.is_closed = False
        """True after `close()`."""

    def __contains__(self, descriptor: BatchDescriptor) -> bool:
        return descriptor in self._captured

    @property
    def descriptors(self) -> list[BatchDescriptor]:
        """Return the captured descriptors, in order of capture."""
        return list(self._captured)

    def graphs_of(self, descriptor: BatchDescriptor) -> int:
        """Return the number of graphs that one replay of `descriptor` launches."""
        return self._captured[descriptor].num_graphs

    @property
    def graph_count(self) -> int:
        """Return the number of live graphs."""
        return sum(captured.num_graphs for captured in self._captured.values())

    def plain_graph(self, descriptor: BatchDescriptor) -> Graph | None:
        """Return the one graph of `descriptor` if its `replay` is the whole launch. None if the body has several
        pieces or needs task updates, or with `check_inputs`."""
        captured = self._captured.get(descriptor)
        if captured is None or captured.updates.tasks or self._check_inputs:
            return None
        first, *others = captured.pieces
        return first if isinstance(first, Graph) and not others else None

    def capture(self, descriptor: BatchDescriptor, body: Body) -> None:
        """Run `body(None)` once as a warm-up on the platform's capture stream, then capture `body(recording)`.

        The warm-up really runs, so all rows in the inputs of the body must be padding.

        Raises:
            CaptureError: already captured, too many live graphs, or the platform refused. All graphs of this descriptor
                are dropped; the platform stays usable.
            ReadSetError: the body touches a tensor that the read set does not name.
        """
        if descriptor in self._captured:
            raise CaptureError(f"{descriptor} is captured already")
        named = self._reads()
        guard = ReadSetGuard(named, self._platform.device)
        recording = Recording(self._platform, self._pool, guard, descriptor.num_requests, self.graph_count)
        stream = self._platform.capture_stream
        stream.wait_stream(self._platform.current_stream())
        try:
            with self._platform.use(stream):
                body(None)
                try:
                    with recording:
                        body(recording)
                except BaseException:
                    recording.close()
                    raise
        except torch.OutOfMemoryError as error:  # from the warm-up; the platform explains one inside a capture
            raise CaptureError(
                f"out of memory while warming up {descriptor}: nothing of it is kept; capture smaller sizes, or give "
                f"the KV cache less. {str(error).splitlines()[0]}"
            ) from error
        finally:
            self._platform.current_stream().wait_stream(stream)  # wait for the warm-up, also if the capture failed
        inputs = fingerprint(named, guard.touched)
        pieces = tuple(recording.pieces)
        num_graphs = sum(isinstance(piece, Graph) for piece in pieces)
        self._captured[descriptor] = Captured(pieces, num_graphs, recording.updates, inputs)

    def replay(self, descriptor: BatchDescriptor, lengths: StepLengths | None = None) -> int:
        """Launch the captured body of `descriptor`.

        Args:
            lengths: host lengths by captured step. Attention with host parameters needs them for exactly the captured
                steps.

        Returns:
            The number of graphs that were launched.

        Raises:
            CaptureError: the descriptor was never captured, and nothing is captured at request time.
            StaleInputError: with `check_inputs`, an input was reassigned or moved.
            UpdateError: `lengths` does not fit. Nothing was launched. One exception: a platform that updates during the
                replay finds wrong lengths of a step only when its turn comes.
        """
        captured = self._captured.get(descriptor)
        if self.is_closed:
            raise CaptureError(f"{descriptor}: these graphs are closed; make and capture a new drafter or generator")
        if captured is None:
            if not self._captured:
                raise CaptureError(f"{descriptor} was never captured, and no other batch was: call capture() first")
            raise CaptureError(f"{descriptor} was never captured; captured are: {', '.join(map(str, self._captured))}")
        if self._check_inputs:
            captured.inputs.check(self._reads(), str(descriptor))
        updates, lengths = captured.updates, lengths or {}
        during = self._platform.capabilities.update_order == "during_replay"
        if updates.tasks and during:
            updates.check_steps(lengths)  # before the launch: a graph must not wait for an update that never comes
        elif updates.tasks:
            updates.apply(lengths)
        for piece in captured.pieces:
            if isinstance(piece, Graph):
                piece.replay()
            else:
                piece(lengths)
        if updates.tasks and during:
            updates.apply_in_order(lengths)
        return captured.num_graphs

    def close(self) -> None:
        """Release the graphs and their pool."""
        self.is_closed = True
        for captured in self._captured.values():
            for piece in captured.pieces:
                if isinstance(piece, Graph):
                    piece.close()
        self._captured.clear()
        self._pool.close()
