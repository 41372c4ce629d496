"""Every kind of drafter on npu: the tokens of the cpu platform in float32."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from specgraph_npu.attention import make_attention, store_latent
from specgraph_npu.host_ops import HostOp

from draft.on_platform import make_drafter, moved, propose, rounds_for
from draft.pairs import VOCAB, make_head, make_target
from specgraph.attention import AttentionLayer
from specgraph.device import LOWERINGS
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.errors import UnsupportedError


def generate(platform, kind, lowering, k, attention=None):
    """(tokens, acceptance, rounds) of four prompts in a batch of three."""
    target = make_target()
    head = moved(make_head(kind, target), platform.device)
    config = EngineConfig(
        num_speculative_tokens=k, max_num_requests=3, max_model_len=48, block_size=4, decode=lowering,
        capture_sizes=[3], prefill_sizes=[16],
    )  # fmt: skip
    decoder = SpeculativeDecoder(moved(target, platform.device), head, platform, config, attention=attention)
    g = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in (3, 9, 1, 14)]
    with torch.inference_mode():
        decoder.capture()
        before = platform.counts()
        results = decoder.generate([Request(prompt_token_ids=p, max_tokens=8 + 2 * i) for i, p in enumerate(prompts)])
        spent = {name: count - before[name] for name, count in platform.counts().items()}
    decoder.close()
    return ([result.token_ids for result in results], decoder.metrics.acceptance_per_position), spent


@cache
def on_cpu(kind, k):
    """(tokens, acceptance) of the same prompts on the cpu platform."""
    return generate(CpuPlatform(), kind, "eager", k)[0]


@pytest.mark.once
@pytest.mark.parametrize("name", ["fia", "atb-paged"])
@pytest.mark.parametrize(
    ("kind", "k"),
    [("eagle", 1), ("mtp", 3), ("mtp-modules", 3), ("dflash", 5), ("dspark", 4), ("dflash2", 3), ("draft-model", 3)],
)
def test_tokens_and_acceptance_as_on_cpu(npu, runtime, kind, k, name):
    """Verify passes and all steps of `mtp-modules` run K + 1 rows per request; `dflash` is not causal. To `atb-paged`
    each row is a request."""
    expected = on_cpu(kind, k)
    assert sum(map(len, expected[0])) == 44
    for lowering in ("step", "round") if name == "fia" else ("merged",):
        seen, spent = generate(npu, kind, lowering, k, make_attention(npu, name))
        assert seen == expected, lowering
        assert spent["synchronizes"] == 0


@pytest.mark.parametrize("name", ["fia-mla", pytest.param("fia-v2-mla", marks=pytest.mark.once)])
def test_latent_attention(npu, runtime, name, monkeypatch):
    """An MTP head with MLA: the op with rope parts on npu, plain attention over whole rows on cpu."""
    issued, make = [], HostOp.with_lengths
    reference = make_drafter(CpuPlatform(), "eager", 3, "latent")
    rounds = rounds_for(reference, seed=8)
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
