"""Every kind of drafter on npu: the tokens of the cpu platform in float32."""

from __future__ import annotations

import os
from functools import cache

import pytest
import torch
from specgraph_npu.attention import make_attention, store_latent
from specgraph_npu.host_ops import HostOp

from draft.on_platform import RAGGED, batches_for, decoded, make_drafter, propose
from recurrent_targets import with_cancels
from specgraph.attention import AttentionLayer, PagedAttention
from specgraph.cpu import CpuPlatform
from specgraph.device import LOWERINGS
from specgraph.errors import UnsupportedError


@cache
def on_cpu(kind, k):
    """(tokens, acceptance) of the same prompts on the cpu platform."""
    return decoded(CpuPlatform(), kind, "eager", k)[0]


KINDS = [
    ("eagle", 1),
    ("mtp", 3),
    ("mtp-modules", 3),
    ("dflash", 5),
    ("dspark", 4),
    ("dflash2", 3),
    ("domino", 3),
    ("draft-model", 3),
    ("ngram", 3),
]


@pytest.mark.once
@pytest.mark.parametrize(
    ("kind", "k", "name"),
    [*((*each, name) for name in ("fia", "atb-paged") for each in KINDS), *((kind, 3, "paged") for kind in RAGGED)],
)
def test_tokens_and_acceptance_as_on_cpu(npu, runtime, kind, k, name):
    """Verify passes and all steps of `mtp-modules` run K + 1 rows per request; `dflash` is not causal. To `atb-paged`
    each row is a request. Ragged verifies need lengths on the device."""
    expected = on_cpu(kind, k)
    assert sum(map(len, expected[0])) == 44
    lowerings = {"fia": ("step", "merged"), "atb-paged": ("merged",), "paged": ("step", "merged")}
    attention = PagedAttention() if name == "paged" else make_attention(npu, name)
    for lowering in lowerings[name]:
        seen, spent = decoded(npu, kind, lowering, k, attention)
        assert seen == expected, lowering
        assert spent["synchronizes"] == 0


LONG = bool(os.environ.get("SPECGRAPH_HYBRID_CONFIGS"))
"""All kinds and attentions over a recurrent target."""


@pytest.mark.once
@pytest.mark.parametrize("name", ["fia", "atb-paged", "paged"] if LONG else ["fia"])
@pytest.mark.parametrize("kind", ["mtp", "eagle3", "dflash", "ngram"] if LONG else ["eagle3"])
def test_recurrent_targets_have_the_bits_of_eager(npu, runtime, kind, name):
    """Requests join, end and are cancelled. Tokens are those of the cpu platform."""

    def run(lowering):
        attention = PagedAttention() if name == "paged" else make_attention(npu, name)
        return with_cancels(npu, kind, lowering, attention)

    eager = run("eager")
    for lowering in ("step", "merged") if LONG else ("merged",):
        assert run(lowering) == eager, lowering
    for (tokens, _), (own, _) in zip(eager, with_cancels(CpuPlatform(), None, "eager"), strict=True):
        assert tokens[: len(own)] == own[: len(tokens)]


@pytest.mark.parametrize("name", ["fia-mla", pytest.param("fia-v2-mla", marks=pytest.mark.once)])
def test_latent_attention(npu, runtime, name, monkeypatch):
    """An MTP head with MLA: the op with rope parts on npu, plain attention over whole rows on cpu."""
    issued, make = [], HostOp.with_lengths
    reference = make_drafter(CpuPlatform(), "eager", 3, "latent")
    rounds = batches_for(reference, seed=8)
    attention = make_attention(npu, name)
    drafters = {way: make_drafter(npu, way, 3, "latent", attention=attention) for way in LOWERINGS}

    def watched(row, call, lengths):
        ready = make(row, call, lengths)
        if "workspace" in call.keywords:  # no question for a workspace's size
            issued.append(ready.keywords[next(iter(row.host))])  # where each request's rows end
        return ready

    monkeypatch.setattr(HostOp, "with_lengths", watched)
    for number in range(6):
        batch = rounds.next(num_requests=(1, 5, 2, 4, 3, None)[number])
        expected = propose(reference, batch)
        for way, drafter in drafters.items():
            issued.clear()
            assert torch.equal(propose(drafter, batch), expected), (way, number)
            padded = len(issued[0])
            assert issued == [[rows * (i + 1) for i in range(padded)] for rows in (4, 1, 1)]
    for drafter in drafters.values():
        drafter.close()


def test_latent_attention_of_other_layers_is_refused():
    x = torch.zeros(1)
    table = torch.zeros(8, 8)
    wrong = {"num_kv_heads": 2, "rotary": table}, {"num_kv_heads": 1}, {"num_kv_heads": 1, "rotary": table}
    for layer in (AttentionLayer(4, head_dim=16, scale=1.0, **each, latent=each is not wrong[2]) for each in wrong):
        with pytest.raises(UnsupportedError, match="one key head of a rotated part and a latent"):
            store_latent(layer, x, x, x, None, None)
