"""Drafters with one module per step: the keys of every module are those of the text, whatever was accepted."""

from __future__ import annotations

import pytest
import torch
from specgraph.models.mtp import MtpHead
from specgraph.platforms import Platform

from specgraph_conformance.case import case
from specgraph_conformance.draft_comparison import TOLERANCE, float64_head, rig
from specgraph_conformance.draft_oracles import dense_prompt
from specgraph_conformance.draft_rig import HostBatch, make_config
from specgraph_conformance.oracles import DenseKeys, gather_request
from specgraph_conformance.rig import expect_close, on_host
from specgraph_conformance.tiny_models import VOCAB

ACCEPTED = ((1, 1), (4, 2), (1, 0), (2, 4), (3, 1))
"""Accepted + 1 of two requests, round by round; the first samples after the prompts."""


@pytest.mark.parametrize("mixed", ["alone", "exchanged"])
@case(
    "drafting.rounds-leave-the-keys-of-the-text",
    "After each round every module's keys are those of a dense float64 pass over the text, where its tokens are known: "
    "those that were written with draft tokens have been written again.",
    hazard="module-past-rows",
    cause="past rows: kept of rejected rows or of the batch's row instead of the block, or not computed again",
)
def test_rounds(platform: Platform, attention: str, mixed: str, seed: int) -> None:
    made = rig(platform, make_config(lowering="auto"), attention, "mtp-modules")
    reference, modules = float64_head(made, "mtp-modules"), made.config.num_speculative_tokens
    assert isinstance(reference, MtpHead)
    generator, q, size = torch.Generator().manual_seed(seed), made.config.query_len, made.head.aux_size
    lengths = [made.config.block_size + 1, 3]
    texts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]
    states = [torch.randn(n, size, generator=generator).to(made.head.dtype) for n in lengths]
    blocks = [[1 + r + 2 * i for i in range(made.config.max_blocks)] for r in range(2)]
    for text, aux, own in zip(texts, states, blocks, strict=True):
        for first in range(0, len(text), made.config.prefill_rows[-1]):
            rows = range(first, min(first + made.config.prefill_rows[-1], len(text)))
            made.drafter.prefill(text.tolist(), rows, own, aux[first : rows.stop].to(platform.device))
    for number, accepted in enumerate(ACCEPTED):
        order = [1, 0] if mixed == "exchanged" and number % 2 else [0, 1]
        tokens = torch.randint(0, VOCAB, (2, q), generator=generator)
        aux = (3 * torch.randn(2, q, size, generator=generator)).to(made.head.dtype)  # rejected rows too
        starts = [len(texts[r]) - 1 for r in order]
        for i, r in enumerate(order):
            if number == 0:
                aux[i, 0] = states[r][-1]
            else:
                states[r] = torch.cat([states[r], aux[i, : accepted[r]]])
            texts[r] = torch.cat([texts[r], tokens[i, : accepted[r]]])
        cold, seeds = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        counts, own = [accepted[r] for r in order], [blocks[r] for r in order]
        made.propose(HostBatch(tokens, counts, starts, aux.flatten(0, 1), own, cold, seeds))
        for r in range(2):
            dense = DenseKeys.empty(reference.attention_layers)
            known = len(texts[r]) - 1
            dense_prompt(reference, dense, texts[r][1:], states[r][:known], 0, modules)
            for module in range(modules):
                cache, exact = made.caches[module], known - module
                for name, stored, wanted in (("keys", cache.key, dense.keys), ("values", cache.value, dense.values)):
                    seen = gather_request(on_host(stored), blocks[r], exact).double()
                    what = f"{name} of module {module} of request {r} after round {number}"
                    expect_close(seen, wanted[module][:exact], TOLERANCE[made.head.dtype], what)
    made.close()
