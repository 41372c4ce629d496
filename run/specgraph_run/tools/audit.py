"""Compares every lowering of a drafter with eager, bit for bit, and names the first tensor that differs."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specgraph.attention import AttentionBackend, KVCache, PagedAttention
from specgraph.config import LoweringChoice
from specgraph.device import Platform, Progress
from specgraph.draft import DraftConfig, Drafter, ProposeBatch
from specgraph.draft.protocol import Head
from specgraph.errors import ConfigError, SpecgraphError, UnsupportedError, first_line
from specgraph_run.tools.shapes import lone_drafter

_OTHERS = (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError)
"""Exceptions that a faulty head or buffer raises. The audit reports them as a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditCase:
    """The random batches of an audit, of 1 to `max_num_requests` requests each. Accepted counts are random too."""

    rounds: int = 200
    max_num_requests: int = 8
    num_speculative_tokens: int = 5
    max_model_len: int = 256
    block_size: int = 16
    vocab_size: int
    """Tokens of the target's vocabulary."""
    lowerings: tuple[LoweringChoice, ...] = ("step", "merged")
    """The lowerings to compare with eager."""
    seed: int = 0


class Traffic:
    """Random batches over `max_num_requests` requests. A new request replaces one that reaches max_model_len."""

    def __init__(self, case: AuditCase, aux_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.case, self.aux_size, self.dtype, self.device = case, aux_size, dtype, device
        self._host = torch.Generator().manual_seed(case.seed)
        self._device = torch.Generator(device=device).manual_seed(case.seed)
        slots, per_request = case.max_num_requests, -(-case.max_model_len // case.block_size)
        self.blocks = (torch.randperm(slots * per_request, generator=self._host) + 1).view(slots, per_request).int()
        self._positions = torch.randint(0, case.max_model_len // 2, (slots,), generator=self._host)
        self.drafts = torch.zeros(slots, case.num_speculative_tokens, dtype=torch.int64, device=device)
        """The last draft tokens of every request, int64 [max_num_requests, K]. The next batch has them as verified."""
        self.sizes: set[int] = set()
        """The batch sizes so far."""

    def next(self) -> tuple[Tensor, Tensor, ProposeBatch]:
        """Return the next batch, after the numbers of its requests and the first position that each drafts for.

        Both are int64 [num_requests] on the host.
        """
        case = self.case
        n = int(torch.randint(1, case.max_num_requests + 1, (), generator=self._host))
        slots = torch.randperm(case.max_num_requests, generator=self._host)[:n]
        counts = torch.randint(1, case.num_speculative_tokens + 2, (n,), generator=self._host)
        starts = self._positions[slots]
        fresh = torch.randint(0, case.max_model_len // 2, (n,), generator=self._host)
        starts = torch.where(starts + counts >= case.max_model_len, fresh, starts)
        self._positions[slots] = starts + counts
        self.sizes.add(n)
        own = torch.randint(0, case.vocab_size, (n, 1), generator=self._device, device=self.device)
        rows = n * (case.num_speculative_tokens + 1)
        hidden = torch.randn(rows, self.aux_size, generator=self._device, device=self.device).to(self.dtype)
        batch = ProposeBatch(
            sampled_token_ids=torch.cat([self.drafts[slots.to(self.device)], own], dim=1),
            num_sampled=counts.int().to(self.device),
            start_positions=starts.to(self.device),
            aux_hidden=hidden,
            block_table=self.blocks[slots].to(self.device),
        )
        return slots, starts + counts, batch


def audit(
    platform: Platform,
    head: Head,
    case: AuditCase,
    attention: AttentionBackend | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Propose the same batches in every lowering, each with its own buffers and KV caches, and compare with eager.

    Eager runs at the same padded shapes, so all tensors must be equal bit for bit.

    Args:
        head: any draft head, including one that specgraph did not make.
        attention: the core's paged attention by default.
        progress: called for each captured graph, and after each batch.

    Returns:
        `equal`, `rounds` (the number of compared batches), `batch_sizes` and `refused` (the reason by lowering).
        If a tensor differs, `first` has the lowering, the batch's number (`round`) and the first tensor that differs;
        a KV cache also has its layer, draft step, request and position. If a capture or propose fails, `first` has its
        message.

    Raises:
        ConfigError: the head cannot draft this case.
    """
    refused: dict[str, str] = {}
    drafters: dict[str, Drafter] = {}
    report: dict[str, Any] = {"equal": False, "rounds": 0, "batch_sizes": 0, "refused": refused}
    with torch.inference_mode():
        traffic = Traffic(case, head.aux_size, head.dtype, platform.device)
        try:
            for lowering in ("eager", *case.lowerings):
                try:
                    drafters[lowering] = _drafter(platform, head, case, lowering, attention)
                    drafters[lowering].capture(progress)
                except UnsupportedError as error:
                    refused[lowering] = str(error)
                except (SpecgraphError, *_OTHERS) as error:
                    if isinstance(error, ConfigError) and lowering not in drafters:
                        raise  # the case does not fit the head
                    return report | {"first": {"lowering": lowering, "tensor": None, "message": _said(error)}}
            eager = drafters["eager"]
            for number in range(case.rounds):
                slots, ends, batch = traffic.next()
                for name, drafter in drafters.items():
                    try:
                        drafter.propose(batch)
                    except (SpecgraphError, *_OTHERS) as error:
                        found = {"tensor": None, "message": _said(error)}
                        return report | {"first": {"lowering": name, "round": number, **found}}
                    found = _difference(eager, drafter, traffic, slots, ends)
                    if found is not None:
                        return report | {"first": {"lowering": name, "round": number, **found}}
                traffic.drafts[slots.to(platform.device)] = eager.buffers.draft_token_ids[: len(slots)]
                report |= {"rounds": number + 1, "batch_sizes": len(traffic.sizes)}
                if progress is not None:
                    progress("comparing round", number + 1, case.rounds)
        finally:
            for drafter in drafters.values():
                drafter.close()
    return report | {"equal": True}


def _said(error: BaseException) -> str:
    """Return an error's message. If it is no SpecgraphError, its file and line come first."""
    if isinstance(error.__cause__, IndexError):  # the batches are right, so an op or the head is wrong
        error = error.__cause__
    if isinstance(error, SpecgraphError):
        return str(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}: {type(error).__name__}: {first_line(error)}"


def _drafter(
    platform: Platform, head: Head, case: AuditCase, lowering: Any, attention: AttentionBackend | None
) -> Drafter:
    config = DraftConfig(
        num_speculative_tokens=case.num_speculative_tokens,
        max_num_requests=case.max_num_requests,
        max_model_len=case.max_model_len,
        block_size=case.block_size,
        prefill_sizes=[16],
        decode=lowering,
    )
    return lone_drafter(platform, head, config, attention or PagedAttention())


def _difference(eager: Drafter, other: Drafter, traffic: Traffic, slots: Tensor, ends: Tensor) -> dict[str, Any] | None:
    """Return the first difference in the order of a propose's writes: KV by draft step and layer, then draft tokens.

    None if everything is equal.
    """
    found: dict[tuple[int, int, str], dict[str, Any]] = {}  # by draft step, layer and kind
    for layer, (mine, theirs) in enumerate(zip(eager.caches, other.caches, strict=True)):
        for kind in KVCache._fields:
            place = _first_kv(getattr(mine, kind), getattr(theirs, kind), traffic, slots, ends)
            if place is not None:
                tensor = f"kv_cache.{layer}.{kind}"
                found[place["step"], layer, kind] = {"tensor": tensor, "layer": layer, **place}
    if found:
        return found[min(found)]
    n = len(slots)
    mine, theirs = eager.buffers.draft_token_ids[:n], other.buffers.draft_token_ids[:n]
    wrong = (mine != theirs).nonzero().tolist()
    if not wrong:
        return None
    step, request = min((step, request) for request, step in wrong)
    return {
        "tensor": "draft_token_ids", "step": step, "request": request,
        "eager": int(mine[request, step]), "token": int(theirs[request, step]),
    }  # fmt: skip


def _first_kv(mine: Tensor, theirs: Tensor, traffic: Traffic, slots: Tensor, ends: Tensor) -> dict[str, Any] | None:
    """Return the draft step, request and position of the first difference of two caches [blocks, block_size, ...].

    None if the caches are equal.
    """
    if torch.equal(mine[1:], theirs[1:]):  # block 0 is the null block
        return None
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    wrong = (~same.flatten(2).all(-1)).nonzero().tolist()
    places: list[tuple[int, int, int]] = []
    for block, offset in wrong:
        for request, slot in enumerate(slots.tolist()):
            column = (traffic.blocks[slot] == block).nonzero()
            if len(column):
                position = int(column[0]) * traffic.case.block_size + offset
                places.append((max(0, position - int(ends[request]) + 1), request, position))
    if not places:
        place = "in a block that belongs to no request of this batch"
        return {"step": traffic.case.num_speculative_tokens, "where": place} if wrong else None
    step, request, position = min(places)
    return {"step": step, "request": request, "position": position}


def as_text(report: dict[str, Any], lowerings: Sequence[str]) -> str:
    """Return the report as text for people, one result per line."""
    lines = [f"{name}: not compared: {reason}" for name, reason in report["refused"].items()]
    rounds = f"{report['rounds']} rounds, {report['batch_sizes']} batch sizes"
    if report["equal"]:
        compared = [name for name in lowerings if name not in report["refused"]]
        return "\n".join([*lines, f"equal to eager, bit for bit: {', '.join(compared) or 'nothing'} ({rounds})"])
    first = {name: value for name, value in report["first"].items() if value is not None}
    verb = "failed" if "message" in first else "differs from eager"
    where = f"{first.pop('lowering')} {verb}"
    return "\n".join([*lines, f"{where} after {rounds}", *(f"  {name}: {value}" for name, value in first.items())])
