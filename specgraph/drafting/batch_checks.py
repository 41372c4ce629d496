"""The values of a batch, checked on the host before a propose: `DraftConfig.debug`.

A kernel can't refuse a token id beyond the vocabulary or a block that is not in the cache: it reads other memory, and
the drafts are merely never accepted. The checks wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from specgraph.drafting.config import DraftConfig
from specgraph.drafting.round import ProposeBatch
from specgraph.errors import ConfigError


def check_values(batch: ProposeBatch, config: DraftConfig, num_blocks: int, vocab_size: int | None) -> None:
    """Refuse values that no round can have. Requests with num_sampled 0 are inert, and not looked at.

    Args:
        num_blocks: of each KV cache.
        vocab_size: of the target, where it is known.

    Raises:
        ConfigError: naming the tensor, the request and the value.
    """
    for what, wrong, allowed in _rules(batch, config, num_blocks, vocab_size):
        bad = wrong.flatten(1).any(1).nonzero().flatten() if wrong.dim() > 1 else wrong.nonzero().flatten()
        if len(bad):
            request = int(bad[0])
            values = getattr(batch, what)
            row: Any = values.view(batch.num_requests, -1)[request]
            shown = row[wrong.view(batch.num_requests, -1)[request]][:4].tolist()
            raise ConfigError(f"{what} of request {request} is {shown[0] if len(shown) == 1 else shown}: {allowed}")


def _rules(
    batch: ProposeBatch, config: DraftConfig, num_blocks: int, vocab_size: int | None
) -> Iterator[tuple[str, Tensor, str]]:
    """(name of a tensor, where it is wrong, what is allowed); later rules rely on the earlier ones."""
    counts, starts, rows = batch.num_sampled, batch.start_positions, batch.query_len
    yield "num_sampled", (counts < 0) | (counts > rows), f"it is 0 (inert) to {rows}, K + 1"
    live = counts > 0
    # A request's last round may accept drafts past max_model_len, which nobody takes; kernels leave those rows out
    yield (
        "start_positions",
        live & ((starts < 0) | (starts >= config.max_model_len)),
        f"it is 0 to {config.max_model_len - 1}, below max_model_len",
    )
    ids, columns = batch.sampled_token_ids, counts.new_tensor(range(rows))
    sampled = columns[None] < counts[:, None]
    beyond = ids < 0 if vocab_size is None else (ids < 0) | (ids >= vocab_size)
    least = "at least 0" if vocab_size is None else f"0 to {vocab_size - 1}"
    yield "sampled_token_ids", sampled & beyond, f"token ids are {least}"
    table = batch.block_table
    yield "block_table", live[:, None] & ((table < 0) | (table >= num_blocks)), f"blocks are 0 to {num_blocks - 1}"
    needed = ((starts + counts).clamp(max=config.max_model_len) + config.block_size - 1) // config.block_size
    within = counts.new_tensor(range(table.shape[1]))[None] < needed[:, None]
    yield (
        "block_table",
        live[:, None] & within & (table == 0),
        "block 0 is the null block, which no request owns; the tokens so far need a block of the request's own here",
    )
    hidden = batch.aux_hidden.view(batch.num_requests, rows, -1)
    # Of the rows behind num_sampled too: their keys are written, masked, and a masked value of NaN is NaN
    wrong = (live[:, None, None] & ~hidden.isfinite()).flatten(1)
    yield "aux_hidden", wrong, "hidden states are finite in all rows, also in those behind num_sampled"
