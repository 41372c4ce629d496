"""The prefill passes of a drafter: the tokens and hidden states of a prompt that each row takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specgraph.capture import MakeAttend, ModelRunner, PrefillBuffers, PrefillProgram, allocate_prefill
from specgraph.draft.batch import has_states
from specgraph.draft.batch_checks import vocabulary_size
from specgraph.draft.buffers import PromptRows
from specgraph.draft.kv_history import KVHistory
from specgraph.draft.program import DraftProgram
from specgraph.errors import ConfigError
from specgraph.ops.tensor_forms import described
from specgraph.validation import check, checked


class DraftPrefill:
    """Writes the drafter's KV for prompts, one prefill chunk after the other; see `Drafter.prefill`."""

    def __init__(self, program: DraftProgram[Any, Any], num_blocks: int, history: KVHistory | None) -> None:
        """num_blocks: blocks of each KV cache. history: notes the keys that the passes write. None without `debug`."""
        head, config, device = program.head, program.config, program.buffers.shared.seeds.device
        self._num_blocks, self._block_size, self._history = num_blocks, config.block_size, history
        self._position_offset, self._look_ahead = program.position_offset, program.look_ahead
        self._vocab_size = vocabulary_size(head)
        self.buffers = allocate_prefill(config, head.aux_size, head.dtype, device, look_ahead=program.look_ahead)

        def forward(b: PrefillBuffers, make_attend: MakeAttend) -> None:
            program.prefill(PromptRows(b.token_ids, b.aux_hidden, b.metadata, b.last_row), make_attend)

        self.program = PrefillProgram(
            buffers=self.buffers, config=config, forward=forward, num_passes=program.prefill_passes
        )

    @checked
    def run(
        self,
        runner: ModelRunner,
        prompt: Sequence[Any],
        positions: range,
        blocks: Sequence[int],
        aux_hidden: Tensor | None,
        at_least: int,
    ) -> Tensor | None:
        """See `Drafter.prefill`. Only the tokens that this pass takes are checked. runner: runs `self.program`."""
        states, last, offset = self.buffers.aux_hidden, len(prompt) - 1, self._position_offset
        if positions.start < 0 or positions.stop > len(prompt) or positions.step != 1:
            raise ConfigError(f"prefill of {positions}: give consecutive positions of its {len(prompt)} tokens")
        self.program.dispatch(max(len(positions), at_least))
        if aux_hidden is not None:
            expected = [len(positions), states.shape[1]]
            if list(aux_hidden.shape) != expected or not has_states(aux_hidden):
                raise ConfigError(f"aux_hidden of a prefill is {described(aux_hidden)}, expected {expected} floats")
        begin, end = positions.start + 1 - offset, min(positions.stop, last + offset) + 1 - offset
        tokens, following = prompt[begin:end], prompt[end : end + self._look_ahead]
        written = range(positions.start, positions.start + len(tokens))
        self._check_tokens(check("prompt", [*tokens, *following], Sequence[int]))
        self._check_blocks(written, blocks)
        if aux_hidden is not None:
            states[: len(positions)].copy_(aux_hidden.detach())
        if tokens or at_least:
            self.program.run(runner, tokens, positions.start, blocks, at_least, following)
            if self._history is not None:
                self._history.wrote(written, blocks)
        return states[last - positions.start] if last in positions else None

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        """Refuse token ids outside of the vocabulary: the device would read memory outside of the embedding."""
        least, most = min(tokens, default=0), max(tokens, default=0)
        if least < 0 or (self._vocab_size is not None and most >= self._vocab_size):
            allowed = "at least 0" if self._vocab_size is None else f"0 to {self._vocab_size - 1}"
            raise ConfigError(f"token {least if least < 0 else most} in the prompt of a prefill: ids are {allowed}")

    def _check_blocks(self, written: range, blocks: Sequence[int]) -> None:
        """Refuse blocks that no request can own. The null block is allowed outside of the rows that are written."""
        first, end = written.start // self._block_size, -(-written.stop // self._block_size)
        for place, block in enumerate(blocks):
            if not (0 if first <= place < end else -1) < block < self._num_blocks:
                raise ConfigError(
                    f"prefill of positions {written.start} to {written.stop - 1} into block {block}: a request's "
                    f"blocks are 1 to {self._num_blocks - 1} in this drafter's caches, block 0 is the null block"
                )
