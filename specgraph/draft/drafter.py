"""The drafter: a draft head, its KV caches and its captured graphs on one platform. It needs no target."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from specgraph.attention import AttentionBackend, KVCache, PagedAttention
from specgraph.attention.caches import num_blocks
from specgraph.capture import Dispatch, LengthsAt, ModelRunner, PrefillBuffers, Program
from specgraph.config import DraftConfig
from specgraph.device import Platform, Progress
from specgraph.draft.batch import DraftTokens, ProposeBatch, allocate_shared
from specgraph.draft.batch_checks import check_options, check_types, check_values, refuse_values, vocabulary_size
from specgraph.draft.bound import BoundTensors
from specgraph.draft.cache_checks import check_caches
from specgraph.draft.head_checks import tell_unrotated
from specgraph.draft.host_lengths import Counts, HostNumbersReader
from specgraph.draft.kinds import check_members, check_passes, kind_of, programs_for
from specgraph.draft.kv_history import KVHistory
from specgraph.draft.prefill import DraftPrefill
from specgraph.draft.program import DraftProgram
from specgraph.draft.propose_passes import ProposePass, ProposePasses
from specgraph.draft.protocol import Head
from specgraph.draft.sampling_buffers import SamplingBuffers
from specgraph.errors import CaptureError, ConfigError, UnsupportedError
from specgraph.ops.tensor_forms import check_named
from specgraph.validation import RUNNING, OneCall, check, checked, one_call


class Drafter(ModelRunner):
    """Proposes K draft tokens for each request of a batch, through graphs captured once at start-up.

    A round with an engine's own target:

        inputs = drafter.inputs(n)          # views of the drafter's memory: write the target's results there
        drafts = drafter.propose(inputs)    # or propose(ProposeBatch(...)) with tensors of the engine's own: one copy

    Tensors of the engine's own that stay where they are can be bound before the capture (`bind`): the graphs then read
    them, and `inputs(n, bound=...)` are views of them.

    A new prompt goes through `prefill` chunk by chunk, and joins the next round with `ProposeBatch.join`.

    One call at a time: another one meanwhile, from any thread, is refused. Owns its graphs and buffers; the head and
    the KV caches belong to the caller.
    """

    @checked
    def __init__(
        self,
        head: Head,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        *,
        attention: AttentionBackend | None = None,
        sampling: SamplingBuffers | None = None,
        prompts: Callable[[DraftProgram[Any, Any]], Program] | None = None,
    ) -> None:
        """
        Args:
            head: the draft model, or an `NgramHead`; its protocol decides the draft program.
            caches: one KV cache per attention layer of the head; none for a head without attention.
            platform: where to run.
            config: limits and choices.
            attention: the attention backend; the core's paged attention with device lengths by default.
            sampling: what requests ask of sampling besides temperature and seed, in memory that the caller writes;
                drafts then follow it (see `SamplingBuffers.adjusted_drafts`), except those of a tree. None: they are
                drawn by temperature alone, which lossless acceptance makes up for.
            prompts: makes the program that writes the keys of prompts, from a draft program of the head. It is captured
                in place of the one that `prefill` runs, and the caller runs it.

        Raises:
            ConfigError: the head or the attention backend lacks a member of its protocol, the caches do not fit the
                head, the config or the device, `sampling` is for fewer requests or another vocabulary, or the head
                cannot draft K tokens or has too few positions.
            UnsupportedError: the lowering that was asked for is not possible on this platform.
        """
        attention = PagedAttention() if attention is None else attention
        check_members(attention, head, trees=config.tree is not None)
        check_caches(head, caches, config, platform.device, attention)
        if sampling is not None:
            sampling.check(config.max_num_requests, vocabulary_size(head), platform.device)
        if not kind_of(head).has_probs:
            config = replace(config, draft_sampling="greedy")
        config = config.with_prefill_sizes(platform.capabilities.longest_prefill)
        super().__init__(head, caches, platform, config, attention)
        self.head, self.config = head, config
        self.shared = allocate_shared(config, config.query_lens, head.aux_size, head.dtype, platform.device, sampling)
        """The memory of `inputs`, where the target's rounds leave their results."""
        self.draft_programs = programs_for(head, self.stack, config, self.shared)
        """The programs of chains, of trees, or both, by whether they are of trees."""
        self.program = next(iter(self.draft_programs.values()))
        self.buffers = self.program.buffers
        self._num_blocks, self._checks_values = num_blocks(caches), config.debug
        self._history = KVHistory(config, self._num_blocks, self.position_offset) if config.debug and caches else None
        self._prefill: DraftPrefill | None = None
        if prompts is None:
            self._prefill = DraftPrefill(self.program, self._num_blocks, self._history)
            prompt_program = self._prefill.program
        else:
            prompt_program = prompts(self.program)
        self.programs += [prompt_program, *self.draft_programs.values()]
        self.bound: list[BoundTensors] = []
        """The tensors that `bind` was given, in order."""
        self.num_proposes = 0
        """Proposes so far."""
        self._passes = ProposePasses(self, config, self.shared, self.draft_programs)
        self._host_numbers = HostNumbersReader(platform, config.max_num_requests)

    @one_call
    def bind(self, tensors: ProposeBatch) -> BoundTensors:
        """Have the graphs read tensors of the engine's own: the copy into the drafter's memory is part of the graph.

        Call it before `capture`, which then captures every size once more for these tensors. Hand them over by
        `propose(inputs(n, bound=...))`. The drafter keeps them, and writes `num_sampled` only: 0 to all requests at
        capture, and to the padded requests of each propose. Several sets may be bound, for rounds in turns.

        Args:
            tensors: of the largest batch, R = max_num_requests and Q = the largest query_len: sampled_token_ids
                [R, Q], of which a round of fewer rows uses the first columns; aux_hidden [R * Q, aux_size], packed by
                the rows of the round; block_table with at most the drafter's columns. Dtypes as `ProposeBatch` says.

        Raises:
            CaptureError: the graphs were captured before.
            ConfigError: a tensor is missing, or has the wrong shape, dtype or device.
        """
        if self.graphs is not None and self.graphs.descriptors:
            raise CaptureError("bind: the graphs are captured already, and read other memory; bind before capture()")
        check_types("bind", tensors, self.shared.num_sampled.device)
        made = BoundTensors(len(self.bound) + 1, tensors, self.shared, self.config)
        self.bound.append(made)
        for program in self.draft_programs.values():
            program.bound[made.number] = made
        return made

    @one_call
    @checked
    def capture(self, progress: Progress | None = None) -> None:
        """Check the head's shapes with one small pass, and capture; see `ModelRunner.capture`.

        Raises:
            ConfigError: a method of the head fails, or returns other shapes than its protocol says.
            CaptureError: a capture failed.
        """
        super().capture(progress)

    def _check(self) -> None:
        check_named(f"attention '{self.attention.name}'.named_tensors()", self.attention.named_tensors())
        check_passes(self.head, self.config.query_len, self.platform.device)
        tell_unrotated(self.head, self.attention)

    @property
    def position_offset(self) -> int:
        """See `DraftProgram.position_offset`."""
        return self.program.position_offset

    @property
    def prefill_buffers(self) -> PrefillBuffers:
        """Return the memory of a prefill pass, where a target's pass can leave its hidden states."""
        return self._own_prefill().buffers

    def _own_prefill(self) -> DraftPrefill:
        if self._prefill is None:
            raise UnsupportedError("prefill: this drafter's prompts are written by the program that `prompts` made")
        return self._prefill

    @property
    def rows_without_block(self) -> int:
        """Rows, over all proposes so far, whose token had no KV block: sampled and draft tokens below max_model_len
        whose entry of the block table was the null block. Their keys are not written, and the drafts get worse.

        Counted in the graphs, without `debug`. Reading it waits for the device.
        """
        return int(self.shared.rows_without_block)

    @one_call
    def inputs(
        self, num_requests: int, query_len: int | None = None, bound: BoundTensors | None = None
    ) -> ProposeBatch:
        """Return the drafter's own memory for a batch, or bound tensors: to be written in place and given to `propose`.

        The same object for the same arguments; its contents stay until they are overwritten. A rank that has fewer
        requests than others, or none, runs their propose with a `num_sampled` of 0 for those that it lacks.

        Args:
            query_len: rows per request in the target's round; K + 1 for the largest K by default.
            bound: from `bind` of this drafter; its own memory by default.

        Raises:
            CapacityError, ConfigError: as in `dispatch`.
        """
        if type(num_requests) is not int:
            num_requests = check("num_requests", num_requests, int)
        if bound is not None and all(bound is not each for each in self.bound):
            raise ConfigError("inputs: these tensors are bound to another drafter")
        return self._passes.find(num_requests, query_len, bound=bound).inputs

    def propose(
        self,
        batch: ProposeBatch,
        *,
        host_start_positions: Sequence[int] | None = None,
        host_num_sampled: Counts | None = None,
        copy: bool = True,
        num_speculative_tokens: int | None = None,
    ) -> DraftTokens:
        """Draft K tokens for each request of `batch`; K follows the batch where there is a schedule.

        Args:
            batch: from `inputs`, written in place; or tensors of the engine's own, which one op copies to the drafter's
                memory first.
            host_start_positions, host_num_sampled: the same numbers as in the batch, one per request, for attention
                with host parameters. `host_num_sampled` may be a function, called when the numbers are needed. Without
                it they are copied to the host while the propose starts; without `host_start_positions` both are read
                from the device, which waits for it.
            copy: whether the result is a copy. False gives views of the drafter's buffers: the next propose overwrites
                them.
            num_speculative_tokens: K, one of `DraftConfig.k_candidates`; what the config says by default.

        Raises:
            ConfigError: what should be a tensor on the drafter's device is something else, or has the wrong shape;
                both shapes are named. With `debug`, a value that no round can have. K is none of those that were
                captured.
            CapacityError: the batch is larger than max_num_requests. Nothing was run.
            StaleInputError: the memory of a bound tensor was exchanged. Nothing was run.
        """
        if not self.refusal:  # as `one_call` does, without its 0.4 microseconds
            self.refusal = RUNNING
        else:
            self.take_turn("propose")
        try:
            if self._checks_values:
                check_options(copy, host_start_positions, host_num_sampled)
            ready = self._passes.hand_over(batch, num_speculative_tokens)
            if self._checks_values:
                check_values(ready.inputs, self.config, self._num_blocks, vocabulary_size(self.head))
            if self._history is not None:
                self._history.check(ready.inputs)
            self.run(ready.model_pass, self._host_lengths(ready, host_start_positions, host_num_sampled))
            self.num_proposes += 1
            if self._history is not None:
                self._history.drafted(ready.inputs, ready.drafts)
            return ready.drafts if copy is False or not check("copy", copy, bool) else ready.drafts.clone()
        except (IndexError, RuntimeError) as error:  # a device that looks at values: the cpu platform
            refuse_values(error, self.config.debug)
            raise
        finally:
            self.refusal = ""

    guards = OneCall.guards | {propose.__code__}

    @one_call
    @checked
    def dispatch(self, num_requests: int, query_len: int | None = None) -> Dispatch:
        """Return the padded size that a batch runs at, and the K that goes with it.

        Raises:
            CapacityError: as in `propose`.
            ConfigError: no K of this drafter makes rounds of `query_len` rows per request.
        """
        return self._passes.find(num_requests, query_len).drafts.dispatch

    @contextmanager
    def unchecked(self) -> Generator[None]:
        """Leave out the checks of `DraftConfig.debug` in the block: for made-up rounds, whose prompts nobody wrote."""
        before = self._history, self._checks_values
        self._history, self._checks_values = None, False
        try:
            yield
        finally:
            self._history, self._checks_values = before

    @one_call
    def prefill(
        self,
        prompt: Sequence[int],
        positions: range,
        blocks: Sequence[int],
        aux_hidden: Tensor | None = None,
        at_least: int = 0,
    ) -> Tensor | None:
        """Write the drafter's KV for a chunk of one prompt; drafts nothing. Call it for each chunk, in order.

        The row of a position takes the target's hidden state there and the token *after* it. So the prompt's last row
        has no token yet: it is left out here, and enters the next propose with the token that the target samples
        (`ProposeBatch.join`). The rows of a `draft_model` take their own tokens, and the last one is written too.

        Args:
            prompt: the token ids of the whole prompt.
            positions: of the chunk's rows; at most as many as the largest prefill size.
            blocks: the request's KV blocks, from position 0 on.
            aux_hidden: [rows, aux_size], the target's hidden states of the chunk; None where the target's pass wrote
                them to `prefill_buffers.aux_hidden`.
            at_least: rows that the pass is padded for at least, where other ranks run the same pass: it then runs
                also without rows.

        Returns:
            [aux_size], the hidden state of the prompt's last row, for `ProposeBatch.join`, if the chunk holds that row:
            a view that the next prefill overwrites.

        Raises:
            CapacityError: more rows than the largest prefill size, or more than `blocks` hold; nothing was run.
            ConfigError: positions outside of the prompt or with gaps, `aux_hidden` of another shape, a tensor for
                numbers that the host reads, a token id outside of the vocabulary, where the head tells its size;
                nothing was run.
            UnsupportedError: the drafter was made with `prompts`.
        """
        return self._own_prefill().run(self, prompt, positions, blocks, aux_hidden, at_least)

    def _host_lengths(
        self, ready: ProposePass, start_positions: Sequence[int] | None, num_sampled: Counts | None
    ) -> LengthsAt | None:
        if not self.attention.host_parameters:
            return None
        now = self._host_numbers.read(ready.model_pass.batch, ready.inputs, start_positions, num_sampled)
        return partial(self.program.host_lengths, host_numbers=now)
