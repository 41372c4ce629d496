"""Broken blocks that are drawn in order: the token before a row, its confidence, and the rows that verify them."""

from __future__ import annotations

from typing import Any

import torch
from mutants.registry import mutant
from torch import Tensor


@mutant("head-arithmetic-markov-row", "specgraph_models.dspark:DSparkHead.in_order")
def after_the_anchor(real: Any, self: Any, hidden: Tensor) -> Any:
    """Every row of a block takes the Markov row of the anchor, as if all followed the sampled token."""
    following, anchors = real(self, hidden), list[Tensor]()

    def of_the_anchor(row: int, token_ids: Tensor) -> Tensor:
        anchors.append(token_ids)
        return following(row, anchors[0])

    return of_the_anchor


@mutant("head-arithmetic-markov-row-of-a-neighbour", "specgraph_models.dspark:DSparkHead.in_order")
def after_a_neighbour(real: Any, self: Any, hidden: Tensor) -> Any:
    """A row takes the Markov row of the token before it in the next request."""
    following = real(self, hidden)
    return lambda row, token_ids: following(row, token_ids.roll(1))


@mutant("confidence-of-a-neighbour", "specgraph_models.dspark:DSparkHead.confidence")
def confidence_of_the_next_request(real: Any, self: Any, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """A request has the confidence of the request before it in the batch."""
    right = real(self, hidden, token_ids)
    return torch.cat((right[-1:], right[:-1]))


@mutant("confidence-of-a-neighbour-row", "specgraph_models.dspark:DSparkHead.confidence")
def confidence_of_the_token(real: Any, self: Any, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """The confidence of a draft token is computed with the row's own token in place of the one before it."""
    return real(self, hidden, torch.cat((token_ids[:, 1:], token_ids[:, :1]), dim=1))


@mutant("ragged-rows", "specgraph_run.decoder.ops:begin_ragged_rows")
def rows_swapped(real: Any, given: Any, plan: Any, rows: Any, ragged: Any) -> None:
    """The columns of a ragged verify are those of the request before: its logits decide over another's drafts."""
    real(given, plan, rows, ragged)
    ragged.columns.copy_(ragged.columns.view(len(ragged.confidence), -1).roll(1, 0).flatten())


@mutant("ragged-rows-alone", "specgraph_run.decoder.ops:begin_ragged_rows")
def alone(real: Any, given: Any, plan: Any, rows: Any, ragged: Any) -> None:
    """A draft counts as likely as it is by itself, whatever is drafted before it."""
    before = torch.cat((torch.ones_like(ragged.confidence[:, :1]), ragged.confidence[:, :-1]), dim=1)
    real(given, plan, rows, ragged._replace(confidence=ragged.confidence / before))


@mutant("ragged-rows-unverified", "specgraph_run.decoder.ops:begin_ragged_rows")
def unverified(real: Any, given: Any, plan: Any, rows: Any, ragged: Any) -> None:
    """Drafts without a row stay drafts: logits of the row before decide over them."""
    kept = given.draft_token_ids.clone()
    real(given, plan, rows, ragged)
    given.draft_token_ids.copy_(kept)
