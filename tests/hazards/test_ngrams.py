"""N-gram drafts over many rounds: texts grow by accepted tokens, and blocks pass from request to request."""

from __future__ import annotations

import pytest
import torch
from specgraph_conformance.draft_comparison import rig
from specgraph_conformance.draft_rig import DraftRig, HostBatch, make_config
from specgraph_conformance.op_rows.ngram import drafts_by_ngram
from specgraph_conformance.rig import on_host

from specgraph.device import LOWERINGS, Platform

VOCAB = 4
"""The vocabulary: so small that most texts have a match."""


class Texts:
    """Requests, with their texts and blocks on the host, in the batch rows of one drafter. `make_config` has 4 rows."""

    def __init__(self, made: DraftRig, seed: int) -> None:
        self.made, self.generator = made, torch.Generator().manual_seed(seed)
        self.columns = -(-made.config.max_model_len // made.config.block_size)
        self.texts: list[list[int]] = [[] for _ in range(made.config.max_num_requests)]
        self.last = [1] * len(self.texts)
        """The number of tokens that each request's last verify sampled."""

    def random(self, low: int, high: int, count: int) -> list[int]:
        """Return `count` integers."""
        return torch.randint(low, high, (count,), generator=self.generator).tolist()

    def blocks(self, row: int) -> list[int]:
        """Return the blocks of a row. They belonged to the row's earlier requests too."""
        return list(range(1 + row * self.columns, 1 + (row + 1) * self.columns))

    def join(self, row: int) -> None:
        """Prefill a prompt in passes of up to 16 rows, and let the target sample its first token."""
        [length] = self.random(1, 40, 1)
        prompt = self.random(0, VOCAB, length)
        device, dtype = self.made.platform.device, self.made.head.dtype
        for first in range(0, length, 16):
            rows = range(first, min(first + 16, length))
            hidden = torch.zeros(len(rows), 0, dtype=dtype, device=device)
            self.made.prefill(prompt, rows, self.blocks(row), hidden)
        self.texts[row], self.last[row] = [*prompt, *self.random(0, VOCAB, 1)], 1

    def batch(self, live: list[bool]) -> HostBatch:
        """Return the batch that led to the present texts. Its rejected rows hold other tokens."""
        query_len = self.made.config.query_len
        sampled = torch.tensor(self.random(0, VOCAB, query_len * len(live))).view(-1, query_len)
        for row, (text, count) in enumerate(zip(self.texts, self.last, strict=True)):
            sampled[row, :count] = torch.tensor(text[len(text) - count :])
        n, none = len(live), torch.zeros(len(live) * query_len, 0)
        return HostBatch(
            sampled_token_ids=sampled,
            num_sampled=[count if alive else 0 for alive, count in zip(live, self.last, strict=True)],
            start_positions=[len(text) - count - 1 for text, count in zip(self.texts, self.last, strict=True)],
            aux_hidden=none,
            blocks=[self.blocks(row) for row in range(n)],
            temperature=torch.zeros(n),
            seeds=torch.zeros(n, dtype=torch.int64),
        )

    def accept(self, row: int, drafts: list[int]) -> None:
        """Append some of the drafts, as accepted by the target, and a token of the target's own."""
        [accepted], [own] = self.random(0, len(drafts) + 1, 1), self.random(0, VOCAB, 1)
        self.texts[row] += [*drafts[:accepted], own]
        self.last[row] = accepted + 1


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.hazard("ngram-history")
def test_ngrams_of_the_text(platform: Platform, lowering: str, seed: int) -> None:
    """Over rounds that accept any number of drafts, with requests that leave and others that take their row and blocks,
    n-gram drafts are those of Python's search in each request's own text."""
    made = rig(platform, make_config(decode=lowering, k=3), "paged", "ngram")
    texts = Texts(made, seed)
    requests, longest = made.config.max_num_requests, made.config.max_model_len
    matched = 0
    for number in range(24):
        for row, text in enumerate(texts.texts):
            if not text or len(text) + made.config.query_len > longest or texts.random(0, 6, 1) == [0]:
                texts.join(row)
        live = [number == 0 or flag > 0 for flag in texts.random(0, 5, requests)]
        drafts = on_host(made.propose(texts.batch(live)).token_ids).tolist()
        for row, alive in enumerate(live):
            if not alive:
                assert drafts[row] == [0] * 3, f"round {number}: inert request {row} has drafts {drafts[row]}"
                continue
            wanted = drafts_by_ngram(texts.texts[row], 3, 1, 3)
            matched += wanted != [texts.texts[row][-1]] * 3
            assert drafts[row] == wanted, f"round {number}, request {row}: {drafts[row]} after {texts.texts[row]}"
            texts.accept(row, drafts[row])
    assert matched > 30, "too few texts repeat themselves for this to say much"
