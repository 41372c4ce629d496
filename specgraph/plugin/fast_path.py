"""A drafter over an engine's weights and KV cache, which drafts after the engine's passes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph.attention import KVCache
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, DraftTokens
from specgraph.models.protocol import DraftHead
from specgraph.plugin.prompts import Chunk, PromptPass, PromptProgram
from specgraph.plugin.round_end import RoundEnd, fill_round


class FastPath:
    """The drafter with every captured size. Make it when the engine captures its own graphs.

    Not thread-safe. Owns its graphs and buffers; weights and KV cache are the engine's.
    """

    def __init__(
        self,
        head: DraftHead,
        caches: Sequence[KVCache],
        platform: Platform,
        *,
        num_speculative_tokens: int,
        max_num_requests: int,
        max_model_len: int,
        block_size: int,
        max_num_rows: int = 2048,
        sampled: bool = False,
        capture_sizes: Sequence[int] | None = None,
    ) -> None:
        """Capture.

        Args:
            max_num_requests: of a batch of the engine.
            max_num_rows: of one pass of the engine, prompts' rows included.
            sampled: drafts are drawn by temperature; `RoundEnd` has temperatures and seeds.
            capture_sizes: numbers of requests to capture; by default a ladder up to `max_num_requests`. The largest is
                the largest batch that can be drafted for.

        Raises:
            ConfigError, UnsupportedError, CaptureError: as of `Drafter` and its `capture`.
        """
        sizes = None if capture_sizes is None else sorted({min(size, max_num_requests) for size in capture_sizes})
        self.config = DraftConfig(
            num_speculative_tokens=num_speculative_tokens,
            max_num_requests=max_num_requests if sizes is None else sizes[-1],
            max_model_len=max_model_len,
            block_size=block_size,
            capture_sizes=sizes,
            sampled=sampled,
            prefill_sizes=(1,),  # `PromptProgram` takes the place of the drafter's own prompts
        )
        self.drafter = Drafter(head, caches, platform, self.config)
        self.prompts = PromptProgram(self.drafter.program, max_num_rows)
        self.drafter.programs = [self.prompts, *self.drafter.draft_programs]
        self.drafter.capture()

    def warm_up(self, *ends: RoundEnd) -> None:
        """Compile and load the kernels that hand rounds and prompts over, which no graph has; call it at start-up.

        Args:
            ends: one request each, without blocks: a table of zeros and a `num_sampled` of 0. One of every form that
                the engine hands over: the dtypes of its tensors, and which of them are None, are those of a kernel.
        """
        for end in ends:
            self.fill(end)
        end = ends[-1]
        self.write_prompts(
            PromptPass(
                chunks=[Chunk(request=0, first_row=0, num_rows=1, position=0)],
                token_ids=end.token_ids,
                next_tokens=end.num_sampled,
                hidden_states=end.hidden_states,
                table=end.table,
                table_of_slots=end.table_of_slots,
                table_rows=end.table_rows,
            )
        )

    @torch.no_grad()
    def write_prompts(self, given: PromptPass) -> None:
        """Write the keys and values of rows in prompts, before `fill` of the same pass. Requests whose prompts end
        there draft with their last row (`RoundEnd.first_rows`), which is written once more."""
        self.prompts.run(self.drafter, given)

    def fill(self, end: RoundEnd) -> None:
        """Take the round over; nothing of the engine's is read after it but weights and KV cache."""
        inputs = self.drafter.inputs(end.num_requests)
        fill_round(end, inputs, self.config.max_model_len, self.config.block_size)
        for name in ("temperature", "seeds") if self.config.keeps_draft_probs else ():
            getattr(inputs, name).copy_(getattr(end, name))

    def propose(self, num_requests: int) -> DraftTokens:
        """Draft after `fill`; the result is views of the drafter's memory, which the next propose overwrites."""
        return self.drafter.propose(self.drafter.inputs(num_requests), copy=False)
