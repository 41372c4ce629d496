"""Speculative decoding of requests that come and go: they wait, join a batch, and get tokens from each round."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext, suppress
from itertools import count
from weakref import ref

import torch
from specgraph_models.start_up import PATIENCE, agreed, agreed_captures
from specgraph_models.target import Target

from specgraph.attention import AttentionBackend, PagedAttention
from specgraph.config import DraftConfig
from specgraph.device import Platform, Progress
from specgraph.draft.head_checks import check_members, check_protocol
from specgraph.draft.protocol import Head
from specgraph.errors import CapacityError, ConfigError, first_line
from specgraph.open_generator import GeneratorRef, is_open
from specgraph.validation import Count, OneCall, checked, one_call
from specgraph_run.decoder.adaptive_k import AcceptanceRates, AdaptiveK
from specgraph_run.decoder.admission import admissible, blocks_needed, check_request
from specgraph_run.decoder.agreement import agree, check_sharing, compare_captures, same_times
from specgraph_run.decoder.blocks import BlockAllocator
from specgraph_run.decoder.captures import report_captures
from specgraph_run.decoder.config import check_options
from specgraph_run.decoder.layout import ParallelLayout
from specgraph_run.decoder.metrics import AcceptanceMetrics
from specgraph_run.decoder.request import Chunk, FinishReason, Generation, Request, Running
from specgraph_run.decoder.round_stages import RoundStages
from specgraph_run.decoder.round_times import measure_round_times
from specgraph_run.decoder.rounds import Rounds
from specgraph_run.options import DecoderOptions, RoundTimes


class SpeculativeDecoder(OneCall):
    """Generates for batches of requests with a target and, optionally, a drafter.

    `generate` and `stream` take a list of requests. If requests come and go, use `add`, `cancel` and `step`.

    Without a drafter it is plain decoding, one token per round. `query_len` K + 1 then gives the target's pass the
    shape of a verify with K drafts: speculative greedy output is compared with such a run bit for bit.

    A call while another one runs is refused, from any thread. Only `cancel` may be called at any time.

    An exception, such as Ctrl-C, may end a call anywhere. So each call begins with `_settle`, which repairs the state
    that the last one left. A request is in `_waiting`, in the rows of `rounds`, or in both while it joins; the rest of
    its state follows from that.
    """

    @checked
    def __init__(
        self,
        target: Target,
        head: Head | None,
        platform: Platform,
        config: DraftConfig,
        options: DecoderOptions | None = None,
        *,
        query_len: Count | None = None,
        attention: AttentionBackend | None = None,
        layout: ParallelLayout | None = None,
    ) -> None:
        """
        Args:
            config: limits and choices of target and drafter.
            options: choices of the decoder alone; by default `DecoderOptions()`.
            query_len: rows per request in a target pass without a drafter, by default 1. With a drafter it is K + 1.
            attention: for target and drafter; by default the core's paged attention with device lengths.
            layout: the ranks that run these models together. Data parallel ranks must call `step`, or `stream` and
                `generate`, equally often, also without requests.

        Raises:
            ConfigError: max_model_len exceeds the target's, or options contradict the limits.
            UnsupportedError: the chosen lowering is not possible on this platform, or between data parallel ranks.
        """
        options = options or DecoderOptions()
        check_options(config, options)
        attention = PagedAttention() if attention is None else attention
        check_members(attention, head)
        check_protocol("target", target, Target)
        self._ranks = None if layout is None else layout.ranks
        self._sharing = self._ranks if layout is not None and layout.data_size > 1 else None
        if self._sharing is not None:
            check_sharing(config)
        if config.max_model_len > target.max_model_len:
            raise ConfigError(f"max_model_len {config.max_model_len} exceeds the target's {target.max_model_len}")
        self.query_len = query_len if query_len is not None else config.query_len if head is not None else 1
        if head is not None and self.query_len != config.query_len:
            raise ConfigError(f"with a drafter query_len is K + 1 = {config.query_len}, got {query_len}")
        config = config.with_prefill_sizes(platform.capabilities.longest_prefill)
        self.platform, self.config, self.options = platform, config, options
        per_request = -(-(config.max_model_len + config.scratch_tokens) // config.block_size)
        enough = 1 + per_request * config.max_num_requests
        self.allocator = BlockAllocator(enough if options.num_blocks is None else options.num_blocks)
        self.stages = RoundStages(
            target,
            head,
            platform,
            config,
            options,
            query_len=self.query_len,
            num_blocks=self.allocator.num_blocks,
            attention=attention,
        )
        """The stages of a round, cut as the lowering says."""
        self.target, self.drafter, self.runners = self.stages.target, self.stages.drafter, self.stages.runners
        self.metrics = AcceptanceMetrics(config.num_speculative_tokens if head is not None else 0)
        """Counts over the rounds that were read."""
        self._waiting: deque[Running] = deque()
        self._cancelled: dict[int, object] = {}
        """The requests that the next step ends, by id. The value is unique to the call of `cancel` that came first."""
        self._chunks: list[Chunk] = []
        """Chunks that no call has returned yet."""
        self._failure: BaseException | None = None
        """The error of a request that failed to join in this step."""
        self._in_step = False
        """True while a step runs. A call that finds it True comes after a step that was cut short."""
        self._reason = ""
        """The reason why a step was cut short."""
        self._stream: GeneratorRef | None = None
        """The open stream that all requests belong to. None if they came by `add`."""
        self._in_inference_mode = torch.is_inference_mode_enabled()
        """Steps run in the inference mode in which the buffers were allocated."""
        self._next_id = 0
        self._seeds = count(-1, -1) if layout is None else count(-1 - layout.data_rank, -layout.data_size)
        """The seeds of requests without one. Data parallel ranks differ in them; tensor parallel ranks do not."""
        self.others_unfinished = False
        """True if any data parallel rank had requests at the last `step`. All ranks must then call it again."""
        waits = self._sharing is not None or bool(self.target.attention.host_parameters)
        self.rounds = Rounds(self.stages, self.allocator, self.metrics, 0 if waits else options.rounds_ahead)
        """The running requests."""

    @one_call
    @checked
    def capture(self, progress: Progress | None = None) -> None:
        """Capture all graphs. Call it once before generating; nothing is captured at request time.

        Args:
            progress: called with the name of the work, the number of its parts that are done, and their number in all.

        Raises:
            CaptureError: a capture failed.
            RankError: a capture failed on another rank.
        """
        if self._ranks is not None:
            compare_captures(self._ranks, self.runners, self.config)
        with agreed(self._ranks, PATIENCE):
            counted = report_captures(list(self.runners.values()), agreed_captures(self._ranks, progress))
            for runner in self.runners.values():
                runner.capture(counted)
            self.time_rounds()

    def time_rounds(self) -> RoundTimes | None:
        """Return the microseconds of a round by batch size and K, measured or from `DecoderOptions.round_times`.

        K is chosen by them from then on. None if K is fixed.
        """
        candidates = self.config.k_candidates
        if self.drafter is None or candidates is None:
            return None
        with self.drafter.unchecked():
            times = self.options.round_times or measure_round_times(self.stages, self.drafter)
        if self._ranks is not None:
            times = same_times(self._ranks, times)
        self.rounds.adaptive = AdaptiveK(times, AcceptanceRates(candidates[-1]))
        return times

    @one_call
    @checked
    def generate(self, requests: Sequence[Request]) -> list[Generation]:
        """Generate for all requests, in batches that shrink and grow as requests finish and join.

        A request that can never fit is refused with a message, and the others go on. One that does not fit now waits.

        Raises:
            ConfigError: a request is wrong in itself (see `check`); nothing was run.
            CapacityError: this decoder has unfinished requests, of a stream or from `add`.
        """
        results = [Generation() for _ in requests]

        def take(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                result = results[chunk.request]
                result.token_ids += chunk.token_ids
                result.logprobs += chunk.logprobs
                result.finish_reason, result.message, result.seed = chunk.finish_reason, chunk.message, chunk.seed

        try:
            places, refused = self._begin(requests, _over)
            take(refused)
            while True:  # at least once: other ranks may have requests
                take(self._continue(places))
                if not self.num_unfinished and not self.others_unfinished:
                    return results
        finally:
            self._settle()

    @checked
    def stream(self, requests: Sequence[Request]) -> Generator[Chunk]:
        """Generate for all requests, and give the tokens of each round as they come.

        `Chunk.request` is the request's index in `requests`. As in `generate`, a request that can never fit is refused
        with a message. `close()` of the stream ends the others.

        Raises:
            ConfigError: a request is wrong in itself (see `check`); nothing was run.
            CapacityError: this decoder has unfinished requests, of another stream or from `add`.
        """
        own: list[GeneratorRef] = []
        stream = self._chunks_of(requests, own)
        own.append(ref(stream))
        return stream

    def _chunks_of(self, requests: Sequence[Request], own: Sequence[GeneratorRef]) -> Generator[Chunk]:
        """Give the chunks of a stream; `own` has a reference to it."""
        try:
            places, refused = self._begin_stream(requests, own[0])
            yield from refused
            while True:
                yield from self._continue_stream(places)
                if not self.num_unfinished and not self.others_unfinished:
                    return
        finally:
            if self._stream is own[0]:
                self._stream = _over
                with suppress(ConfigError):  # another call runs, and the next one settles; or the decoder is closed
                    self._settle_alone()

    @one_call
    def _begin_stream(self, requests: Sequence[Request], stream: GeneratorRef) -> tuple[Mapping[int, int], list[Chunk]]:
        return self._begin(requests, stream)

    @one_call
    def _continue_stream(self, places: Mapping[int, int]) -> list[Chunk]:
        return self._continue(places)

    @one_call
    def _settle_alone(self) -> None:
        self._settle()

    def _begin(self, requests: Sequence[Request], stream: GeneratorRef) -> tuple[Mapping[int, int], list[Chunk]]:
        """Queue the requests of a stream that fit.

        Returns:
            The index in `requests` of each queued request, by id; and a chunk for each request that does not fit, named
            by its index.
        """
        self._settle()
        if self._stream is not None or self.num_unfinished:
            raise CapacityError(
                f"this decoder has a stream that is still open, or {self.num_unfinished} unfinished requests of add(): "
                "close() the stream, or call step() until none is left, also after cancel()"
            )
        fitting: dict[int, Request] = {}
        refused: list[Chunk] = []
        for index, request in enumerate(requests):
            try:
                self._check(request)
                fitting[index] = request
            except CapacityError as error:
                refused.append(Chunk(index, [], 0, "refused", str(error)))
        self._stream = stream
        first = self._queue([*fitting.values()])
        return dict(zip(count(first), fitting, strict=False)), refused

    def _continue(self, places: Mapping[int, int]) -> list[Chunk]:
        """Run a step, and name its chunks by the indices of their requests."""
        chunks = self._step()
        for chunk in chunks:
            chunk.request = places[chunk.request]
        return chunks

    @property
    def num_unfinished(self) -> int:
        """The number of requests that wait, run, or have a last chunk that no call has returned yet."""
        return len(self._waiting) + len(self.rounds.running) + sum(bool(each.finish_reason) for each in self._chunks)

    @one_call
    @checked
    def add(self, request: Request) -> int:
        """Queue a request; it joins the batch in a later `step`, when a row and KV blocks are free.

        Returns:
            The id that names it in chunks and in `cancel`.

        Raises:
            CapacityError, ConfigError: the request can never run here; see `check`.
            ConfigError: a stream is open. Its chunks are numbered by the indices of its own requests.
        """
        self._settle()
        if self._stream is not None:
            raise ConfigError("add() while a stream is open: finish it, or give all requests by add() and step()")
        self._check(request)
        return self._queue([request])

    @checked
    def cancel(self, request_id: int) -> bool:
        """End a request. May be called from any thread at any moment.

        The next `step` returns the request's last chunk, with reason "cancelled". If a step that runs meanwhile ends
        the request, that step returns its last chunk.

        Returns:
            True if the request was unfinished and not cancelled before.
        """
        waiting = tuple(self._waiting)  # before `running`: a request that joins meanwhile is then seen in one of them
        if all(state.index != request_id for state in (*waiting, *self.rounds.running)):
            return False
        this_call = object()
        return self._cancelled.setdefault(request_id, this_call) is this_call

    @one_call
    def step(self) -> list[Chunk]:
        """Run a round over the batch, let waiting requests join behind it, and return each request's new tokens.

        `Chunk.request` is the id from `add`. An empty list means that there is nothing to do. All data parallel ranks
        call it; a rank without requests takes part in the passes of the others. `others_unfinished` then tells if any
        rank had requests.

        An error while a request joins ends that request alone. An error in the middle of a round ends all running
        requests, since the content of their rows is then unknown. The next call returns their last chunks, with reason
        "failed", and goes on. With data parallel ranks a request that fails to join raises nothing, since the others
        would wait for this rank: only its chunk tells of the failure.

        Raises:
            ConfigError: a stream is open. `step` would take its chunks.
            CapacityError: nothing runs, and a waiting request still lacks KV blocks. The request fails.
        """
        self._settle()
        if self._stream is not None:
            raise ConfigError("step() while a stream is open would take its chunks: finish it, or close() it")
        return self._step()

    def _step(self) -> list[Chunk]:
        self._reason, self._in_step = "the step was cut short", True
        self._failure = None
        try:
            if self._cancelled:
                self._end_cancelled()
            with torch.inference_mode() if self._in_inference_mode else nullcontext():
                agreed = None
                if self._sharing is not None:
                    agreed = agree(self._sharing, self.rounds.passes(self._admissible(), len(self._waiting)))
                    self.others_unfinished = agreed.unfinished > 0
                idle = agreed is None and not self.rounds.rows and not self._waiting
                for state, tokens in () if idle else self.rounds.step(self._admit, agreed):
                    chunk = state.add(tokens)
                    self._chunks.append(chunk)
                    if chunk.finish_reason is not None:
                        self.rounds.leave(state)
            if self._waiting and not self._chunks and not self.rounds.running:
                self._refuse_first()
        except BaseException as error:
            self._reason = first_line(error)
            self._settle()
            raise
        self._in_step = False
        if self._failure is not None:
            raise self._failure
        chunks, self._chunks = self._chunks, []
        return chunks

    def _settle(self) -> None:
        """Repair the state that an exception left, at any place. Requests of a stream that is over are dropped. The
        running requests of a step that was cut short fail. If `_settle` is interrupted, the next call does it again."""
        over = self._stream is not None and not is_open(self._stream)
        if not over and not self._in_step:
            return
        running = self.rounds.running
        if over:
            self._waiting.clear()
            self._chunks.clear()
        else:
            ended = {chunk.request for chunk in self._chunks if chunk.finish_reason is not None}
            self._chunks += [
                self._last_chunk(each, "failed", self._reason) for each in running if each.index not in ended
            ]
            gone = ended.union(each.index for each in running)
            self._waiting = deque(each for each in self._waiting if each.index not in gone)
            for state in self._waiting:
                state.blocks = []  # a request that was about to join; the allocator takes all blocks back below
        if running or self._in_step:
            self.allocator.reset()
            self.rounds.reset()  # last: an interrupted `_settle` needs `running` again
        self._in_step = False
        if over:
            self._stream = None

    @one_call
    @checked
    def check(self, request: Request) -> None:
        """Refuse a request that can never run here.

        Raises:
            CapacityError: the prompt, or the KV that the request may need, is too long.
            ConfigError: the request wants sampling, and this decoder is greedy; a token is not in the target's
                vocabulary; or the decoder is closed.
        """
        self._check(request)

    def _check(self, request: Request) -> None:
        vocab = self.target.model.vocab_size
        check_request(request, self.config, self.options, self.query_len, vocab, self.allocator.capacity)

    def close(self) -> None:
        """Release the graphs and their memory. A second call does nothing; later requests are refused."""
        self.refuse_calls("this generator is closed: close() has released its graphs; load another one")
        for runner in self.runners.values():
            runner.close()

    def _queue(self, requests: Sequence[Request]) -> int:
        """Queue requests, all or none. Return the id of the first; the others have the ids that follow."""
        first, longest = self._next_id, self.config.max_model_len
        seeds = [next(self._seeds) if each.seed is None else each.seed for each in requests]
        states = [Running(first + i, each, seeds[i], longest) for i, each in enumerate(requests)]
        self._next_id += len(states)
        self._waiting += states  # in one go
        return first

    def _end(self, state: Running, reason: FinishReason, message: str = "") -> None:
        """End a request that waits or runs; its last chunk belongs to the current step."""
        self._chunks.append(self._last_chunk(state, reason, message))
        if state in self._waiting:
            self._waiting.remove(state)
        if state.blocks:
            self.rounds.leave(state)

    def _last_chunk(self, state: Running, reason: FinishReason, message: str) -> Chunk:
        return Chunk(state.index, [], 0, reason, message, seed=state.sampled_with)

    def _end_cancelled(self) -> None:
        for request_id in tuple(self._cancelled):  # another thread may add to it
            for state in (*self._waiting, *self.rounds.running):
                if state.index == request_id:
                    self._end(state, "cancelled")
            del self._cancelled[request_id]

    def _refuse_first(self) -> None:
        """End the first waiting request, which no running request would ever free blocks for."""
        state = self._waiting[0]
        needed = blocks_needed(state.request, self.config, self.query_len)
        error = CapacityError(
            f"request {state.index} needs {needed} KV blocks, {self.allocator.num_free} of {self.allocator.capacity} "
            "are free, and no request runs that would give some back: it would wait for ever"
        )
        self._end(state, "failed", str(error))
        if self._sharing is None:
            self._failure = error

    def _admissible(self) -> list[Running]:
        """Return the waiting requests that may join now, in order, while rows and blocks last."""
        if not self._waiting:
            return []
        rows, free = self.config.max_num_requests - len(self.rounds.running), self.allocator.num_free
        return admissible(self._waiting, self.config, self.query_len, rows, free)

    def _admit(self) -> None:
        """Let waiting requests join."""
        for state in self._admissible():
            state.blocks = self.allocator.allocate(blocks_needed(state.request, self.config, self.query_len))
            try:
                self.rounds.join(state)
            except BaseException as error:  # the round goes on: others have tokens in it, and other ranks run it
                self._end(state, "failed", first_line(error))
                if self._sharing is None or not isinstance(error, Exception):
                    self._failure = error
                break  # its row is made inert before the next launch, and no request takes it until then
            self._waiting.remove(state)


def _over() -> None:
    """Return None, as a reference to a stream that is over does."""
