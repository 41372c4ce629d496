"""A drafter over a host engine's weights and KV cache, which drafts after the engine's passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any
from zlib import crc32

import torch
from specgraph_models.parallel import Ranks
from specgraph_models.start_up import PATIENCE, agreed, agreed_captures
from torch import Tensor

from specgraph.attention import AttentionBackend, KVCache
from specgraph.device import Platform
from specgraph.draft import DraftConfig, Drafter, DraftTokens
from specgraph.draft.host_lengths import Counts
from specgraph.draft.program import DraftProgram
from specgraph.draft.protocol import DraftHead, ParallelHead
from specgraph.errors import ConfigError, RankError, UnsupportedError
from specgraph_plugin.prompts import PromptChunk, PromptPass, PromptProgram
from specgraph_plugin.verify_output import VerifyOutput, fill_batch


class FastPath:
    """A captured drafter for a host engine's plugin. Make it when the engine captures its own graphs.

    It owns its graphs and buffers; the engine owns the weights and the KV cache. It is not thread-safe.
    """

    def __init__(
        self,
        head: DraftHead | ParallelHead,
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
        ranks: Ranks | None = None,
        rank_parts: Collection[str] = (),
        compare_every: int = 1000,
        module: Any = None,
        attention: AttentionBackend | None = None,
    ) -> None:
        """Make the drafter, and capture every size.

        Args:
            max_num_requests: the most requests in a batch of the host engine.
            max_num_rows: the most rows in one pass of the host engine, with the rows of prompts.
            sampled: True if drafts are sampled by temperature. Every `VerifyOutput` then needs `temperature` and
                `seeds`.
            capture_sizes: request counts to capture; by default a ladder up to `max_num_requests`. A batch larger than
                the largest of them can't be drafted for.
            ranks: the ranks that split the head. All of them make this object and make the same calls to it.
            rank_parts: the names of split tensors in the head's `weights()`; each rank has its own part
                (`DecoderModel.rank_parts`). Every rank has all other tensors whole; they are compared at start-up.
            compare_every: the number of proposes between two comparisons of the ranks' tokens. A comparison waits for
                the device. 0 compares at start-up only.
            module: the torch module that has the head's weights. `weights_moved` checks the addresses of its tensors.
            attention: the attention backend. None for the core's paged attention with device lengths.

        Raises:
            ConfigError, UnsupportedError, CaptureError: `Drafter` or its `capture` raises it.
            ConfigError: `rank_parts` has a name that the head has not.
            UnsupportedError: the propose uses several MTP modules.
            RankError: only some of the ranks raise one of these errors.
        """
        self.prompts: PromptProgram
        """The drafter's program that writes the keys and values of prompts."""
        self._head, self._ranks, self._rank_parts, self._compare_every = head, ranks, rank_parts, compare_every
        owners = [] if module is None else [owner._parameters for owner in module.modules()]
        self._weights = [(owner, name) for owner in owners for name, tensor in owner.items() if tensor is not None]
        self._addresses = self._weight_addresses()
        sizes = None if capture_sizes is None else sorted({min(size, max_num_requests) for size in capture_sizes})
        with agreed(ranks):
            if unknown := sorted(set(rank_parts) - head.weights().keys()):
                raise ConfigError(
                    f"rank_parts has {', '.join(unknown)}, which {type(head).__name__}.weights() has not: give names "
                    "of its tensors"
                )
            self.config = DraftConfig(
                num_speculative_tokens=num_speculative_tokens,
                max_num_requests=max_num_requests if sizes is None else sizes[-1],
                max_model_len=max_model_len,
                block_size=block_size,
                capture_sizes=sizes,
                sampled=sampled,
            )

            def prompts(program: DraftProgram[Any, Any]) -> PromptProgram:
                if program.look_ahead:
                    raise UnsupportedError(
                        "several MTP modules take tokens further on in a prompt than the rows of an engine's pass: "
                        "give one module (num_modules=1), or draft by Drafter, whose prefill takes the whole prompt"
                    )
                self.prompts = PromptProgram(program, max_num_rows)
                return self.prompts

            self.drafter = Drafter(head, caches, platform, self.config, attention=attention, prompts=prompts)
            self._reach = 2 * self.config.query_len - (not self.drafter.program.has_row_of_last_draft)
        with agreed(ranks, PATIENCE):
            self.drafter.capture(agreed_captures(ranks))

    def weights_moved(self) -> bool:
        """Return True if the host engine has replaced tensors of weights, on all ranks.

        The graphs then read the old memory: make a new FastPath. An update in place is no replacement.

        Raises:
            RankError: the engine has replaced tensors on this rank, but not on another one.
        """
        if self._weight_addresses() == self._addresses:
            return False
        if self._ranks is not None:
            self._ranks.exchange("the drafter's weights lie elsewhere")
        return True

    def _weight_addresses(self) -> list[int]:
        """Return the address of each of the module's weights. An update in place does not change it."""
        return [0 if (tensor := owner.get(name)) is None else tensor.data_ptr() for owner, name in self._weights]

    def warm_up(self, *outputs: VerifyOutput) -> None:
        """Compile and load the kernels of `fill` and `write_prompts`, which are in no graph. Call it at start-up.

        With ranks, also compare their weights and the draft tokens of a made-up request.

        Args:
            outputs: a `VerifyOutput` of each form that `fill` will get, since each form has its own kernel. The dtypes
                of the tensors, and which of them are None, make a form. Each has one request with a table of zeros and
                `num_sampled` 0.

        Raises:
            RankError: the ranks differ in weights or draft tokens.
        """
        with agreed(self._ranks, PATIENCE):
            for output in outputs:
                self.fill(output)
            output = outputs[-1]
            self.write_prompts(
                PromptPass(
                    chunks=[PromptChunk(first_row=0, num_rows=1, position=0, table_row=0, next_row=0)],
                    token_ids=output.token_ids,
                    next_tokens=output.num_sampled,
                    hidden_states=output.hidden_states,
                    table=output.table,
                    table_of_slots=output.table_of_slots,
                )
            )
            if self._ranks is not None:
                whole = [own for name, own in self._head.weights().items() if name not in self._rank_parts]
                self._compare("start-up", *whole, self._draft_without_blocks())

    @torch.no_grad()
    def _draft_without_blocks(self) -> Tensor:
        """Return draft tokens for a made-up request, the same on every rank. It writes no keys."""
        inputs = self.drafter.inputs(1)
        hidden = torch.randn(inputs.aux_hidden.shape, generator=torch.Generator().manual_seed(0))
        for name, value in (("num_sampled", 1), ("sampled_token_ids", 1), ("start_positions", 0), ("block_table", 0)):
            getattr(inputs, name).fill_(value)
        inputs.aux_hidden.copy_(hidden)
        return self.propose(1).token_ids

    def _compare(self, when: str, *tensors: Tensor) -> None:
        """Raise RankError on every rank if the bits of these tensors differ between ranks."""
        assert self._ranks is not None
        digest = 0
        for tensor in tensors:
            digest = crc32(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes(), digest)
        digests = self._ranks.exchange(f"the comparison at {when}", [digest])
        if other := [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]:
            members = self._ranks.members
            raise RankError(
                f"rank {members[other[0]]} and rank {members[0]} draft from other tokens or weights, or other tokens "
                f"from the same, at {when}: start the engine again with the same folders and versions on every rank",
                everywhere=True,
            )

    @torch.no_grad()
    def write_prompts(self, given: PromptPass) -> None:
        """Write the keys and values of the prompt rows of a pass. Call it before `fill` of the same pass.

        If a prompt ends in the pass, its request drafts from the prompt's last row (`VerifyOutput.first_rows`).
        """
        self.prompts.run(self.drafter, given)

    def fill(self, output: VerifyOutput) -> None:
        """Copy a verify's results into the drafter's buffers. `propose` then reads only weights and KV cache besides.

        Raises ConfigError if drafts are sampled and `output` has no temperature or no seeds.
        """
        inputs, given = self.drafter.inputs(output.num_requests), dict[str, Tensor | None]()
        if self.config.keeps_draft_probs:
            given = {"temperature": output.temperature, "seeds": output.seeds}
        for name, tensor in given.items():
            if tensor is None:
                raise ConfigError(f"drafts are sampled, and the VerifyOutput has no {name}: give it one")
        fill_batch(output, inputs, *self.config.limits, self._reach)
        for name, tensor in given.items():
            getattr(inputs, name).copy_(tensor)

    def propose(
        self,
        num_requests: int,
        host_start_positions: Sequence[int] | None = None,
        host_num_sampled: Counts | None = None,
    ) -> DraftTokens:
        """Draft for the batch of the last `fill`. The result is views of buffers that the next propose overwrites.

        The host numbers are those of `Drafter.propose`, for attention that takes lengths from the host.

        Raises RankError if a comparison of the ranks finds other tokens or drafts, or if a rank is missing from it.
        """
        inputs, every = self.drafter.inputs(num_requests), self._compare_every
        drafts = self.drafter.propose(
            inputs, host_start_positions=host_start_positions, host_num_sampled=host_num_sampled, copy=False
        )
        if self._ranks is not None and every and self.drafter.num_proposes % every == 0:
            given = inputs.sampled_token_ids, inputs.num_sampled, inputs.start_positions
            self._compare(f"propose {self.drafter.num_proposes}", *given, drafts.token_ids)
        return drafts
