"""The DSpark draft head: DFlash's block. Each drawn token corrects the logits of the next one.

logits    = lm_head(norm(block)) + W2 @ f(W1[token before])      a low-rank table of tokens and their successors
f         = the row itself (vanilla); the row times a gate made of hidden state and row (gated); the output of a
            recurrent cell over the block (rnn)
confidence = sigmoid(w @ (hidden state, W1[token before]))       the chance that the target accepts the row's token
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from specgraph import ops
from specgraph.draft.logits import NextLogits, RowLogits
from specgraph.ops.linear import Weight
from specgraph_models.decoder import named_tensors
from specgraph_models.dflash import BlockParts, InOrderHead


@dataclass(frozen=True, slots=True)
class MarkovHead:
    """A table of tokens and the tokens that follow them, as a product of rank r."""

    embed: Tensor
    """[vocab_size, r]. The vocabulary is the target's."""
    output: Weight
    """[draft_vocab_size, r]"""
    gate: Weight | None = None
    """[r, hidden_size + r], with a bias. None unless the head is gated."""
    cell: Weight | None = None
    """[3 * r, r + r + hidden_size], with a bias: gate, candidate and output of a recurrent cell. Its inputs are its
    state, the token's row of `embed` and the hidden state. None unless the head is recurrent."""


@dataclass(frozen=True, slots=True)
class ConfidenceHead:
    """The weights that predict the chance that a draft token is accepted."""

    weight: Tensor
    """float32 [1, hidden_size], or [1, hidden_size + r] if it also reads the token before."""
    bias: Tensor | None
    """float32 [1]"""


class DSparkHead(InOrderHead):
    """A DSpark drafter. Implements `BlockHead`."""

    def __init__(
        self, block: BlockParts, markov: MarkovHead, confidence: ConfidenceHead | None, *, in_one: bool = True
    ) -> None:
        """markov, confidence: the two heads on top of the block. in_one: see `DFlashHead`."""
        super().__init__(block, in_one=in_one)
        self.markov, self.confidence_head = markov, confidence
        self.has_confidence = confidence is not None

    def keep_tokens(self, draft_ids: Tensor) -> None:
        super().keep_tokens(draft_ids)
        output = self.markov.output
        self.markov = replace(self.markov, output=output.rows(draft_ids.to(output.matrix.device)))

    def in_order(self, hidden: Tensor) -> NextLogits:
        rows, base = self.base_logits(hidden)
        markov, state = self.markov, hidden.new_zeros(hidden.shape[0], self.markov.embed.shape[1])

        def step(taken: Tensor, now: Tensor) -> Tensor:
            nonlocal state
            if markov.gate is not None:
                gate = ops.norm_linear(torch.cat((now, taken), dim=-1), None, markov.gate)
                taken = torch.sigmoid(gate) * taken
            if markov.cell is not None:
                parts = ops.norm_linear(torch.cat((state, taken, now), dim=-1), None, markov.cell).chunk(3, dim=-1)
                kept = torch.sigmoid(parts[0])
                state = kept * state + (1 - kept) * torch.tanh(parts[1])
                taken = torch.tanh(parts[2])
            return taken

        def following(row: int, token_ids: Tensor) -> RowLogits:
            if markov.gate is None and markov.cell is None:
                return RowLogits(base[row], markov.embed, markov.output, token_ids)
            taken = functional.embedding(token_ids, markov.embed)
            if row == 0 and not self.sample_from_anchor and markov.cell is not None:
                step(taken, hidden[:, 0])  # in training the cell also ran over the anchor's row
            return RowLogits(base[row], step(taken, rows[row]), markov.output)

        return following

    def confidence(self, hidden: Tensor, token_ids: Tensor) -> Tensor:
        head = self.confidence_head
        assert head is not None
        if head.weight.shape[1] > hidden.shape[-1]:
            hidden = torch.cat((hidden, functional.embedding(token_ids, self.markov.embed)), dim=-1)
        return torch.sigmoid(functional.linear(hidden.to(head.weight.dtype), head.weight, head.bias))[..., 0]

    def weights(self) -> Mapping[str, Tensor]:
        own = named_tensors(self.markov, "markov")
        if self.confidence_head is not None:
            own |= named_tensors(self.confidence_head, "confidence")
        return {**own, **super().weights()}
