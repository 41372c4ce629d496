"""The host's record of the keys in a drafter's KV cache, kept with `DraftConfig.debug`.

A host engine with counts, positions or blocks that are wrong by one leaves slots of a request without a key, or puts
two requests into one block. The only symptom is that fewer drafts are accepted. So the host notes the keys that
`prefill` and `propose` write, and refuses a batch that needs keys that were never written.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specgraph.config import DraftConfig
from specgraph.draft.batch import DraftTokens, ProposeBatch
from specgraph.errors import ConfigError

NO_POSITION = -1


class KVHistory:
    """For each slot of the KV cache, the position of the key that it holds.

    When the first slot of a block is written, the block belongs to a new request, and the keys in its other slots are
    forgotten. Keys of an earlier request therefore count for the new request only if it never writes that first slot.
    """

    def __init__(self, config: DraftConfig, num_blocks: int, position_offset: int) -> None:
        """num_blocks: blocks of each KV cache. position_offset: see `Kind.position_offset`."""
        self._config, self._offset = config, position_offset
        self.positions = torch.full((num_blocks, config.block_size), NO_POSITION)
        """int64 [num_blocks, block_size], on the host."""
        self._drafted: dict[tuple[int, int], list[int]] = {}
        """The last drafts of each request. The key is the slot of the first position of their verify: (block, place in
        the block)."""

    def wrote(self, positions: range, blocks: Sequence[int]) -> None:
        """Note that the keys of these positions were written. blocks: the request's, from position 0 on."""
        for position in positions:
            column, at = divmod(position, self._config.block_size)
            if position < self._config.max_model_len and column < len(blocks) and blocks[column]:
                if at == 0:  # a new request owns the block
                    self.positions[blocks[column]].fill_(NO_POSITION)
                self.positions[blocks[column], at] = position  # a row past the limits above writes nothing

    def check(self, batch: ProposeBatch) -> None:
        """Check a batch, and note the keys that it writes.

        Raises ConfigError if two requests share a block that one of them writes, if a key before a request's rows is
        missing, or if a request accepts tokens that were not drafted for it.
        """
        counts, starts = batch.num_sampled.tolist(), batch.start_positions.tolist()
        sampled = batch.sampled_token_ids.tolist()
        table = batch.block_table.tolist()
        live = [request for request, count in enumerate(counts) if count > 0]
        self._check_blocks(live, starts, batch.query_len, table)
        for request in live:
            begin = starts[request] + self._offset
            self._check_keys(request, starts[request], begin, table[request])
            self._check_accepted(request, starts[request], sampled[request][: counts[request] - 1], table[request])
            self.wrote(range(begin, begin + counts[request]), table[request])

    def drafted(self, batch: ProposeBatch, drafts: DraftTokens) -> None:
        """Note the drafts that a propose returned for a batch. Drafts of trees are not noted: the host engine chooses
        the path that it accepts."""
        counts, starts, table = batch.num_sampled.tolist(), batch.start_positions.tolist(), batch.block_table.tolist()
        for request, tokens in enumerate(drafts.token_ids.tolist()):
            place = self._place(starts[request] + counts[request], table[request])
            if counts[request] and place is not None:
                self._drafted[place] = tokens if drafts.parents is None else []

    def _place(self, position: int, blocks: Sequence[int]) -> tuple[int, int] | None:
        column, at = divmod(position, self._config.block_size)
        return (blocks[column], at) if column < len(blocks) and blocks[column] else None

    def _check_accepted(self, request: int, start: int, accepted: list[int], blocks: Sequence[int]) -> None:
        """Check that a request's accepted tokens are its last drafts. Skipped if no drafts are noted for `start`."""
        place = self._place(start, blocks)
        drafts = None if place is None else self._drafted.get(place)
        if drafts and accepted[: len(drafts)] != drafts[: len(accepted)]:
            raise ConfigError(
                f"sampled_token_ids of request {request} begin with {accepted}, accepted drafts by num_sampled, and "
                f"the last propose drafted {drafts} at position {start}: they begin with the first accepted draft, not "
                "with the verify's first input, and belong to the same request as the drafts (if another proposer "
                "drafted for this verify, n-gram lookup say, leave debug off)"
            )

    def _check_blocks(self, live: Sequence[int], starts: Sequence[int], rows: int, table: list[list[int]]) -> None:
        """Check that no block that one request writes in this propose belongs to another request too."""
        size, limit = self._config.block_size, self._config.max_model_len
        ends = {request: -(-min(starts[request] + 2 * rows, limit) // size) for request in live}
        users: dict[int, list[int]] = {}
        for request, end in ends.items():
            for block in filter(None, table[request][:end]):
                users.setdefault(block, []).append(request)
        for request, end in ends.items():
            for block in table[request][starts[request] // size : end]:
                if block and len(users[block]) > 1:
                    other = next((other for other in users[block] if other != request), request)
                    raise ConfigError(
                        f"block_table of requests {request} and {other} both have block {block}, which this round "
                        f"writes for request {request}: only blocks before start_positions are shared; fill up with 0 "
                        "behind a request's own blocks, and make finished requests inert (num_sampled 0)"
                    )

    def _check_keys(self, request: int, start: int, begin: int, blocks: Sequence[int]) -> None:
        """Check that every position before a request's first row has its key. Positions in null blocks are skipped:
        their blocks were freed behind an attention window."""
        expected = torch.arange(min(begin, self._config.max_model_len))
        known = torch.tensor(blocks)[expected // self._config.block_size]
        held = self.positions[known, expected % self._config.block_size]
        lacking = expected[(held != expected) & (known != 0)]
        if len(lacking):
            first, rest = int(lacking[0]), f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
            raise ConfigError(
                f"start_positions of request {request} is {start}, and the drafter never wrote the key of position "
                f"{first}{rest} into the request's blocks: look at the start_positions and num_sampled of its rounds, "
                "and at the chunks of its prefill (a prompt that came with a prefix cache hit, or another way, has its "
                "drafter's keys written too)"
            )
