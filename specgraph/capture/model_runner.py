"""The model runner: captures and runs the programs of one model, for target and drafter alike.

A program (`specgraph.capture.program`) is the device work of one kind of pass. A lowering
(`specgraph.capture.lowering`) decides how many graph launches it becomes. The runner combines both: at start-up it
captures every padded batch of every program, and later it replays the graphs.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol
from weakref import WeakMethod

import torch
from torch import Tensor

from specgraph.attention import AttentionBackend, AttentionLayer, HostLengths, KVCache
from specgraph.attention.interface import named_cache_tensors
from specgraph.capture.attend import AttentionStack, PassMode
from specgraph.capture.dispatch import BatchDescriptor
from specgraph.capture.graph_runner import Body, GraphRunner, Recording, StepLengths
from specgraph.capture.lowering import Collectives, Launch, cut_into_launches, resolve
from specgraph.capture.program import Program
from specgraph.config import DraftConfig
from specgraph.device import Graph, Platform, Progress
from specgraph.errors import CaptureError, ConfigError
from specgraph.ops.tensor_forms import check_named
from specgraph.parallel import RankPlace
from specgraph.user_code import NONSENSE, explained, users_code
from specgraph.validation import OneCall, checked, one_call, shown

LengthsAt = Callable[[int], HostLengths]
"""Returns the host lengths of one step. It is called when they are needed, because it may wait for the device."""


class Model(Protocol):
    """The members of a model that the runner uses."""

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...
    @property
    def ranks(self) -> RankPlace | None: ...
    def weights(self) -> Mapping[str, Tensor]:
        """Return every tensor that the model reads, by name."""
        ...


def collectives_of(model: Model) -> Collectives:
    """Return the parts of a model's passes that have collectives."""
    if model.ranks is not None:
        return "anywhere"
    return "in_attention" if any(layer.ranks is not None for layer in model.attention_layers) else "none"


@dataclass(frozen=True, slots=True)
class Pass:
    """One padded batch of a program, ready to run: all look-ups are done."""

    program: Program
    batch: BatchDescriptor
    launches: tuple[Launch, ...]
    from_graphs: bool
    graph: Graph | None = None
    """The graph, if one replay of it is the whole pass (`GraphRunner.plain_graph`). Otherwise None."""


@dataclass(frozen=True)
class LaunchLengths(Mapping[int, HostLengths]):
    """The host lengths of one launch by captured step. Each is computed when it is read, since that may have to
    wait."""

    at: LengthsAt
    steps: Mapping[int, int]
    """The step of this pass for each captured step."""

    def __getitem__(self, captured: int) -> HostLengths:
        return self.at(self.steps[captured])

    def __contains__(self, captured: object) -> bool:
        return captured in self.steps  # Mapping.__contains__ would compute the lengths, and wait

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)


