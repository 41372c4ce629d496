"""Checks of a batch: types and shapes before a propose copies it, and values with `DraftConfig.debug`.

A kernel can't refuse a token id beyond the vocabulary or a block that is not in the cache. It reads other memory, and
the only symptom is drafts that are never accepted. The checks of values wait for the device.
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
_all_of, _needed_of = attrgetter(*_TENSORS), attrgetter(*_NEEDED)  # one C call, since each propose checks shapes


def vocabulary_size(head: Head) -> int | None:
    """Return the size of the target's vocabulary. None if the head doesn't reveal it."""
    if head.draft_to_target is None:
        return head.draft_vocab_size
    return None if head.pair_input is None else head.pair_input.table.shape[0]


@checked
def check_options(copy: bool, host_start_positions: Sequence[int] | None, host_num_sampled: Counts | None) -> None:
    """Check the types of a propose's options. Raises ConfigError if one is wrong."""


def check_types(call: str, batch: Any, device: torch.device) -> None:
    """Check the types of a batch. Raises ConfigError if it is no `ProposeBatch`, or if a tensor is on another device,
    has another layout, has no memory, or mixes up floats and integers.

    call: the name of the method that was given the batch, for the error.
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
        # A freed storage has no bytes, which is quick to see. `is_freed` alone would also find a storage that was made
        # shorter, but it takes 0.3 microseconds more for each tensor of each propose.
        if not value.untyped_storage().nbytes() and is_freed(value):
            raise ConfigError(f"{call}: the storage of {name} is freed: give a tensor that has its memory")
    if (ids := batch.sampled_token_ids).dim() != 2:
        raise ConfigError(f"sampled_token_ids is {list(ids.shape)}, expected [requests, K + 1]")
    if (counts := batch.num_sampled).dim() != 1:
        raise ConfigError(f"num_sampled is {list(counts.shape)}, expected [requests]")


def check_shapes(call: str, batch: ProposeBatch, wanted: ProposeBatch, sampled: bool, dtypes: bool = False) -> None:
    """Check the shapes of a batch. Raises ConfigError, with both shapes, if a tensor differs from `wanted`.

    Args:
        wanted: the drafter's own tensors for this batch. The block table may have fewer columns.
        sampled: temperatures and seeds are needed. Otherwise they are not looked at.
        dtypes: compare dtypes too.
    """
    names, of = (_TENSORS, _all_of) if sampled else (_NEEDED, _needed_of)
    for name, given, own in zip(names, of(batch), of(wanted), strict=True):
        if given is None:
            raise ConfigError(f"{call}: a sampled drafter needs {name} with every batch, and it is None")
        expected = own.shape
        wrong_type = dtypes and given.dtype != own.dtype and own.numel() > 0  # empty hidden states have any dtype
        if given.shape == expected and not wrong_type:
            continue
        if name == "block_table" and given.dim() == 2:
            expected = torch.Size((expected[0], max(1, min(expected[1], given.shape[1]))))
        if given.shape != expected or wrong_type:
            is_type, want_type = (f" {given.dtype}", f" {own.dtype}") if dtypes else ("", "")
            limit = " or fewer columns: DraftConfig.max_blocks" if name == "block_table" else ""
            wants = f"{list(expected)}{want_type}{limit}"
            raise ConfigError(f"{call}: {name} is {list(given.shape)}{is_type}, expected {wants}")


def refuse_sampling(call: str, batch: ProposeBatch) -> None:
    """Raise ConfigError if the batch of a greedy drafter has temperatures or seeds: it would ignore them."""
    if given := [name for name in _OPTIONAL if getattr(batch, name) is not None]:
        raise ConfigError(
            f"{call}: {' and '.join(given)} given to a drafter that is greedy: make it with DraftConfig(sampled=True), "
            "or leave them out"
        )


def refuse_values(error: IndexError | RuntimeError, debug: bool) -> None:
    """Explain the error of a failed propose. Raises ConfigError if its cause is a value of the batch, or the torch mode
    that it was called in."""
    if isinstance(error, RuntimeError):
        refuse_mode("propose", error)
    elif not debug:
        raise ConfigError(
            f"propose: a token id, position, count or block of the batch is out of range ({first_line(error)}): "
            "DraftConfig(debug=True) names it"
        ) from error


def check_values(batch: ProposeBatch, config: DraftConfig, num_blocks: int, vocab_size: int | None) -> None:
    """Check the values of the live requests of a batch. Raises ConfigError, with the tensor, the request and the value,
    if a value is impossible. vocab_size: see `vocabulary_size`."""
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
    """Yield (name of a tensor, bool mask of its wrong values, text on the allowed ones). Later rules rely on the
    earlier ones."""
    counts, starts, rows = batch.num_sampled, batch.start_positions, batch.query_len
    yield "num_sampled", (counts < 0) | (counts > rows), f"it is 0 (inert) to {rows}, K + 1"
    live = counts > 0
    # The last verify of a request may accept drafts past max_model_len. No caller takes them, and kernels skip the rows
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
    # Rows behind num_sampled count too: their keys are written and masked, but a masked NaN stays NaN
    wrong = (live[:, None, None] & ~hidden.isfinite()).flatten(1)
    yield "aux_hidden", wrong, "hidden states are finite in all rows, also in those behind num_sampled"
