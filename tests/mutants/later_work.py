"""Bugs that show where work runs later than it is issued, in torch's own ops, and in who waits: passed by suite 1.3."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from mutants.platform_lifetimes import LaterLaunches
from mutants.registry import mutant
from specgraph_run.decoder import admission
from specgraph_run.decoder.request import Running
from specgraph_run.decoder.sampling_buffers import SamplingBuffers
from torch import Tensor

from specgraph.cpu.stream import CpuEvent, CpuStream


@mutant("query-before-the-work")
def queries_are_true(patch: pytest.MonkeyPatch) -> None:
    """query() of streams and events is always true."""
    LaterLaunches(patch)


@mutant("query-before-the-work-stream")
def stream_query_is_true(patch: pytest.MonkeyPatch) -> None:
    """query() of a stream is always true, that of an event is not."""
    later = LaterLaunches(patch)
    patch.setattr(CpuEvent, "query", lambda self: not later.waiting)


@mutant("event-of-the-current-stream", "specgraph.cpu.stream:CpuStream.record_event")
def current_stream_recorded(real: Any, self: CpuStream, event: Any = None) -> Any:
    """record_event() of a stream records on the current one."""
    return real(self._platform.current_stream(), event)


@mutant("sums-in-half")
def sums_in_the_dtype(patch: pytest.MonkeyPatch) -> None:
    """Sums of bfloat16 values are kept in bfloat16."""
    real = Tensor.sum

    def broken(self: Tensor, *args: Any, **options: Any) -> Tensor:
        if self.dtype != torch.bfloat16 or args != (-1,):
            return real(self, *args, **options)
        total = torch.zeros_like(self[..., 0])
        for i in range(self.shape[-1]):
            total = total + self[..., i]
        return total

    patch.setattr(Tensor, "sum", broken)


@mutant("order-of-equals")
def descending_is_reversed(patch: pytest.MonkeyPatch) -> None:
    """A descending sort is an ascending one from its end."""
    real = Tensor.sort

    def broken(self: Tensor, dim: int = -1, descending: bool = False, **options: Any) -> tuple[Tensor, Tensor]:
        values, order = real(self, dim=dim, **options)
        return (values.flip(dim), order.flip(dim)) if descending else (values, order)

    patch.setattr(Tensor, "sort", broken)


@mutant("drafts-not-penalised", "specgraph_run.decoder.sampling_buffers:SamplingBuffers.adjusted_drafts")
def earlier_drafts_uncounted(
    real: Any, self: SamplingBuffers, logits: Any, ids: Any, temperature: Any, drafted: Any = None
) -> Tensor:
    """Logits of later draft steps have no penalties of the drafts before them."""
    return real(self, logits, ids, temperature, None)


@mutant("waiting-request-overtaken", "specgraph_run.decoder.decoder:admissible")
def whatever_fits(
    real: Any, waiting: Iterable[Running], config: Any, query_len: int, num_rows: int, num_blocks: int
) -> list[Running]:
    """Requests behind one that does not fit join before it."""
    joining: list[Running] = []
    for state in waiting:
        needed = admission.blocks_needed(state.request, config, query_len)
        if needed <= num_blocks and len(joining) < num_rows:
            num_blocks -= needed
            joining.append(state)
    return joining
