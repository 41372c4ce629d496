"""Targets of every architecture through our decoder: the greedy tokens are those of transformers."""

from __future__ import annotations

import pytest
import torch
from small_targets import TARGETS

from specgraph.attention import AttentionBackend, PagedAttention, PagedHostAttention
from specgraph.checkpoints import load_target
from specgraph.device.cpu import CpuPlatform
from specgraph.engine import EngineConfig, Request, SpeculativeDecoder
from specgraph.models.draft_model import DraftModelHead

LENGTHS, TOKENS = (3, 21), 16


def decoded(target, prompts, lowering, attention) -> tuple[list[list[int]], float]:
    """Greedy tokens of each prompt with the target as its own drafter, so that drafts are accepted too."""
    platform = CpuPlatform()
    config = EngineConfig(
        num_speculative_tokens=3, max_num_requests=2, max_model_len=64, block_size=4, decode=lowering,
        capture_sizes=[2], prefill_sizes=[8, 24],
    )  # fmt: skip
    head = DraftModelHead(target, target.hidden_size)
    backend: AttentionBackend = PagedHostAttention(platform) if attention == "host" else PagedAttention()
    decoder = SpeculativeDecoder(target, head, platform, config, attention=backend)
    decoder.capture()
    results = decoder.generate([Request(prompt_token_ids=prompt, max_tokens=TOKENS) for prompt in prompts])
    length = decoder.metrics.mean_acceptance_length
    decoder.close()
    platform.close()
    return [result.token_ids for result in results], length


@pytest.mark.parametrize("name", TARGETS)
@torch.inference_mode()
def test_greedy_output_is_that_of_transformers(name, tmp_path, random_model):
    architecture, config = TARGETS[name]
    model = random_model(architecture, tmp_path, **config)
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 120, (n,), generator=g) for n in LENGTHS]
    expected = [
        model.generate(p[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    target = load_target(tmp_path, max_model_len=64)
    ways = [("eager", "device"), ("merged", "device"), ("merged", "host")]
    for lowering, attention in ways if any(not layer.is_plain for layer in target.attention_layers) else ways[:2]:
        tokens, length = decoded(target, [p.tolist() for p in prompts], lowering, attention)
        assert tokens == expected
        assert length > 3
