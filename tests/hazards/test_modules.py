"""Drafters with one module per draft step: all modules have the keys of the text, however many drafts were accepted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from specgraph_conformance.draft_comparison import TOLERANCE, float64_head, rig
from specgraph_conformance.draft_oracles import dense_prompt
from specgraph_conformance.draft_rig import DraftRig, HostBatch, make_config
from specgraph_conformance.oracles import DenseKeys, gather_request
from specgraph_conformance.rig import expect_close, on_host
from specgraph_conformance.tiny_models import VOCAB
from specgraph_models.mtp import MtpHead

from specgraph.device import Platform

K = 3


ACCEPTED = ((1, 1), (4, 2), (1, 0), (2, 4), (3, 1))
"""Accepted drafts + 1 of two requests, batch by batch. The first batch follows the prompts."""


OTHER_K = (1, K, 1, K, K)
"""The K of each batch, in the case with a changing K."""


ACCEPTED_OF_OTHER_K = ((1, 1), (2, 1), (4, 2), (1, 2), (4, 1))


@pytest.mark.parametrize(("attention", "mixed"), [("paged", "exchanged"), ("paged-host", "alone")])
@pytest.mark.hazard("module-past-rows")
def test_rounds_leave_the_keys_of_the_text(platform: Platform, attention: str, mixed: str, seed: int) -> None:
    """After each round every module's keys are those of a dense float64 pass over the text, where its tokens are known:
    those that were written with draft tokens have been written again."""
    made = rig(platform, make_config(decode="auto", k=K), attention, "mtp-modules")
    _follow_text(platform, made, mixed, ACCEPTED, (None,) * len(ACCEPTED), seed)


@pytest.mark.hazard("module-past-rows")
def test_rounds_of_other_k_leave_the_keys_of_the_text(platform: Platform, seed: int) -> None:
    """Every module's keys are those of the text after each round also as K changes from round to round, and of modules
    past the K at hand: later rounds draft with them."""
    config = make_config(decode="auto", k=K, k_candidates=(1, K))
    made = rig(platform, config, "paged", "mtp-modules")
    _follow_text(platform, made, "alone", ACCEPTED_OF_OTHER_K, OTHER_K, seed)


def _follow_text(
    platform: Platform,
    made: DraftRig,
    mixed: str,
    accepted_counts: Sequence[tuple[int, int]],
    ks: Sequence[int | None],
    seed: int,
) -> None:
    """Propose for two requests batch by batch, and check the keys and values of every module after each propose.

    Args:
        accepted_counts: accepted drafts + 1 of the two requests, by batch.
        ks: the K of each batch. None for the drafter's own K.
    """
    reference, modules = float64_head(made, "mtp-modules"), made.config.num_speculative_tokens
    assert isinstance(reference, MtpHead)
    generator, q, size = torch.Generator().manual_seed(seed), made.config.query_len, made.head.aux_size
    lengths = [made.config.block_size + 1, 2]  # the second has fewer tokens than there are past rows
    texts = [torch.randint(0, VOCAB, (n,), generator=generator) for n in lengths]
    states = [torch.randn(n, size, generator=generator).to(made.head.dtype) for n in lengths]
    blocks = [[1 + r + 2 * i for i in range(made.config.max_blocks)] for r in range(2)]
    for text, aux, own in zip(texts, states, blocks, strict=True):
        for first in range(0, len(text), made.config.prefill_rows[-1]):
            rows = range(first, min(first + made.config.prefill_rows[-1], len(text)))
            made.drafter.prefill(text.tolist(), rows, own, aux[first : rows.stop].to(platform.device))
    for number, (accepted, k) in enumerate(zip(accepted_counts, ks, strict=True)):
        order = [1, 0] if mixed == "exchanged" and number % 2 else [0, 1]
        tokens = torch.randint(0, VOCAB, (2, q), generator=generator)
        aux = (3 * torch.randn(2, q, size, generator=generator)).to(made.head.dtype)  # also for rejected rows
        starts = [len(texts[r]) - 1 for r in order]
        for i, r in enumerate(order):
            if number == 0:
                aux[i, 0] = states[r][-1]
            else:
                states[r] = torch.cat([states[r], aux[i, : accepted[r]]])
            texts[r] = torch.cat([texts[r], tokens[i, : accepted[r]]])
        cold, seeds = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
        counts, own = [accepted[r] for r in order], [blocks[r] for r in order]
        made.propose(HostBatch(tokens, counts, starts, aux.flatten(0, 1), own, cold, seeds), k=k)
        q = made.config.query_len if k is None else k + 1
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