class ModelRunner(OneCall):
    """Runs one model's programs on one platform: eagerly, or from graphs that are captured at start-up.

    The runner owns its graphs and its programs' buffers. The model and the KV caches belong to the caller. Not
    thread-safe: one pass at a time.
    """

    def __init__(
        self,
        model: Model,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        attention: AttentionBackend,
    ) -> None:
        """Make a runner without programs. Raises UnsupportedError if this platform cannot run the lowering or the
        prefill mode of the config.

        caches: one KV cache per attention layer of the model, a target or a draft head.
        """
        self.platform, self.caches, self.attention = platform, tuple(caches), attention
        self.resolution = resolve(
            config.decode, platform.capabilities, attention.host_parameters, config.prefill, collectives_of(model)
        )
        """The lowering and prefill mode in use, and why stronger ones were refused."""
        self.stack = AttentionStack(attention, model.attention_layers, self.caches)
        self.graphs: GraphRunner | None = None
        """The captured graphs. None if every pass is eager."""
        if (self.resolution.decode, self.resolution.prefill) != ("eager", "eager"):
            self.graphs = GraphRunner(platform, _weakly(self.read_set), check_inputs=config.check_inputs)
        self.programs: list[Program] = []
        """The programs, in the order in which they are captured."""
        self.compile_seconds = 0.0
        """Seconds that `capture` took to compile kernels, or to find them compiled."""
        self.launches: Counter[str] = Counter()
        """The number of graph launches so far, by the phase of the program."""
        self._model = model

    def read_set(self) -> dict[str, Tensor]:
        """Return every persistent tensor that a graph of this model may touch, by name."""
        weights = check_named(f"{type(self._model).__name__}.weights()", self._model.weights())
        named = {f"weights.{name}": tensor for name, tensor in weights.items()}
        named |= named_cache_tensors(self.caches, "kv_cache")
        named |= self.attention.named_tensors()
        for program in self.programs:
            named |= program.named_tensors()
        return named

    def to_capture(self) -> list[tuple[Program, BatchDescriptor, Launch]]:
        """Return the launches that `capture` captures, each once, with its program and batch."""
        found: dict[BatchDescriptor, tuple[Program, BatchDescriptor, Launch]] = {}
        for program in self.programs if self.graphs is not None else ():
            for batch in program.batches() if self.pass_mode(program) != "eager" else ():
                for launch in self.launches_of(program, batch):
                    found.setdefault(launch.descriptor, (program, batch, launch))  # several launches may share a graph
        return list(found.values())

    def _check(self) -> None:
        """Check the model with a small pass. `capture` calls it before anything is compiled or captured."""

    @one_call
    @checked
    def capture(self, progress: Progress | None = None) -> None:
        """Check the model, compile its kernels, and capture every batch of every program that runs from graphs.

        Nothing is captured later.

        Args:
            progress: called after each kernel and each capture.

        Raises:
            ConfigError: the check found a fault of the model or the attention.
            CaptureError: a capture failed. The runner does not fall back by itself. With fallback 'eager' the caller
                may make another runner with the lowering 'eager'.
        """
        progress, inert = progress or _silent, None
        with users_code("capture failed", CaptureError, theirs_alone=True):
            self._check()
        found = self.to_capture()
        captures = [(program, launch, self._body(program, batch, launch)) for program, batch, launch in found]
        start = time.perf_counter()
        bodies = [partial(body, None) for _, _, body in captures]
        self.platform.compile_ahead(bodies, partial(progress, "compiling kernels"))
        self.compile_seconds = time.perf_counter() - start
        for done, (program, launch, body) in enumerate(captures, 1):
            assert self.graphs is not None
            if program is not inert:
                program.make_inert()
                inert = program
            if launch.descriptor not in self.graphs:
                what = f"capture of {launch.descriptor} failed"
                with users_code(what, CaptureError, theirs_alone=True), explained((RuntimeError,), self._check):
                    self.graphs.capture(launch.descriptor, body)
            progress("capturing", done, len(captures))

    def pass_mode(self, program: Program) -> PassMode:
        """Return how the passes of a program run."""
        try:
            return self.resolution.prefill if program.phase == "prefill" else self.resolution.decode
        except AttributeError:
            raise ConfigError(f"pass_mode takes one of the runner's programs, got {shown(program)}") from None

    @checked
    def launches_of(self, program: Program, batch: BatchDescriptor) -> tuple[Launch, ...]:
        """Return the launches of one padded batch, in order."""
        return cut_into_launches(self.resolution.lowering, program, batch)

    @checked
    def prepare(self, program: Program, batch: BatchDescriptor, captured: bool = True) -> Pass:
        """Return a pass over a padded batch. captured: False if no captured size holds the batch, which then runs
        eagerly."""
        from_graphs = captured and self.pass_mode(program) != "eager"
        cut, graph = self.launches_of(program, batch), None
        if from_graphs and self.graphs is not None and len(cut) == 1:
            graph = self.graphs.plain_graph(cut[0].descriptor)
        return Pass(program, batch, cut, from_graphs, graph)

    def run(self, ready: Pass, lengths: LengthsAt | None = None) -> None:
        """Run a pass over the rows in the program's buffers.

        lengths: the host lengths, for attention with host parameters.

        Raises CaptureError if the graph of the batch was not captured.
        """
        try:
            graphs = self.graphs if ready.from_graphs else None
        except AttributeError:
            raise ConfigError(f"run takes what prepare returns, got {shown(ready)}") from None
        if ready.graph is not None and graphs is not None and not graphs.is_closed:
            ready.graph.replay()
            self.launches[ready.batch.phase] += 1
            return
        for launch in ready.launches:
            now: StepLengths = {}
            if lengths is not None and self.attention.host_parameters:
                now = LaunchLengths(lengths, dict(zip(launch.captured_steps, launch.steps, strict=True)))
            if graphs is None:
                what = f"{ready.batch} of {type(self._model).__name__} failed"
                with users_code(what, ConfigError, NONSENSE), explained((RuntimeError,), self._check):
                    self._body(ready.program, ready.batch, launch, now)(None)
            else:
                self.launches[ready.program.phase] += graphs.replay(launch.descriptor, now)

    def close(self) -> None:
        """Release the graphs and their memory. Later calls are refused. Closing twice is harmless."""
        self.refuse_calls(f"this {type(self).__name__} is closed, and its graphs are released: make another one")
        if self.graphs is not None:
            self.graphs.close()

    def _body(
        self, program: Program, batch: BatchDescriptor, launch: Launch, lengths: StepLengths | None = None
    ) -> Body:
        """Return the device work of one launch.

        It runs without autograd, also if the caller's mode has it on. Weights may be parameters of torch modules: every
        eager pass would then write its autograd history into the KV caches.
        """
        work, mode = program.work_of(batch), self.pass_mode(program)

        def body(recording: Recording | None) -> None:
            with torch.no_grad():
                work(launch.captured_steps, self.stack.attend_in(recording, mode, lengths))

        return body


def _weakly(read_set: Callable[[], dict[str, Tensor]]) -> Callable[[], dict[str, Tensor]]:
    """Return a runner's method with a weak reference to the runner, for the graphs that it owns. They don't keep the
    runner alive: dropping it frees graphs and KV caches at once, without a garbage collection."""
    method = WeakMethod(read_set)

    def call() -> dict[str, Tensor]:
        found = method()
        assert found is not None, "the runner owns its graphs"
        return found()

    return call


def _silent(what: str, done: int, total: int) -> None:
    """Report nothing."""
