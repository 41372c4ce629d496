"""The target on a platform: its verify and prefill passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from specgraph_models.target import Target
from torch import Tensor

from specgraph.attention import AttentionBackend, KVCache
from specgraph.attention.caches import num_blocks
from specgraph.capture import (
    MakeAttend,
    ModelRunner,
    Pass,
    PrefillBuffers,
    PrefillProgram,
    allocate_prefill,
)
from specgraph.config import DraftConfig
from specgraph.device import Platform
from specgraph.draft import Drafter
from specgraph.draft.batch import allocate_shared
from specgraph_run.decoder.config import check_recurrent
from specgraph_run.decoder.sampling_buffers import SamplingBuffers
from specgraph_run.decoder.states import RequestStates
from specgraph_run.decoder.verify import VerifyProgram
from specgraph_run.decoder.verify_rows import VerifyRows
from specgraph_run.options import DecoderOptions


class TargetRunner(ModelRunner):
    """Runs a target: verify passes and prefill passes. The KV caches belong to the caller."""

    def __init__(
        self,
        target: Target,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        options: DecoderOptions,
        *,
        attention: AttentionBackend,
        query_len: int,
        drafter: Drafter | None,
        sampling: SamplingBuffers | None,
    ) -> None:
        """
        Args:
            query_len: rows per request of a verify, without a drafter.
            drafter: its drafts are verified. The results go to its buffers: tokens, counts and hidden states of verify
                passes, hidden states of prefill passes. Positions, block tables, temperatures and seeds are shared.
            sampling: the sampling parameters of the requests, which the drafter has too. None if they have none.
        """
        if target.recurrent_layers:
            check_recurrent(config, options)
        super().__init__(target, caches, platform, config, attention)
        self.model, self.config, self.options, self.sampling = target, config, options, sampling
        if drafter is None:
            lens = (query_len,)
            self.shared = allocate_shared(config, lens, 0, target.dtype, platform.device, sampling)
        else:
            self.shared, lens = drafter.shared, config.chain_lens
        if options.logprobs:
            tokens = self.shared.sampled_token_ids
            self.shared = replace(self.shared, logprobs=torch.zeros_like(tokens, dtype=torch.float32))
        self.states: RequestStates | None = None
        """The states of the recurrent layers. None if the target has none."""
        if target.recurrent_layers:
            self.states = RequestStates(
                target.recurrent_layers,
                max_num_requests=config.max_num_requests,
                most_rows=max(lens),
                num_blocks=num_blocks(self.caches),
                dtype=target.dtype,
                device=platform.device,
            )
        given = target, self.stack, config, options, self.states, sampling
        self.verify_programs: dict[bool, VerifyProgram] = {}
        """The verify of chains (key False), of trees (key True), or both."""
        if lens:
            self.verify_programs[False] = VerifyProgram(*given, lens, drafter, self.shared)
        if config.tree is not None and drafter is not None:
            tree = config.tree
            self.verify_programs[True] = VerifyProgram(*given, (tree.num_steps + 1,), drafter, self.shared, tree)
        self.verify_program = next(iter(self.verify_programs.values()))
        shared = None if drafter is None else drafter.prefill_buffers.aux_hidden
        buffers = allocate_prefill(config, 0, target.dtype, platform.device, aux_hidden=shared)
        self.prompt_logits = torch.zeros(1, target.vocab_size, dtype=target.dtype, device=platform.device)
        """[1, vocab]: logits of the last row of the last prefill pass."""
        self._prefill = PrefillProgram(
            buffers=buffers, config=config, forward=partial(_prefill_rows, self.verify_program, self.prompt_logits)
        )
        self.programs += [self._prefill, *self.verify_programs.values()]

    def read_set(self) -> dict[str, Tensor]:
        """Return every persistent tensor that a target graph may touch, by name."""
        states = {} if self.states is None else self.states.named_tensors()
        return super().read_set() | states | {"prefill.logits": self.prompt_logits}

    def verify(self, ready: Pass, start_positions: Sequence[int] = ()) -> None:
        """Run a verify over the rows in the buffers. Its results are in `shared` until the next pass.

        A request with a negative start position in the buffers is inert: its `num_sampled` becomes 0.

        Args:
            start_positions: the position of each request's last token, for attention with host parameters.
        """
        plan = VerifyRows.of(ready.batch.query_len, self.config.limits)
        self.run(ready, lambda step: plan.host_lengths(start_positions, ready.batch.num_requests))

    def prefill(self, token_ids: Sequence[int], first_position: int, blocks: Sequence[int], at_least: int = 0) -> None:
        """Run a prefill chunk of one request: write its KV, its hidden states for the drafter, and `prompt_logits`.

        Args:
            token_ids: consecutive prompt tokens, at most the largest prefill size.
            first_position: the position of `token_ids[0]`.
            blocks: the request's KV blocks, from position 0 on.
            at_least: the least number of rows to pad to. Without tokens the pass is padding alone, and writes no KV.

        Raises:
            CapacityError: more tokens than the largest prefill size; nothing was run.
        """
        self._prefill.run(self, token_ids, first_position, blocks, at_least)


def _prefill_rows(program: VerifyProgram, logits: Tensor, b: PrefillBuffers, make_attend: MakeAttend) -> None:
    recur = None
    if program.states is not None:
        rows = b.token_ids.shape[0]
        recur = program.states.begin(b.first_position, b.num_rows, b.block_table, rows, commits=True)
    out = program.target.forward(b.token_ids, make_attend(b.metadata, 0), program.aux_layers, recur)
    if b.aux_hidden.shape[1]:
        b.aux_hidden.copy_(program.drafter_hidden(out))
    logits.copy_(program.target.logits(out.hidden[b.last_row]))
