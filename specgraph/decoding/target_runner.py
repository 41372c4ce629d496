"""The target on a platform: prompt passes, and verify passes of K + 1 rows a request, from graphs as the mode says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specgraph import kernels
from specgraph.attention import AttentionBackend, HostLengths, KVCache, PagedAttention, named_cache_tensors
from specgraph.decoding.verify_buffers import VerifyOutputs, allocate_verify
from specgraph.drafting import (
    DraftConfig,
    PromptBuffers,
    PromptPasses,
    acceptance_chances,
    allocate_prompt,
    resolve,
)
from specgraph.graphs import (
    AttentionStack,
    BatchDescriptor,
    Body,
    Dispatch,
    GraphMode,
    GraphRunner,
    MakeAttend,
    Recording,
    StepLengths,
    dispatch,
)
from specgraph.models.protocol import Target, TargetOutput
from specgraph.platforms import Platform


class TargetRunner:
    """Owns the target's graphs and buffers; the KV caches belong to the caller."""

    def __init__(
        self,
        target: Target,
        caches: Sequence[KVCache],
        platform: Platform,
        config: DraftConfig,
        *,
        query_lens: Sequence[int],
        aux_layers: Sequence[int] = (),
        outputs: VerifyOutputs | None = None,
        prompt_aux: Tensor | None = None,
        draft_vocab_size: int | None = None,
        draft_to_target: Tensor | None = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        """
        Args:
            config: limits, capture sizes, mode and lowering; `sampled` decides the verify op.
            query_lens: rows a request that a verify may have: K + 1 for every K, ascending.
            aux_layers: hidden states that the drafter takes; the final one when empty.
            outputs: where a verify puts its results; tensors of its own, without hidden states, by default.
            prompt_aux: [rows, aux_size], where a prompt pass puts hidden states; nowhere by default.
            draft_vocab_size: columns of the draft distributions, for a sampled drafter.
            draft_to_target: the drafter's vocabulary map.
            attention: the core's paged attention by default.
        """
        self.target, self.caches, self.platform, self.config = target, tuple(caches), platform, config
        self.query_lens, self.aux_layers, self.draft_to_target = tuple(query_lens), tuple(aux_layers), draft_to_target
        self.attention: AttentionBackend = attention or PagedAttention()
        self.stack = AttentionStack(self.attention, target.attention_layers, self.caches)
        self.resolution = resolve(config.lowering, platform.capabilities, self.attention.host_parameters, config.mode)
        device, dtype = platform.device, target.dtype
        self.buffers = allocate_verify(config, self.query_lens, outputs, draft_vocab_size, dtype, device)
        chances = (0.0,) * (self.query_lens[-1] - 1)
        if config.synthetic_acceptance is not None and chances:
            chances = acceptance_chances(config.synthetic_acceptance, len(chances))
        self._chances = torch.tensor(chances, dtype=torch.float32, device=device)
        self._prompt_logits = torch.zeros(1, target.vocab_size, dtype=dtype, device=device)
        self.runner: GraphRunner | None = None
        if self.resolution.mode is not GraphMode.NONE:
            self.runner = GraphRunner(platform, self.read_set, check_inputs=config.check_inputs)
        self.prompts = PromptPasses(
            allocate_prompt(config, 0, dtype, device, prompt_aux),
            self.stack,
            config,
            self._prefill,
            mode=self.resolution.mode.prefill,
            num_steps=1,
            runner=self.runner
            and GraphRunner(platform, self.read_set, check_inputs=config.check_inputs, beside=self.runner),
        )

    def read_set(self) -> dict[str, Tensor]:
        """Every persistent tensor that a target graph may touch, by name."""
        named = {f"weights.{name}": tensor for name, tensor in self.target.weights().items()}
        if self.draft_to_target is not None:
            named["draft_to_target"] = self.draft_to_target
        named |= self.attention.named_tensors()
        named |= {**self.buffers.named_tensors(), **self.prompts.buffers.named_tensors()}
        return {
            "prompt.logits": self._prompt_logits,
            "synthetic_acceptance": self._chances,
            **named,
            **named_cache_tensors(self.caches, "kv_cache"),
        }

    def capture(self) -> None:
        """Capture every size that the mode asks for, largest first; does nothing in mode NONE."""
        if self.runner is None:
            return
        self.prompts.capture()
        self.buffers.start_positions.fill_(-1)
        for size in reversed(self.config.sizes):
            for query_len in reversed(self.query_lens):
                batch = BatchDescriptor("verify", size, query_len, query_len - 1)
                self.runner.capture(batch, self._verify_body(batch))

    def dispatch(self, num_requests: int, query_len: int) -> Dispatch:
        """The padded size that a verify runs at."""
        return dispatch("verify", num_requests, query_len, query_len - 1, self.config.sizes)

    def verify(self, num_requests: int, start_positions: Sequence[int], query_len: int | None = None) -> None:
        """One target pass over what stands in the buffers; results are in `buffers` until the next pass.

        Args:
            num_requests: real requests, in the first rows.
            start_positions: the same numbers as in the buffers, for attention with host parameters.
            query_len: rows a request; the most by default.
        """
        plan = self.dispatch(num_requests, query_len or self.query_lens[-1])
        batch = plan.descriptor
        self.buffers.start_positions[num_requests : batch.num_requests].fill_(-1)
        lengths = self._lengths(start_positions, batch)
        if self.runner is not None and plan.captured:
            self.runner.replay(batch, lengths)
        else:
            self._verify_body(batch, lengths)(None)

    def prefill(self, token_ids: Sequence[int], first_position: int, blocks: Sequence[int]) -> Tensor:
        """Run one request's prompt chunk, writing its KV, and its hidden states to the drafter.

        Args:
            token_ids: consecutive prompt tokens, at most the largest prompt size.
            first_position: position of the first of them.
            blocks: the request's KV blocks from position 0 on.

        Returns:
            Logits of the last row, [vocab]; overwritten by the next prefill.

        Raises:
            CapacityError: more tokens than the largest prompt size; nothing was run.
        """
        self.prompts.run(token_ids, first_position, blocks)
        return self._prompt_logits[0]

    def close(self) -> None:
        """Release graphs and their memory."""
        for runner in (self.runner, self.prompts.runner):
            if runner is not None:
                runner.close()

    def _for_drafter(self, out: TargetOutput) -> Tensor:
        return out.aux_hidden if self.aux_layers else out.hidden

    def _lengths(self, start_positions: Sequence[int], batch: BatchDescriptor) -> StepLengths:
        if not self.attention.host_parameters:
            return {}
        size, rows = batch.num_requests, batch.query_len
        seq_lens = [start + rows for start in start_positions]
        return {0: HostLengths([rows] * size, seq_lens + [0] * (size - len(seq_lens)))}

    def _verify_body(self, batch: BatchDescriptor, lengths: StepLengths | None = None) -> Body:
        b, mode = self.buffers.sliced(batch.num_requests, batch.query_len), self.resolution.mode.decode

        def body(recording: Recording | None) -> None:
            make_attend = self.stack.attend_in(recording, mode, lengths)
            kernels.begin_verify(
                b.last_token_ids,
                b.draft_token_ids,
                b.start_positions,
                b.block_table,
                max_model_len=self.config.max_model_len,
                block_size=self.config.block_size,
                token_ids=b.token_ids,
                positions=b.metadata.positions,
                slot_mapping=b.metadata.slot_mapping,
                seq_lens=b.metadata.seq_lens,
            )
            out = self.target.forward(b.token_ids, make_attend(b.metadata, 0), self.aux_layers)
            if b.aux_hidden.shape[1]:
                b.aux_hidden.copy_(self._for_drafter(out))
            logits = self.target.logits(out.hidden)
            if self.config.synthetic_acceptance is not None:
                kernels.verify_synthetic(
                    logits,
                    b.draft_token_ids,
                    self._chances[: batch.query_len - 1],
                    b.seeds,
                    b.start_positions,
                    b.sampled_token_ids,
                    b.num_sampled,
                )
            elif self.config.sampled:
                kernels.verify_sampled(
                    logits,
                    b.draft_token_ids,
                    b.draft_probs,
                    self.draft_to_target,
                    b.temperature,
                    b.seeds,
                    b.start_positions,
                    b.sampled_token_ids,
                    b.num_sampled,
                )
            else:
                kernels.verify_greedy(logits, b.draft_token_ids, b.start_positions, b.sampled_token_ids, b.num_sampled)

        return body

    def _prefill(self, prompt: PromptBuffers, make_attend: MakeAttend) -> None:
        out = self.target.forward(prompt.token_ids, make_attend(prompt.metadata, 0), self.aux_layers)
        if prompt.aux_hidden.shape[1]:
            prompt.aux_hidden.copy_(self._for_drafter(out))
        self._prompt_logits.copy_(self.target.logits(out.hidden[prompt.last_row]))
