"""Rows whose token has no KV block are counted by every drafter's graphs, as a loop over rows counts them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from draft.pairs import VOCAB, make_head, make_target
from draft.rounds import make_drafter
from hypothesis import given, settings
from hypothesis import strategies as st
from specgraph_models.draft_model import DraftModelHead
from specgraph_run.decoder import Request, SpeculativeDecoder

from specgraph.config import DraftConfig
from specgraph.cpu import CpuPlatform
from specgraph.draft import DraftTree, ProposeBatch

LENGTH, BLOCK, K = 32, 4, 3
TREE = DraftTree(num_steps=K, top_k=2, num_draft_tokens=6)
LATER_ROWS = {"eagle": K - 1, "draft-model": K - 1, "mtp-modules": 0, "dflash": 1 + K, "peagle": K - 1, "tree": 4}
"""Rows that a propose writes after that of the last accepted token; a tree's are (K - 1) * top_k."""


@pytest.mark.parametrize(
    ("kind", "lowering"),
    [
        *((kind, "merged") for kind in LATER_ROWS),
        *((kind, way) for kind in ("eagle", "tree") for way in ("eager", "step")),
    ],
)
def test_rows_without_block_are_counted(kind, lowering):
    """Over several proposes of one drafter, of batches that are padded."""
    head = make_head("eagle" if kind == "tree" else kind, make_target())
    tree = TREE if kind == "tree" else None
    drafter = make_drafter(
        head, lowering, "device", num_speculative_tokens=K, tree=tree, max_num_requests=4, max_model_len=LENGTH,
        capture_sizes=[1, 4], prefill="eager",
    )  # fmt: skip
    assert drafter.rows_without_block == 0  # of warm-ups and captures, all inert

    @settings(max_examples=12, deadline=None, derandomize=True)
    @given(
        requests=st.lists(st.tuples(st.integers(0, LENGTH - 1), st.integers(0, K + 1)), min_size=1, max_size=3),
        holes=st.sets(st.integers(0, 3 * drafter.config.max_blocks - 1), max_size=12),
    )
    def propose(requests, holes):
        n, width = len(requests), drafter.config.max_blocks
        table = [[0 if r * width + i in holes else 1 + r * 7 + i % 7 for i in range(width)] for r in range(n)]
        wanted = drafter.rows_without_block
        for (start, count), blocks in zip(requests, table, strict=True):
            first = start + head.kind.position_offset
            last = first + count + LATER_ROWS[kind] if count else first
            wanted += sum(blocks[position // BLOCK] == 0 for position in range(first, min(last, LENGTH)))
        drafter.propose(
            ProposeBatch(
                sampled_token_ids=torch.ones(n, K + 1, dtype=torch.int64),
                num_sampled=torch.tensor([count for _, count in requests], dtype=torch.int32),
                start_positions=torch.tensor([start for start, _ in requests]),
                aux_hidden=torch.zeros(n * (K + 1), head.aux_size),
                block_table=torch.tensor(table, dtype=torch.int32),
            )
        )
        assert drafter.rows_without_block == wanted

    propose()
    assert drafter.rows_without_block > 0
    drafter.close()


@pytest.mark.parametrize("tree", [None, TREE], ids=["chain", "tree"])
def test_a_decoder_loses_none_unless_it_gives_too_few_blocks(tree, monkeypatch):
    target = make_target()
    config = DraftConfig(
        num_speculative_tokens=K, tree=tree, max_num_requests=2, max_model_len=LENGTH, block_size=BLOCK,
        capture_sizes=[2], prefill="eager",
    )  # fmt: skip

    def rows_without_block() -> tuple[int, int]:
        """Return the counts of the drafter and of the metrics, after requests of all lengths, one of them cancelled."""
        decoder = SpeculativeDecoder(target, make_head("eagle", target), CpuPlatform(), dataclasses.replace(config))
        decoder.capture()
        for length in (1, 3, 4, 20, 29):
            decoder.add(Request(prompt_token_ids=[*range(length)], max_tokens=2 + length % 9))
        cancelled = decoder.add(Request(prompt_token_ids=[5, 6], max_tokens=VOCAB))
        while decoder.num_unfinished:
            if decoder.metrics.rounds == 4:
                decoder.cancel(cancelled)
            decoder.step()
        counted = decoder.drafter.rows_without_block, decoder.metrics.rows_without_block
        decoder.close()
        return counted

    assert rows_without_block() == (0, 0)

    def blocks_of_the_prompt(request: Request, config: DraftConfig, query_len: int) -> int:
        return -(-len(request.prompt_token_ids) // config.block_size)

    for module in ("admission", "decoder"):
        monkeypatch.setattr(f"specgraph_run.decoder.{module}.blocks_needed", blocks_of_the_prompt)
    drafters, metrics = rows_without_block()
    assert drafters >= metrics > 0


@pytest.mark.parametrize("enough", [True, False])
def test_a_request_has_blocks_for_the_rounds_past_its_last_token(enough, monkeypatch):
    """All drafts are accepted, and a round is launched before the last one is read: its rows lie past the end."""
    target = make_target()
    config = DraftConfig(
        num_speculative_tokens=K, max_num_requests=2, max_model_len=96, block_size=BLOCK, capture_sizes=[2],
        prefill="eager", decode="eager",
    )  # fmt: skip

    def up_to_its_last_token(request: Request, config: DraftConfig, query_len: int) -> int:
        return -(-(len(request.prompt_token_ids) + request.max_tokens) // config.block_size)

    for module in () if enough else ("admission", "decoder"):
        monkeypatch.setattr(f"specgraph_run.decoder.{module}.blocks_needed", up_to_its_last_token)
    decoder = SpeculativeDecoder(target, DraftModelHead(target, target.hidden_size), CpuPlatform(), config)
    decoder.capture()
    decoder.add(Request(prompt_token_ids=[4, 5], max_tokens=80))
    for max_tokens in range(1, 9):
        decoder.add(Request(prompt_token_ids=[1, 2, 3], max_tokens=max_tokens))
    while decoder.num_unfinished:
        decoder.step()
    assert decoder.metrics.mean_acceptance_length == K + 1
    assert (decoder.metrics.rows_without_block == 0) == enough
    decoder.close()
