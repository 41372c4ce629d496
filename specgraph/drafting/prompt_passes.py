"""A model's prompt passes, padded to captured sizes: the same for a target and for a drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specgraph.drafting.config import DraftConfig
from specgraph.drafting.prompt import PromptBuffers, prompt_descriptor, prompt_lengths
from specgraph.graphs import AttentionStack, Body, GraphRunner, MakeAttend, PassMode, Recording, StepLengths

PromptWork = Callable[[PromptBuffers, MakeAttend], None]
"""What a model does with a pass's rows, once positions, slots and lengths are there."""


class PromptPasses:
    """Owns the captured prompt passes of one model. Not thread-safe: one pass at a time."""

    def __init__(
        self,
        buffers: PromptBuffers,
        stack: AttentionStack,
        config: DraftConfig,
        work: PromptWork,
        *,
        mode: PassMode,
        num_steps: int,
        runner: GraphRunner | None,
    ) -> None:
        """
        Args:
            buffers: for passes of up to the config's largest prompt size.
            stack: the model's attention.
            config: limits and prompt sizes.
            work: the model's part of a pass.
            mode: how passes run.
            num_steps: forward passes with attention in `work`, numbered from 0.
            runner: where to capture; None where nothing is captured.
        """
        self.buffers, self.runner = buffers, None if mode == "eager" else runner
        self._stack, self._config, self._work, self._num_steps = stack, config, work, num_steps
        self._mode: PassMode = mode

    def capture(self) -> None:
        """Capture every prompt size, largest first; does nothing where passes run eagerly."""
        if self.runner is None:
            return
        self.buffers.num_rows.zero_()  # warm-up really runs: every row is inert
        for size in reversed(self._config.prompt_sizes):
            self.runner.capture(prompt_descriptor(size, self._config.prompt_sizes), self._body(size))

    def run(self, token_ids: Sequence[int], first_position: int, blocks: Sequence[int]) -> None:
        """Run consecutive rows of one prompt.

        Args:
            token_ids: one a row, at most the largest prompt size.
            first_position: position of the first row.
            blocks: the request's KV blocks from position 0 on.

        Raises:
            CapacityError: more rows than the largest prompt size; nothing was run.
        """
        plan = prompt_descriptor(len(token_ids), self._config.prompt_sizes)
        self.buffers.load(token_ids, first_position, blocks)
        lengths: StepLengths = {}
        if self._stack.backend.host_parameters:
            lengths = dict.fromkeys(range(self._num_steps), prompt_lengths(first_position, plan.query_len))
        if self.runner is not None and plan in self.runner:
            self.runner.replay(plan, lengths)
        else:
            self._body(plan.query_len, lengths)(None)  # padded too: matmuls change their last bit with the rows

    def _body(self, rows: int, lengths: StepLengths | None = None) -> Body:
        buffers = self.buffers.sliced(rows)

        def body(recording: Recording | None) -> None:
            buffers.begin(self._config.max_model_len, self._config.block_size)
            self._work(buffers, self._stack.attend_in(recording, self._mode, lengths))

        return body
