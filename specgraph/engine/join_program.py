"""What the rounds of the lowering `round` know of each request, and how it gets there when a request joins.

One upload brings everything that the host knows of the request, and one launch puts it, the first token and the
prompt's last hidden state into the request's row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from specgraph import ops
from specgraph.attention import NULL_BLOCK
from specgraph.capture import BatchDescriptor, MakeAttend, Phase, StepKind, write
from specgraph.draft import Drafter, SamplingBuffers
from specgraph.engine.config import EngineConfig
from specgraph.engine.request import Running
from specgraph.engine.round_outputs import RoundOutputs
from specgraph.engine.target import TargetRunner, first_token

MAX_STOP_TOKENS = 16
"""Stop tokens that a request may have when the device looks for them."""

_FIELDS = ("row", "place", "hidden_row", "start_position", "num_sampled", "remaining", "seed", "temperature")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """What a round knows of R requests besides `RoundBuffers`; written when a request joins."""

    remaining: Tensor
    """int64 [R]: tokens that the request may still give."""
    stop_token_ids: Tensor
    """int64 [R, MAX_STOP_TOKENS], filled up with -1."""

    @classmethod
    def allocate(cls, num_requests: int, device: torch.device) -> RoundState:
        """Of requests that may give no token."""
        stops = torch.full((num_requests, MAX_STOP_TOKENS), -1, dtype=torch.int64, device=device)
        return cls(remaining=torch.zeros(num_requests, dtype=torch.int64, device=device), stop_token_ids=stops)

    def named_tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, for the read-set."""
        return {"round.remaining": self.remaining, "round.stop_token_ids": self.stop_token_ids}


class JoinProgram:
    """A request whose prompt was just prefilled takes its row; see `specgraph.capture.model_runner.Program`.

    Afterwards it is a request of a round that sampled one token, as `ProposeBatch.join` makes it.
    """

    phase: Phase = "join"
    step_kind: StepKind = "together"
    later_rows = 1

    def __init__(
        self, target: TargetRunner, drafter: Drafter, config: EngineConfig, state: RoundState, outputs: RoundOutputs
    ) -> None:
        """
        Args:
            target, drafter: whose prefill passes leave the prompt's logits and hidden states.
            state, outputs: written here, and by the rounds.
        """
        self.config, self.state, self.outputs, self.memory = config, state, outputs, target.verify_program.memory
        self.logits, self.hidden = target.prompt_logits, drafter.prefill_buffers.aux_hidden
        device, self._width = target.round.block_table.device, target.round.block_table.shape[1]
        words = len(_FIELDS) + MAX_STOP_TOKENS
        self.inputs = torch.zeros(words + -(-self._width // 2), dtype=torch.int64, device=device)
        """int64: _FIELDS (the temperature as float32), stop tokens, and the block table as int32."""

    def num_steps(self, batch: BatchDescriptor) -> int:
        """No forward pass."""
        return 0

    def batches(self) -> list[BatchDescriptor]:
        """One for each number of rows per request that the round before may have had."""
        return [BatchDescriptor("join", 1, rows, 0) for rows in sorted(self.config.query_lens, reverse=True)]

    def load(self, state: Running, row: int, place: int, hidden_row: int) -> None:
        """Upload what the host knows of a request.

        Args:
            place: of its first token, in `RoundOutputs.first_token_ids`, flat.
            hidden_row: of the prompt's last token, in the last prefill pass.
        """
        request, stops, blocks = state.request, state.request.stop_token_ids, state.blocks
        seed = request.seed
        if not self.config.sampled and self.config.synthetic_acceptance is not None:
            seed = (seed + state.index) % 2**63  # requests of one seed must not all accept alike
        temperature = struct.unpack("<i", struct.pack("<f", request.temperature))[0]
        table = [*blocks, *[NULL_BLOCK] * (self._width + self._width % 2 - len(blocks))]
        numbers = [
            row, place, hidden_row, state.position, 1, state.limit - len(state.token_ids), seed, temperature,
            *stops, *[-1] * (MAX_STOP_TOKENS - len(stops)),
            *(low | high << 32 for low, high in zip(table[::2], table[1::2], strict=True)),
        ]  # fmt: skip
        write(self.inputs, numbers)

    def work_of(self, batch: BatchDescriptor) -> Callable[[Sequence[int], MakeAttend], None]:
        """Sample the first token; write the row."""
        memory, state, query_len, fields = self.memory.round, self.state, batch.query_len, len(_FIELDS)
        own = dict(zip(_FIELDS, self.inputs[:fields].split(1), strict=True))
        row, seed, temperature = own["row"], own["seed"], own["temperature"].view(torch.float32)[:1]
        stops = self.inputs[fields : fields + MAX_STOP_TOKENS]
        table = self.inputs[fields + MAX_STOP_TOKENS :].view(torch.int32)[: self._width]
        first_tokens, logprobs = self.outputs.first_token_ids.view(-1), self.memory.logprobs

        def work(steps: Sequence[int], make_attend: MakeAttend) -> None:
            logits = self._adjusted(row, temperature)
            token = logits.argmax(-1)
            if self.config.sampled:
                token = first_token(logits, temperature, seed, own["start_position"] + 1)
            begin = row * query_len
            hidden = self.hidden.new_zeros((query_len, self.hidden.shape[1]))  # as `ProposeBatch.join` has it
            hidden[:1].copy_(self.hidden.index_select(0, own["hidden_row"]))
            written = [
                (memory.aux_hidden, begin + torch.arange(query_len, device=row.device), hidden),
                (memory.sampled_token_ids, begin, token),
                (memory.num_sampled, row, own["num_sampled"].to(torch.int32)),
                (memory.start_positions, row, own["start_position"]),
                (memory.block_table, row, table[None]),
                (memory.temperature, row, temperature),
                (memory.seeds, row, seed),
                (state.remaining, row, own["remaining"]),
                (state.stop_token_ids, row, stops[None]),
                (first_tokens, own["place"], token),
            ]
            if logprobs is not None:
                found = torch.zeros(1, 1, device=row.device)
                ops.emitted_logprobs(self.logits, token[None], found)
                written.append((logprobs, begin, found[0]))
            for tensor, index, values in written:
                tensor.index_copy_(0, index, values)
            if self.memory.sampling is not None:
                counts = self.memory.sampling.output_counts
                counts.view(-1).index_add_(0, row * counts.shape[1] + token, own["num_sampled"].to(torch.int32))

        return work

    def _adjusted(self, row: Tensor, temperature: Tensor) -> Tensor:
        """[1, vocab]: logits with what the request asks of sampling."""
        buffers = self.memory.sampling
        if buffers is None:
            return self.logits
        own = SamplingBuffers(**{f.name: getattr(buffers, f.name).index_select(0, row) for f in fields(buffers)})
        return own.adjusted(self.logits, row.new_zeros((1, 0)), temperature)

    def make_inert(self) -> None:
        """A request that sampled no token."""
        self.inputs.zero_()

    def named_tensors(self) -> Mapping[str, Tensor]:
        """The upload, what prefill passes leave, and the memory of rounds."""
        read = {"join.inputs": self.inputs, "prefill.logits": self.logits, "prefill.aux_hidden": self.hidden}
        return {**read, **self.memory.named_tensors(), **self.state.named_tensors(), **self.outputs.named_tensors()}
