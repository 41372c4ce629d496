"""Checks of a batch: its types and shapes before a propose copies it; its values, with `DraftConfig.debug`.

A kernel can't refuse a token id beyond the vocabulary or a block that is not in the cache: it reads other memory, and
the drafts are merely never accepted. The checks of values wait for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from specgraph.config import DraftConfig
from specgraph.draft.batch import ProposeBatch
from specgraph.draft.host_lengths import Counts
from specgraph.draft.protocol import Head
from specgraph.errors import ConfigError, first_line
from specgraph.ops.tensor_forms import INTEGERS, is_freed
from specgraph.validation import checked, refuse_mode

_TENSORS = tuple(field.name for field in fields(ProposeBatch))
_OPTIONAL = ("temperature", "seeds")
_NEEDED = tuple(name for name in _TENSORS if name not in _OPTIONAL)
_FLOATS = ("temperature", "aux_hidden")
_all_of, _needed_of = attrgetter(*_TENSORS), attrgetter(*_NEEDED)  # a propose checks shapes each time: one C call


def vocabulary_size(head: Head) -> int | None:
    """Return the number of token ids that the target has; None where its head doesn't tell."""
    if head.draft_to_target is None:
        return head.draft_vocab_size
    return None if head.pair_input is None else head.pair_input.table.shape[0]


@checked
def check_options(copy: bool, host_start_positions: Sequence[int] | None, host_num_sampled: Counts | None) -> None:
    """Refuse options of a propose that are of another type."""


def check_types(call: str, batch: Any, device: torch.device) -> None:
    """Raise ConfigError for what is no batch of tensors on the drafter's device, or has fractions where integers
    belong; `call` was given it.
    """
    if not isinstance(batch, ProposeBatch):
        raise ConfigError(f"{call} takes a ProposeBatch, got a {type(batch).__name__}")
    for name in _TENSORS:
        value: Any = getattr(batch, name)
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, Tensor):
            raise ConfigError(f"{call}: {name} is a {type(value).__name__}: give a tensor on {device}")
        if value.device != device:
            raise ConfigError(f"{call}: {name} is on {value.device}: give a tensor on {device}")
        if not (value.is_floating_point() if name in _FLOATS else value.dtype in INTEGERS) and value.numel():
            kind = "floats" if name in _FLOATS else "integers"
            raise ConfigError(f"{call}: {name} is {value.dtype}: give {kind}, as ProposeBatch has them")
        if value.layout is not torch.strided:
            raise ConfigError(f"{call}: {name} is {value.layout}: give a plain tensor, such as {name}.to_dense()")
        # A storage that was freed has no bytes. `is_freed` alone also sees one that was made shorter, and takes 0.3
        # microseconds more for each tensor of each propose.
        if not value.untyped_storage().nbytes() and is_freed(value):
            raise ConfigError(f"{call}: the storage of {name} is freed: give a tensor that has its memory")
    if (ids := batch.sampled_token_ids).dim() != 2:
        raise ConfigError(f"sampled_token_ids is {list(ids.shape)}, expected [requests, K + 1]")
    if (counts := batch.num_sampled).dim() != 1:
        raise ConfigError(f"num_sampled is {list(counts.shape)}, expected [requests]")


def check_shapes(call: str, batch: ProposeBatch, wanted: ProposeBatch, sampled: bool, dtypes: bool = False) -> None:
    """Raise ConfigError, naming both shapes, for a tensor of another shape than the drafter's own for the batch,
    `wanted`; a block table may have fewer columns.

    Temperatures and seeds are needed where drafts are `sampled`, and not looked at otherwise; with `dtypes`, dtypes
    count too.
    """
    names, of = (_TENSORS, _all_of) if sampled else (_NEEDED, _needed_of)
    for name, given, own in zip(names, of(batch), of(wanted), strict=True):
        if given is None:
            raise ConfigError(f"{call}: a sampled drafter needs {name} with every batch, and it is None")
        expected = own.shape
        wrong_type = dtypes and given.dtype != own.dtype and own.numel() > 0  # no hidden states: of any type
        if given.shape == expected and not wrong_type:
            continue
        if name == "block_table" and given.dim() == 2:
            expected = torch.Size((expected[0], max(1, min(expected[1], given.shape[1]))))
        if given.shape != expected or wrong_type:
            is_type, want_type = (f" {given.dtype}", f" {own.dtype}") if dtypes else ("", "")
            raise ConfigError(f"{call}: {name} is {list(given.shape)}{is_type}, expected {list(expected)}{want_type}")


def refuse_sampling(call: str, batch: ProposeBatch) -> None:
    """Raise ConfigError for a batch with temperatures or seeds, which a greedy drafter would not look at."""
    if given := [name for name in _OPTIONAL if getattr(batch, name) is not None]:
        raise ConfigError(
            f"{call}: {' and '.join(given)} given to a drafter that is greedy: make it with DraftConfig(sampled=True), "
            "or leave them out"
        )


def refuse_values(error: IndexError | RuntimeError, debug: bool) -> None:
    """Raise ConfigError where a propose failed by the values of its batch, or by the mode that it was called in."""
    if isinstance(error, RuntimeError):
        refuse_mode("propose", error)
    elif not debug:
        raise ConfigError(
            f"propose: a token id, position, count or block of the batch is out of range ({first_line(error)}): "
            "DraftConfig(debug=True) names it"
        ) from error


def check_values(batch: ProposeBatch, config: DraftConfig, num_blocks: int, vocab_size: int | None) -> None:
    """Raise ConfigError, naming the tensor, the request and the value, for values that no round can have.

    Requests with num_sampled 0 are inert, and not looked at. `vocab_size`: see `vocabulary_size`.
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
    hidden = batch.aux_hidden.view(batch.num_requests, rows, batch.aux_hidden.shape[1])
    # Of the rows behind num_sampled too: their keys are written, masked, and a masked value of NaN is NaN
    wrong = (live[:, None, None] & ~hidden.isfinite()).flatten(1)
    yield "aux_hidden", wrong, "hidden states are finite in all rows, also in those behind num_sampled"
