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
from specgraph.device import Platform
from specgraph.draft.batch import DraftTokens, ProposeBatch, allocate_shared
from specgraph.draft.batch_checks import check_options, check_types, check_values, refuse_values, vocabulary_size
from specgraph.draft.bound import BoundTensors
from specgraph.draft.cache_checks import check_caches
from specgraph.draft.head_checks import check_members, check_passes, tell_unrotated
from specgraph.draft.host_lengths import Counts, HostNumbersReader
from specgraph.draft.kv_history import KVHistory
from specgraph.draft.prefill import DraftPrefill
from specgraph.draft.program import DraftProgram
from specgraph.draft.propose_passes import ProposePass, ProposePasses
from specgraph.draft.protocol import Head, LogitsAdjustment
from specgraph.errors import CaptureError, ConfigError, UnsupportedError
from specgraph.ops.tensor_forms import check_named
from specgraph.validation import RUNNING, OneCall, check, checked, one_call


class Drafter(ModelRunner):
    """Proposes K draft tokens for each request of a batch, through graphs captured once at start-up.

    A host engine proposes like this:

        inputs = drafter.inputs(n)          # views of the drafter's memory: write the target's results there
        drafts = drafter.propose(inputs)    # or propose(ProposeBatch(...)) with the host engine's tensors: one copy

    If the host engine's tensors keep their addresses, `bind` them before the capture. The graphs then read them, and
    `inputs(n, bound=...)` returns views of them.

    A new prompt goes through `prefill`, one prefill chunk after the other. It joins the next propose by
    `ProposeBatch.join`.

    Only one call may run at a time: a second one is refused, from any thread. The drafter owns its graphs and buffers.
    The head and the KV caches belong to the caller.
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
        sampling: LogitsAdjustment | None = None,
        prompts: Callable[[DraftProgram[Any, Any]], Program] | None = None,
    ) -> None:
        """
        Args:
            head: any `Head`. Its kind decides the draft program.
            caches: one KV cache per attention layer of the head; none for a head without attention.
            platform: where to run.
            config: limits and choices.
            attention: the attention backend. The default is the core's paged attention with device lengths.
            sampling: adjusts the logits of chains by what each request asks for besides temperature, in memory that
                the caller writes. None: temperature alone decides; the output is lossless all the same.
            prompts: makes the caller's own program for prompts, from a draft program of the head. It is captured in
                place of the program of `prefill`, and the caller runs it.

        Raises:
            ConfigError: the head or the attention backend lacks a member of its protocol, the caches do not fit the
                head, the config or the device, `sampling` is for fewer requests or another vocabulary, or the head
                cannot draft K tokens or has too few positions.
            UnsupportedError: this platform cannot run the lowering of the config.
        """
        attention = PagedAttention() if attention is None else attention
        check_members(attention, head, trees=config.tree is not None)
        check_caches(head, caches, config, platform.device, attention)
        if sampling is not None:
            sampling.check(config.max_num_requests, vocabulary_size(head), platform.device)
        if not head.kind.has_probs:
            config = replace(config, draft_sampling="greedy")
        config = config.with_prefill_sizes(platform.capabilities.longest_prefill)
        super().__init__(head, caches, platform, config, attention)
        self.head, self.config = head, config
        self.shared = allocate_shared(config, config.query_lens, head.aux_size, head.dtype, platform.device, sampling)
        """The memory of `inputs`, in which the target leaves its results."""
        self.draft_programs = head.kind.programs(head, self.stack, config, self.shared)
        """The programs of chains (False) and of trees (True): one of them, or both."""
        self.program = next(iter(self.draft_programs.values()))
        self.position_offset = self.program.position_offset
        """See `Kind.position_offset`."""
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
        """The results of `bind`, in order."""
        self.num_proposes = 0
        """Proposes so far."""
        self._passes = ProposePasses(self, config, self.shared, self.draft_programs)
        self._host_numbers = HostNumbersReader(platform, config.max_num_requests)

    @one_call
    def bind(self, tensors: ProposeBatch) -> BoundTensors:
        """Have the graphs read the host engine's own tensors: the copy to the drafter's memory is then in the graphs.

        Call it before `capture`, which then captures every size once more for these tensors. Propose from them by
        `propose(inputs(n, bound=...))`. Several sets may be bound, for proposes in turns.

        The drafter keeps the tensors. It writes `num_sampled` only: 0 for all requests at capture, and 0 for the
        padding of each propose.

        Args:
            tensors: for the largest batch, with R = max_num_requests and Q = the largest query_len; dtypes as in
                `ProposeBatch`. sampled_token_ids is [R, Q]: a batch of fewer rows uses the first columns. aux_hidden is
                [R * Q, aux_size], packed by the rows of the batch. block_table has at most the drafter's columns.

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

    def _check(self) -> None:
        """Check the shapes that the head returns in one small pass. Raises ConfigError if a method fails, or returns
        another shape than its protocol demands."""
        check_named(f"attention '{self.attention.name}'.named_tensors()", self.attention.named_tensors())
        check_passes(self.head, self.config.query_len, self.platform.device)
        tell_unrotated(self.head, self.attention)

    @property
    def prefill_buffers(self) -> PrefillBuffers:
        """Return the memory of a prefill pass. A target's prefill pass can write its hidden states there."""
        return self._own_prefill().buffers

    def _own_prefill(self) -> DraftPrefill:
        if self._prefill is None:
            raise UnsupportedError("prefill: this drafter's prompts are written by the program that `prompts` made")
        return self._prefill

    @property
    def rows_without_block(self) -> int:
        """The number of rows without a KV block, over all proposes so far. Reading it waits for the device.

        Such a row has a sampled or draft token below max_model_len, and the null block in the block table. Its key is
        not written, and the drafts get worse. The graphs count these rows, also without `debug`.
        """
        return int(self.shared.rows_without_block)

    @one_call
    def inputs(
        self, num_requests: int, query_len: int | None = None, bound: BoundTensors | None = None
    ) -> ProposeBatch:
        """Return the drafter's own memory for a batch, or bound tensors. Write them in place, and give them to
        `propose`.

        The same arguments return the same object, and its contents stay until they are overwritten. If ranks run a
        propose together, each asks for the same number of requests, and sets `num_sampled` of surplus requests to 0.

        Args:
            query_len: rows per request in the target's pass. The default is K + 1 for the largest K.
            bound: a result of this drafter's `bind`. The default is the drafter's own memory.

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
        """Draft K tokens for each request of `batch`. If the config has a `draft_schedule`, it gives K by batch size.

        Args:
            batch: the result of `inputs`, written in place. Or the host engine's own tensors, which are copied to the
                drafter's memory first.
            host_start_positions, host_num_sampled: the same numbers as in the batch, one per request, as host integers.
                Attention with host parameters needs them. Without `host_start_positions` both are read from the device
                first, which waits for it. If only `host_num_sampled` is missing, its numbers are copied to the host
                while the propose starts. `host_num_sampled` may be a function, which is called when its numbers are
                needed.
            copy: return a copy. If it is False, the result is views of the drafter's buffers, and the next propose
                overwrites them.
            num_speculative_tokens: K, one of `DraftConfig.k_candidates`. By default the config decides.

        Raises:
            ConfigError: an input is no tensor, is on another device, or has a wrong shape; the error names both shapes.
                With `debug`, an impossible value. A K that was not captured.
            CapacityError: the batch is larger than max_num_requests. Nothing was run.
            StaleInputError: the memory of a bound tensor was replaced. Nothing was run.
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
        except (IndexError, RuntimeError) as error:  # the cpu platform checks values
            refuse_values(error, self.config.debug)
            raise
        finally:
            self.refusal = ""

    guards = OneCall.guards | {propose.__code__}

    @one_call
    @checked
    def dispatch(self, num_requests: int, query_len: int | None = None) -> Dispatch:
        """Return the padded size that a batch runs at, and its K.

        Raises:
            CapacityError: as in `propose`.
            ConfigError: `query_len` is not K + 1 for any K of this drafter.
        """
        return self._passes.find(num_requests, query_len).drafts.dispatch

    @contextmanager
    def unchecked(self) -> Generator[None]:
        """Turn the checks of `DraftConfig.debug` off within the block. Timing uses it: its requests have no prompt in
        the KV cache."""
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
        """Write the drafter's KV of one prefill chunk. Call it for each prefill chunk of a prompt, in order.

        The row of a position takes the target's hidden state there and the token *after* it. For the prompt's last row
        this token is not known yet. The row is left out here, and the next propose runs it with the token that the
        target samples (`ProposeBatch.join`). A head of `DraftModelKind` takes each row's own token, so its last row
        is written here.

        Args:
            prompt: the token ids of the whole prompt.
            positions: the positions of the chunk; at most as many as the largest prefill size.
            blocks: the request's KV blocks, from position 0 on.
            aux_hidden: [rows, aux_size]: the target's hidden states of the chunk. None if the target's pass wrote them
                to `prefill_buffers.aux_hidden`.
            at_least: the least number of rows to pad for. Ranks that run a prefill together pass the same number; the
                pass then runs even if this rank has no rows.

        Returns:
            [aux_size]: the hidden state of the prompt's last row, for `ProposeBatch.join`: a view that the next prefill
            overwrites. None if the chunk does not hold that row.

        Raises:
            CapacityError: more rows than the largest prefill size, or more than `blocks` hold. Nothing was run.
            ConfigError: positions outside of the prompt or with gaps, `aux_hidden` of another shape, a tensor in place
                of host numbers, or a token id outside of the vocabulary (if the head reveals its size). Nothing was
                run.
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
