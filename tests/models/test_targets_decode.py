"""Targets of every architecture through our decoder: the greedy tokens are those of transformers."""

from __future__ import annotations

import pytest
import torch
from small_targets import TARGETS
from specgraph_models.checkpoints import load_target
from specgraph_models.draft_model import DraftModelHead

LENGTHS, TOKENS = (3, 21), 12


@pytest.mark.parametrize("name", TARGETS)
@torch.inference_mode()
def test_greedy_output_is_that_of_transformers(name, tmp_path, random_model, decoded):
    architecture, config = TARGETS[name]
    model = random_model(architecture, tmp_path, **config)
    g = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, 120, (n,), generator=g) for n in LENGTHS]
    expected = [
        model.generate(p[None], max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)[0, len(p) :].tolist()
        for p in prompts
    ]
    target = load_target(tmp_path, max_model_len=64)
    head = DraftModelHead(target, target.hidden_size)  # the target itself, so that drafts are accepted too
    is_plain = all(layer.is_plain for layer in target.attention_layers)
    for attention in ("device",) if is_plain else ("device", "host"):
        tokens, decoder = decoded(
            target, head, [p.tolist() for p in prompts], TOKENS, attention, max_model_len=64,
            decode="merged", num_speculative_tokens=2,
        )  # fmt: skip
        assert tokens == expected
        assert decoder.metrics.mean_acceptance_length > 2
