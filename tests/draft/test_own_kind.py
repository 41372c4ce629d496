"""A kind of drafter outside of the package drafts through every lowering, and the core knows nothing of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import pytest
import torch
from draft.rounds import LOWERINGS, RandomBatches, make_drafter
from specgraph_conformance.draft_oracles import ORACLES, Oracle
from specgraph_conformance.head_checks import check_head
from torch import Tensor

from specgraph import AttentionLayer, DraftConfig, DraftTree
from specgraph.attention import AttentionMetadata
from specgraph.attention.rows import Reached, VerifiedRows
from specgraph.buffers import Axes, Once, PerRequest
from specgraph.capture import AttentionStack, MakeAttend
from specgraph.cpu.platform import CpuPlatform
from specgraph.draft import Kind
from specgraph.draft.buffers import Allocation, DraftBuffers, PassRows, PromptRows
from specgraph.draft.head_checks import HeadCheck
from specgraph.draft.program import DraftProgram, draft_block, make_seeds
from specgraph.draft.protocol import ModelHead
from specgraph.errors import ConfigError, UnsupportedError

VOCAB, HIDDEN, HEADS = 64, 16, 3
TREE = DraftTree(num_steps=3, top_k=2, num_draft_tokens=8)
SIZES = {"num_speculative_tokens": HEADS, "max_num_requests": 4, "max_model_len": 48}


class ManyHeads(ModelHead, Protocol):
    """A head per draft token, none of which knows another one's token (Medusa, arXiv:2401.10774)."""

    num_heads: int

    def every(self, hidden: Tensor, count: int) -> Tensor:
        """Turn hidden states [R, hidden_size] into those of the first `count` tokens, [R, count, hidden_size]."""
        ...


@dataclass(frozen=True, kw_only=True)
class ManyBuffers(DraftBuffers):
    plan: VerifiedRows
    token_ids: Annotated[Tensor, Axes("rows")]
    rows: Annotated[AttentionMetadata, Axes("rows")]
    last_rows: PerRequest
    positions: PerRequest
    lens: PerRequest
    draft_step: Once


class ManyProgram(DraftProgram[ManyHeads, ManyBuffers]):
    prefill_passes = 0

    def allocate(self, new: Allocation) -> ManyBuffers:
        each = {name: new.zeros(new.requests) for name in ("last_rows", "positions")}
        lens, column = new.zeros(new.requests, dtype=torch.int32), new.zeros(1)
        rows = new.metadata("rows")
        return ManyBuffers(**new.common(), token_ids=new.rows("rows"), rows=rows, **each, lens=lens, draft_step=column)

    def rows(self, query_len: int, num_speculative_tokens: int) -> PassRows:
        return PassRows(VerifiedRows.of(query_len, self.config.limits, 0, self.position_offset), {"rows": query_len})

    def first(self, b: ManyBuffers, make_attend: MakeAttend) -> None:
        b.plan.fill(b.accepted, b.rows.places, b.token_ids, Reached(b.last_rows, b.positions, b.lens, b.draft_step))
        make_seeds(b)
        hidden = self.head.combine(b.inputs.aux_hidden)[b.last_rows]
        draft_block(self.head, b, self.head.every(hidden, b.draft_token_ids.shape[1]).flatten(0, 1), None)

    def prefill(self, rows: PromptRows, make_attend: MakeAttend) -> None:
        """A prompt leaves nothing behind: there are no keys."""


class ManyKind(Kind[ManyHeads]):
    protocol = ManyHeads
    chains = ManyProgram
    is_one_pass = True

    def check_limits(self, head: ManyHeads, config: DraftConfig, stack: AttentionStack) -> None:
        super().check_limits(head, config, stack)
        if config.num_speculative_tokens > head.num_heads:
            raise ConfigError(f"{config.num_speculative_tokens} draft tokens, and {head.num_heads} heads: ask for less")

    def check(self, check: HeadCheck) -> None:
        _, hidden = check.inputs()
        size = check.rows, check.head.num_heads, check.head.hidden_size
        check.expect("every(hidden, count)", check.call("every", hidden, size[1]), *size, dtype=check.head.dtype)
        check.logits()


