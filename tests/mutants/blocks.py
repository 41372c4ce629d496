"""Broken blocks that are drawn in order: the token before a row, and the confidence of its own."""

from __future__ import annotations

from typing import Any

from mutants.registry import mutant
from torch import Tensor


@mutant("block-in-order", "models.dspark:DSparkHead.in_order")
def after_the_anchor(real: Any, self: Any, hidden: Tensor) -> Any:
    """Every row of a block takes the Markov row of the anchor, as if all followed the sampled token."""
    following, anchors = real(self, hidden), list[Tensor]()

    def of_the_anchor(row: int, token_ids: Tensor) -> Tensor:
        anchors.append(token_ids)
        return following(row, anchors[0])

    return of_the_anchor


@mutant("block-in-order-of-a-neighbour", "models.dspark:DSparkHead.in_order")
def after_a_neighbour(real: Any, self: Any, hidden: Tensor) -> Any:
    """A row takes the Markov row of the token before it in the next request."""
    following = real(self, hidden)
    return lambda row, token_ids: following(row, token_ids.roll(1))


@mutant("confidence-of-a-neighbour", "models.dspark:DSparkHead.confidence")
def confidence_of_the_next_request(real: Any, self: Any, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """A request has the confidence of the request before it in the batch."""
    return real(self, hidden, token_ids).roll(1, 0)


@mutant("confidence-of-a-neighbour-row", "models.dspark:DSparkHead.confidence")
def confidence_of_the_token(real: Any, self: Any, hidden: Tensor, token_ids: Tensor) -> Tensor:
    """The confidence of a draft token is computed with the row's own token in place of the one before it."""
    return real(self, hidden, token_ids.roll(-1, 1))
