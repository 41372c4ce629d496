"""Bugs of the field and of a foreign set of November 2026: passed by suite 2.0 as it was on 24 November."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from mutants.registry import mutant
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode  # pyright: ignore[reportPrivateUsage]

from specgraph.ops.begin_rows import RowPlan

PAGED: Any = import_module("specgraph.ops.paged_attention")
"""The module: `specgraph.ops` has an op of its name."""


@mutant("window-one-block-short")
def fewer_blocks(patch: pytest.MonkeyPatch) -> None:
    """Attention of plain torch over a window gathers one block too few."""
    real = PAGED._gather_and_attend

    def gather(
        query: Any, cache: Any, table: Any, visible: Any, words: Any, mask: Any, touched: int, scale: Any
    ) -> Any:
        return real(query, cache, table, visible, words, mask, touched - bool(mask.window), scale)

    patch.setattr(PAGED, "_gather_and_attend", gather)


@mutant("quantised-drafter-in-graphs", "specgraph.ops:norm_linear")
def scales_left_out(real: Any, x: Any, norm: Any, weight: Any, *rest: Any) -> Any:
    """A linear over FP8 weights leaves their scales out in a graph."""
    if weight.scale is not None and _get_current_dispatch_mode() is not None:
        weight = weight._replace(scale=torch.ones_like(weight.scale))
    return real(x, norm, weight, *rest)


@mutant("top-k-of-the-last-row", "specgraph_run.decoder.ops:adjust_logits")
def last_top_k(real: Any, logits: Any, temperature: Any, asked: Any, *rest: Any) -> Any:
    """All requests have the top_k of the batch's last row, which may be padding."""
    return real(logits, temperature, asked._replace(top_k=asked.top_k[-1:].expand_as(asked.top_k).contiguous()), *rest)


@mutant("positions-in-16-bits", "specgraph.ops:advance")
def sixteen_bits(real: Any, lengths: Any, positions: Tensor, *rest: Any) -> None:
    """Positions of later draft steps are kept in 16 bits with a sign."""
    real(lengths, positions, *rest)
    positions.copy_(positions.short())


@mutant("positions-in-16-bits-first", "specgraph.ops:begin_rows")
def sixteen_bits_first(real: Any, given: Any, plan: Any, rows: Any, *rest: Any) -> None:
    """Positions of the rows that begin a propose are kept in 16 bits with a sign."""
    real(given, plan, rows, *rest)
    rows.positions.copy_(rows.positions.short())


@mutant("context-of-the-drafter", "specgraph.draft.drafter:check_caches")
def any_length_is_taken(real: Any, head: Any, caches: Any, config: Any, *rest: Any) -> None:
    """max_model_len is not compared with the positions that the drafter was loaded for."""
    real(head, caches, replace(config, max_model_len=config.block_size), *rest)


@mutant("module-past-rows-of-short-texts", "specgraph.ops.begin_rows:RowPlan.seq_len")
def positions_before_0(real: Any, self: RowPlan, start: int, count: int) -> int:
    """Host lengths of a text of fewer positions than are computed again count positions before 0."""
    if count == 0 or self.after_sampled:
        return real(self, start, count)
    return start + self.position_offset - self.past + self.rows


@mutant("expert-groups-masked-with-zero", "specgraph_models.experts:_within_best_groups")
def zero_outside(real: Any, choice: Tensor, config: Any) -> Tensor:
    """Experts outside of the best groups have a score of 0."""
    return real(choice, config).nan_to_num(neginf=0.0)
