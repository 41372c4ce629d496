"""Kinds of drafters and prompts, against dense float64 drafters and eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from specgraph_conformance.draft_comparison import (
    TOLERANCE,
    away_from_the_end,
    float64_head,
    follow_oracle,
    rig,
)
from specgraph_conformance.draft_oracles import block_rows, dense_keys, dense_prompt
from specgraph_conformance.draft_rig import GRAPH_MODES, make_batches, make_config, make_prompt
from specgraph_conformance.oracles import DenseKeys
from specgraph_conformance.rig import expect_close, on_host
from specgraph_models.dspark import DSparkHead
from torch import Tensor

from specgraph.attention import AttentionMetadata
from specgraph.device import Platform
from specgraph.draft.buffers import PromptRows


@pytest.mark.hazard("confidence-of-a-neighbour")
def test_confidence_follows_float64(platform: Platform, seed: int) -> None:
    """The confidence of each draft token is that of a dense float64 drafter, from its own request's rows and the tokens
    before it."""
    made = rig(platform, make_config(decode="auto", k=4), "paged", "dspark")
    head = cast(DSparkHead, float64_head(made, "dspark"))
    for batch in make_batches(made.config, made.head.aux_size, seed, [3, 1]):
        batch = away_from_the_end(made.config, batch)
        before = made.contexts(batch)
        drafts = made.propose(batch)
        assert drafts.confidence is not None
        for r, context in enumerate(before):
            drafted = on_host(drafts.token_ids[r]).tolist()
            dense, aux_hidden = dense_keys(head, context), context.aux_hidden.double()
            rows = block_rows(head, dense, context.token_ids, aux_hidden, context.start, len(drafted))
            wanted = dense_confidence(head, rows, [int(context.token_ids[-1]), *drafted[:-1]])
            expect_close(on_host(drafts.confidence[r]).double(), wanted, TOLERANCE[made.head.dtype], f"request {r}")


def dense_confidence(head: DSparkHead, rows: Tensor, before: Sequence[int]) -> Tensor:
    """Return the confidence of rows [K, hidden_size], each computed after the token before it."""
    confidence = head.confidence_head
    assert confidence is not None
    known = torch.cat((rows, head.markov.embed[list(before)]), dim=1)
    return torch.sigmoid(known @ confidence.weight[0])


@pytest.mark.hazard("carry-before-the-norm")
def test_norm_output_follows_float64(platform: Platform, seed: int) -> None:
    """A head whose steps pass on hidden states after its final norm (EAGLE 3.1) drafts as a dense float64 one."""
    follow_oracle(platform, make_config(decode="auto", k=4), "paged", seed, [3, 1], "eagle3-norm-output")


@pytest.mark.hazard("draft-length-without-offset")
def test_draft_model_reads_all_keys(platform: Platform, seed: int) -> None:
    """Every draft token of a draft model follows from all tokens before it, where the context decides."""
    follow_oracle(platform, make_config(decode="auto", k=4), "paged-host", seed, [3, 1, 2], "draft-model-of-context")


@pytest.mark.parametrize("kind", ["eagle", "mtp-modules"])
@pytest.mark.hazard("prompt-padding")
def test_ragged_prompts_follow_float64(platform: Platform, kind: str, seed: int) -> None:
    """A prompt prefilled with an engine's own metadata, all rows real, leaves the keys of a dense float64 drafter."""
    made = rig(platform, make_config(), "paged", kind)
    head, tolerance = float64_head(made, kind), TOLERANCE[made.head.dtype]
    (batch,) = make_batches(made.config, head.aux_size, seed, [1])
    ((_, tokens, aux), *_), blocks, size = make_prompt(made, 16, seed), batch.blocks[0], made.config.block_size
    n, device = len(tokens), platform.device
    slots = [blocks[p // size] * size + p % size for p in range(n)]
    metadata = AttentionMetadata(
        seq_lens=torch.tensor([n], dtype=torch.int32, device=device),
        query_start_loc=torch.tensor([0, n], dtype=torch.int32, device=device),
        block_table=torch.tensor([blocks], dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        positions=torch.arange(n, device=device),
        query_len=n,
    )
    rows = PromptRows(torch.tensor(tokens, device=device), aux, metadata)
    with torch.no_grad():
        made.drafter.program.prefill(rows, made.drafter.stack.attend_in(None, "eager", {}))
    dense = DenseKeys.empty(head.attention_layers)
    dense_prompt(head, dense, torch.tensor(tokens), on_host(aux), 0, made.config.num_speculative_tokens)
    for layer, (key, _) in enumerate(made.host_caches()):
        wanted = dense.keys[layer]
        stored = key.flatten(0, 1)[[slot - size for slot in slots]][: wanted.shape[0]]
        expect_close(stored, wanted, tolerance, f"keys of layer {layer}")


@pytest.mark.parametrize("mode", GRAPH_MODES)
def test_graph_modes(platform: Platform, mode: str) -> None:
    """Each graph mode captures the passes that it names and no others."""
    made = rig(platform, make_config(**GRAPH_MODES[mode]), "paged", "mtp-modules")
    decode, prefill = made.drafter.resolution.decode, made.drafter.resolution.prefill
    for option, asked in GRAPH_MODES[mode].items():
        assert asked in ("auto", {"decode": decode, "prefill": prefill}[option])
    graphs = made.drafter.graphs
    phases = set() if graphs is None else {descriptor.phase for descriptor in graphs.descriptors}
    assert bool(phases - {"prefill"}) == (decode != "eager")
    assert ("prefill" in phases) == (prefill != "eager")
