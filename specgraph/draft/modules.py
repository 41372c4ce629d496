"""The stepwise program: each draft step runs a module of its own (MTP with several modules), see `ModulesHead`.

No host engine hands over the target's hidden states of past rows a second time, so they are kept by KV block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import AttentionMetadata
from specgraph.attention.rows import ModuleRows
from specgraph.capture import AttentionStack, BatchDescriptor, MakeAttend, StepKind
from specgraph.config import DraftConfig
from specgraph.draft.buffers import Allocation, PassRows, PromptRows
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.kind import Kind
from specgraph.draft.program import make_seeds
from specgraph.draft.protocol import ModulesHead
from specgraph.draft.stepping import StepBuffers, SteppingProgram, draft_one, step_fields
from specgraph.errors import ConfigError
from specgraph.ops.past_rows import PastRows


@dataclass(frozen=True, kw_only=True)
class ModulesBuffers(StepBuffers):
    """The tensors of a program of several modules."""

    plan: ModuleRows
    past: PastRows | None
    """Tokens and hidden states of past rows, kept by KV block. None if no module takes a drafted token."""


class ModulesProgram(SteppingProgram[ModulesHead, ModulesBuffers]):
    """Runs one module per draft step, each over the K - 1 past rows and all rows of the target's pass. So the KV of
    each module is corrected as the text becomes known."""

    step_kind: StepKind = "distinct"

    def allocate(self, new: Allocation) -> ModulesBuffers:
        past, config = None, new.config
        if self.look_ahead:
            kept = new.num_blocks, _kept_rows(config.num_speculative_tokens, config.block_size)
            hidden = new.zeros(*kept, self.head.hidden_size, dtype=self.head.dtype)
            past = PastRows(token_ids=new.zeros(*kept), positions=new.zeros(*kept) - 1, hidden=hidden)
        return ModulesBuffers(**step_fields(new), past=past)

    @property
    def prefill_passes(self) -> int:
        """The number of modules that are used."""
        return self.config.num_speculative_tokens

    def num_steps(self, batch: BatchDescriptor) -> int:
        """Return the number of modules that the largest K uses. At a smaller K the others run too: proposes of more
        tokens need their KV."""
        return self.config.num_speculative_tokens

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        """Return the past rows and the rows of the target's pass. Every draft step runs over all of them."""
        past = self.look_ahead
        rows = query_len + past
        plan = ModuleRows.of(rows, self.config.limits, past)
        return PassRows(plan, {"first": rows, "later": 1, "carried": rows})

    def first(self, b: ModulesBuffers, make_attend: MakeAttend) -> Tensor:
        hidden = self.head.combine(b.inputs.aux_hidden)
        b.plan.fill(b.accepted, b.first.places, b.token_ids, b.reached, (hidden, b.hidden), b.past)
        make_seeds(b)
        if b.past is not None:
            self._keep(b.past, b.token_ids, b.hidden, b.first)
        return self._module(0, b, hidden if b.past is None else b.hidden, make_attend)

    def step(self, b: ModulesBuffers, make_attend: MakeAttend, step: int) -> Tensor:
        ops.shift_token_ids(b.token_ids, b.last_rows, b.step_token_ids, b.step.seq_lens, b.draft_step)
        return self._module(step, b, b.hidden, make_attend)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        """See `DraftProgram.prefill`. Module k takes the token k places further on, or the last token if there is
        none."""
        token_ids, metadata = rows.token_ids, rows.metadata
        hidden, count = self.head.combine(rows.aux_hidden), rows.aux_hidden.shape[0]
        unknown = count + self.look_ahead - token_ids.shape[0]
        if unknown > 0:
            token_ids = torch.cat((token_ids, token_ids[-1:].expand(unknown)))
        if self.buffers.past is not None:
            self._keep(self.buffers.past, token_ids[:count], hidden, metadata)
        for module in range(self.prefill_passes):
            ids = token_ids[module : module + count]
            hidden = self.head.forward_step(module, ids, hidden, make_attend(metadata, module)).carry

    def _keep(self, past: PastRows, token_ids: Tensor, hidden: Tensor, metadata: AttentionMetadata) -> None:
        ops.keep_rows(token_ids, hidden, metadata.positions, metadata.slot_mapping, past, self.config.block_size)

    def _module(self, step: int, b: ModulesBuffers, hidden: Tensor, make_attend: MakeAttend) -> Tensor:
        out = self.head.forward_step(step, b.token_ids, hidden, make_attend(b.first, step))
        if step < b.draft_token_ids.shape[1]:
            draft_one(self.head, b, out.hidden[b.last_rows])
        return out.carry


def _kept_rows(num_speculative_tokens: int, block_size: int) -> int:
    """Return the number of past rows that are kept per KV block: K - 1, but at most the block size."""
    return min(num_speculative_tokens - 1, block_size)


class ModulesKind(Kind[ModulesHead]):
    """See `ModulesHead`."""

    protocol = ModulesHead
    chains = ModulesProgram

    def check_limits(self, head: ModulesHead, config: DraftConfig, stack: AttentionStack) -> None:
        super().check_limits(head, config, stack)
        if not head.attention_layers:
            raise ConfigError("a drafter of several modules has an attention layer for each, and this one has none")
        if config.num_speculative_tokens > head.num_modules:
            raise ConfigError(
                f"num_speculative_tokens is {config.num_speculative_tokens}, and the drafter has {head.num_modules} "
                "modules, one per draft token; ask for fewer tokens, or load it with num_modules=1 (--num-modules 1) "
                "to reuse the first module at every step"
            )

    def no_trees(self, head: ModulesHead) -> str:
        return (
            f"the drafter has {head.num_modules} modules, one per draft token, and draft trees need one that is "
            "used at every step: load it with num_modules=1 (--num-modules 1)"
        )

    def check(self, check: HeadCheck) -> None:
        ids, context = check.inputs()
        for module in range(check.head.num_modules):
            output = check.call("forward_step", module, ids, context, check.attend)
            check.output(f"forward_step({module}, ...)", output, check.rows)
        check.logits()

    def bytes_per_block(self, head: ModulesHead, num_speculative_tokens: int, block_size: int) -> int:
        """Return the bytes of the past rows that are kept per KV block."""
        return _kept_rows(num_speculative_tokens, block_size) * (head.hidden_size * head.dtype.itemsize + 16)
