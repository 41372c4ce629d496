"""Prompts' chunks and rounds of any length in one batch, under a load of random requests."""

from __future__ import annotations

import pytest
import torch
from engine_rounds import BLOCK, MAX_LEN, MAX_SEQS, SLOTS, Engine, K


class Load:
    """Requests that arrive, are cancelled and end at random, in passes of at most `budget` rows; a prompt may begin
    with blocks that another request wrote."""

    def __init__(self, engine: Engine, seed: int, budget: int) -> None:
        self.engine, self.budget, self.g = engine, budget, torch.Generator().manual_seed(seed)
        self.waiting: dict[int, torch.Tensor] = {}
        """By slot, the tokens of a prompt that have not run."""
        self.running: list[int] = []
        self.padded = 0
        self.own = engine.blocks.clone()

    def draw(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.g))

    def arrive(self) -> None:
        e = self.engine
        used = e.blocks[[*self.running, *self.waiting]].unique()  # blocks of prefixes among them
        free = [s for s in range(SLOTS) if not torch.isin(self.own[s], used).any()]
        if not free or len(self.running) + len(self.waiting) == MAX_SEQS:
            return
        slot, length = free[self.draw(0, len(free) - 1)], self.draw(1, 60)
        prompt = torch.randint(0, e.vocab, (length,), generator=self.g)
        e.blocks[slot], e.tokens[slot] = self.own[slot], torch.zeros(0, dtype=torch.int64)
        e.aux[slot] = torch.zeros(0, e.oracle.aux_size)
        others = [s for s in self.running if len(e.tokens[s]) > BLOCK]
        if others and self.draw(0, 1):  # its first blocks are in the prefix cache
            other = others[self.draw(0, len(others) - 1)]
            shared = (len(e.tokens[other]) - 1) // BLOCK * BLOCK
            e.blocks[slot, : shared // BLOCK] = e.blocks[other, : shared // BLOCK]
            e.tokens[slot], e.aux[slot] = e.tokens[other][:shared], e.aux[other][:shared]
            prompt = torch.cat([e.tokens[slot][-1:], prompt])[: MAX_LEN - shared - 3 * K]
            if e.first is not None:
                e.first[slot] = e.first[other]
        self.waiting[slot] = prompt
        e.prompts.add(slot)

    def work(self) -> dict[int, tuple]:
        e, left, work = self.engine, self.budget, {}
        for slot in self.running:
            drafts = min(K if self.draw(0, 3) else self.draw(0, K), left - 1)
            ids = torch.randint(0, e.vocab, (drafts + 1,), generator=self.g)
            ids[0], left = e.tokens[slot][-1], left - drafts - 1
            work[slot] = ids, self.draw(1, drafts + 1), 0
        for slot in list(self.waiting):
            most = min(left, max(1, len(self.waiting[slot]) - self.draw(0, 1)))  # at times all but the last token
            rows, self.waiting[slot] = self.waiting[slot][:most], self.waiting[slot][most:]
            if len(rows):
                rest, count, padded = self.waiting[slot], int(not len(self.waiting[slot])), 0
                if count and len(rows) == 1 and len(e.tokens[slot]) and left > K:  # vLLM makes a round of it
                    rows = torch.cat([rows, torch.randint(0, e.vocab, (K,), generator=self.g)])
                    count, padded, self.padded = self.draw(1, K + 1), K, self.padded + 1
                left -= len(rows)
                work[slot] = rows, count, int(rest[0]) if len(rest) else 0, padded
        for slot in [slot for slot, rest in self.waiting.items() if not len(rest)]:
            del self.waiting[slot]
            self.running.append(slot)
        order = torch.randperm(len(work), generator=self.g).tolist()
        return {slot: work[slot] for slot in (list(work)[i] for i in order)}

    def leave(self) -> None:
        """End requests at the context's end, and now and then cancel one, also in its prompt."""
        room = MAX_LEN - 2 * K - 1  # what is drafted past the end of the context has no key
        self.running = [s for s in self.running if len(self.engine.tokens[s]) < room and self.draw(0, 19)]
        if self.waiting and not self.draw(0, 9):
            self.waiting.popitem()


@pytest.mark.parametrize(("engine", "budget"), [
    ("eagle3", 24), ("eagle3", 80), ("fp8", 40), ("mtp", 40), ("draft_model", 40), ("dflash", 40),
], indirect=["engine"])  # fmt: skip
def test_prompts_and_rounds_of_any_length_draft_in_one_batch(engine, budget) -> None:
    """A budget of 80 rows is more than one captured pass of 48 holds."""
    load, compared, proposes, mixed = Load(engine, 11, budget), 0, 0, 0
    while proposes < 20:
        if load.draw(0, 2) == 0:
            load.arrive()
        if work := load.work():
            drafts, want = engine.mixed(work)
            assert [got for got, each in zip(drafts.tolist(), want, strict=True) if each] == [w for w in want if w]
            compared, proposes = compared + sum(w is not None for w in want), proposes + 1
            mixed += any(len(ids) > K + 1 for ids, *_ in work.values())
        load.leave()
    assert compared > 20
    assert mixed > 2
    assert load.padded > 0
    assert engine.speculator.counts.by_reason == {"specgraph": proposes}
    assert engine.speculator.proposed == []
    assert all(form in engine.forms_at_start for form in engine.forms), "a kernel is compiled while vLLM serves"
