"""Greedy output equals that of `generate` without a drafter, token for token."""

from __future__ import annotations

import pytest
import torch
from specgraph_transformers import speculative
from tiny_targets import ARCHITECTURES, PAD, make_prompts, make_target

K, NEW = 3, 16
LENGTHS = (9, 2, 14, 5)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_output_is_that_of_generate(architecture, eagle3):
    """Prompts of unequal lengths. Requests accept different counts in the same round."""
    model = make_target(architecture)
    ids, mask = make_prompts(*LENGTHS)
    draft = speculative(eagle3, K, max_num_requests=4, max_model_len=64, capture_sizes=[4], prefill_sizes=[16])
    options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD}
    together = model.generate(ids, attention_mask=mask, **options)
    assert torch.equal(model.generate(ids, attention_mask=mask, custom_generate=draft, **options), together)
    assert 0 < draft.metrics.accepted[0] < draft.metrics.num_drafts  # some drafts were accepted, and some rejected
    draft.close()
