"""The decoding loop: it prefills target and drafter, then runs rounds until all requests are generated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from specgraph_run.decoder import AcceptanceMetrics
from torch import Tensor

from specgraph import Drafter, ProposeBatch
from specgraph_transformers.acceptance import Acceptance
from specgraph_transformers.output import Output
from specgraph_transformers.target import TransformersTarget


class Rounds:
    """Generates n requests together. All start at once, and each becomes inert when it can use no more tokens."""

    def __init__(
        self,
        target: TransformersTarget,
        drafter: Drafter,
        acceptance: Acceptance,
        output: Output,
        metrics: AcceptanceMetrics,
    ) -> None:
        self.target, self.drafter, self.acceptance, self.output = target, drafter, acceptance, output
        self.metrics = metrics
        self._prompts = output.sequences
        self._starts: list[int] = []
        self._counts: list[int] = []

    def run(self, attention_mask: Tensor | None, position_ids: Tensor | None) -> None:
        """Generate until the stopping criteria end the generation.

        Args:
            attention_mask, position_ids: the prompts' tensors for `TransformersTarget.prefill`.
        """
        logits, aux = self.target.prefill(self._prompts, attention_mask, position_ids)
        first = self.acceptance.first_tokens(logits, self._prompts)
        for row, token in enumerate(first.tolist()):
            self.output.append(row, [token])
        del logits
        ended = self.output.advance()
        if not ended:
            batch = self._join(aux, first)
            del aux
            while not ended:
                ended = self._round(batch)

    def _join(self, aux: Tensor, first: Tensor) -> ProposeBatch:
        """Prefill the drafter, and return the first round's batch. Each request joins it with its first token."""
        device, config = self.drafter.platform.device, self.drafter.config
        lengths, columns = self.target.lengths, self._prompts.shape[1]
        batch = self.drafter.inputs(len(lengths))
        batch.block_table.zero_()
        batch.start_positions.copy_(torch.tensor(lengths) - 1)
        if config.sampled:
            assert batch.temperature is not None
            assert batch.seeds is not None
            batch.temperature.fill_(self.acceptance.temperature)
            batch.seeds.copy_(torch.randint(1 << 62, (len(lengths),)))  # torch.manual_seed makes the output repeatable
        for row, (prompt, length) in enumerate(zip(self._prompts.tolist(), lengths, strict=True)):
            blocks = [1 + row * config.max_blocks + block for block in range(config.max_blocks)]
            batch.block_table[row].copy_(torch.tensor(blocks, dtype=torch.int32))
            tokens, states, chunk = prompt[columns - length :], aux[row, columns - length :], config.prefill_rows[-1]
            hidden = None
            for start in range(0, length, chunk):
                positions = range(start, min(start + chunk, length))
                hidden = self.drafter.prefill(tokens, positions, blocks, states[start : positions.stop].to(device))
            batch.join(row, first[row].to(device), hidden)
        self._hand_over(batch, [length - 1 for length in lengths], [1] * len(lengths))
        return batch

    def _round(self, batch: ProposeBatch) -> bool:
        """Propose, verify, and hand over to the next round. Returns True if generation has ended."""
        output, target = self.output, self.target
        live = [output.drafting(row) for row in range(batch.num_requests)]
        drafts = self.drafter.propose(
            batch,
            host_start_positions=self._starts,
            host_num_sampled=self._counts,
        )
        last = torch.tensor([tokens[-1] for tokens in output.token_ids], device=drafts.token_ids.device)
        rows = torch.cat([last[:, None], drafts.token_ids], dim=1).to(self._prompts.device)
        logits, aux = target.verify(rows)
        starts = [length if on else -1 for length, on in zip(target.lengths, live, strict=True)]
        batch.start_positions.copy_(torch.tensor(starts))
        prefixes = self._prefixes(drafts.token_ids) if self.acceptance.reads_prefixes else []
        self.acceptance.verify(logits, prefixes, drafts, batch, self.drafter.head.draft_to_target)
        batch.aux_hidden.copy_(aux.flatten(0, 1))
        counts = batch.num_sampled.tolist()
        kept = [0] * len(live)
        for row, tokens in enumerate(batch.sampled_token_ids.tolist()):
            if live[row]:
                self.metrics.observe([counts[row] - 1], rows.shape[1] - 1)
                kept[row] = output.append(row, tokens[: counts[row]])
        self.metrics.rounds += 1
        ended = output.advance()
        if ended and len(kept) == 1:  # tokens that the stopping criteria cut off
            kept[0] -= len(output.token_ids[0]) - output.num_columns
        target.keep(kept)
        self._hand_over(batch, starts, counts)
        return ended

    def _prefixes(self, drafts: Tensor) -> list[Tensor]:
        """Return, for each row of each request, int64 [1, tokens]: the padded prompt, the output, and the drafts up to
        the row's own."""
        found: list[Tensor] = []
        for prompt, output, tokens in zip(self._prompts, self.output.token_ids, drafts.tolist(), strict=True):
            after = torch.tensor([*output, *tokens], dtype=prompt.dtype, device=prompt.device)
            whole = torch.cat([prompt, after])[None]
            found += [whole[:, : whole.shape[1] - len(tokens) + row] for row in range(len(tokens) + 1)]
        return found

    def _hand_over(self, batch: ProposeBatch, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Make requests inert that can use no more tokens, and keep the next propose's host numbers.

        Args:
            starts, counts: the start positions and `num_sampled` of the last verify, equal to the batch on the device.
        """
        live = [self.output.drafting(row) for row in range(batch.num_requests)]
        self._starts = [start if on else 0 for start, on in zip(starts, live, strict=True)]
        self._counts = [count if on else 0 for count, on in zip(counts, live, strict=True)]
        if self._counts != list(counts):
            batch.num_sampled.copy_(torch.tensor(self._counts, dtype=torch.int32))