class TableHeads:
    """Each token is chosen by a matrix of its own, from the target's last hidden state."""

    kind = ManyKind()
    attention_layers: Sequence[AttentionLayer] = ()
    aux_layers: Sequence[int] = ()
    draft_to_target = pair_input = projection = ranks = None
    hidden_size = aux_size = HIDDEN
    draft_vocab_size, dtype, num_heads = VOCAB, torch.float32, HEADS

    def __init__(self, **changed: Any) -> None:
        g = torch.Generator().manual_seed(4)
        self.heads = torch.randn(HEADS, HIDDEN, HIDDEN, generator=g)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=g)
        vars(self).update(changed)

    def combine(self, aux_hidden: Tensor) -> Tensor:
        return aux_hidden

    def every(self, hidden: Tensor, count: int) -> Tensor:
        return torch.einsum("khi,ri->rkh", self.heads[:count], hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T

    def weights(self) -> Mapping[str, Tensor]:
        return {"heads": self.heads, "lm_head": self.lm_head}


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_a_kind_of_ones_own_drafts_what_its_heads_say(lowering):
    head = TableHeads()
    drafter = make_drafter(head, lowering, **SIZES)
    rounds = RandomBatches(drafter.config, HIDDEN, VOCAB, torch.float32, seed=1)
    assert drafter.prefill([1, 2, 3, 4, 5], range(5), [1, 2], torch.ones(5, HIDDEN)) is not None
    for _ in range(4):
        batch = rounds.next()
        states = batch.aux_hidden.view(batch.num_requests, -1, HIDDEN).double()
        last = states[torch.arange(batch.num_requests), batch.num_sampled.long() - 1]
        want = torch.stack([(last @ each.double().T @ head.lm_head.double().T).argmax(-1) for each in head.heads], 1)
        assert drafter.propose(batch).token_ids.tolist() == want.tolist()


def test_what_a_kind_of_ones_own_refuses_is_said_before_a_capture():
    for changed, error, words in (
        ({"num_heads": 2}, ConfigError, "3 draft tokens, and 2 heads"),
        ({"every": lambda hidden, count: hidden}, ConfigError, r"every\(hidden, count\) is \[4, 16\].*\[4, 3, 16\]"),
        ({"every": None}, ConfigError, "the head TableHeads lacks every"),
    ):
        with pytest.raises(error, match=words):
            make_drafter(TableHeads(**changed), "merged", **SIZES)
    with pytest.raises(UnsupportedError, match="a TableHeads drafts chains: leave out the draft tree"):
        make_drafter(TableHeads(), "merged", **SIZES, tree=TREE)


def _drafts(head: TableHeads, dense: Any, token_ids: Tensor, aux: Tensor, start: int, drafted: Sequence[int]) -> Tensor:
    return torch.stack([each @ aux[-1] for each in head.heads[: len(drafted)]]) @ head.lm_head.T


def test_a_kind_of_ones_own_is_compared_with_an_oracle_of_ones_own(monkeypatch):
    def make(device: torch.device, dtype: torch.dtype) -> Any:
        head = TableHeads()
        return TableHeads(heads=head.heads.to(dtype), lm_head=head.lm_head.to(dtype), dtype=dtype)

    platform = CpuPlatform()
    config = DraftConfig(num_speculative_tokens=2, max_num_requests=4, max_model_len=96, capture_sizes=(4,))
    with pytest.raises(ConfigError, match=r"no float64 drafter .* of the kind ManyKind\(\): add an Oracle"):
        check_head(platform, make, config)
    monkeypatch.setitem(ORACLES, ManyKind(), Oracle(_drafts))
    assert check_head(platform, make, config) == ["piecewise", "step", "merged"]
