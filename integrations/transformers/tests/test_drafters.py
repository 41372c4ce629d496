"""Every kind of drafter, trained for one small target: the same tokens, and drafts that the target accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specgraph_models import load_drafter, load_target
from specgraph_run import shipped_pair
from specgraph_run.decoder import AcceptanceMetrics, Request, SpeculativeDecoder
from specgraph_transformers import speculative
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specgraph import open_platform
from specgraph.config import DraftConfig

TARGET, EAGLE3 = shipped_pair()
EXAMPLE = Path(__file__).parents[3] / "examples" / "tiny-python"
NAMES = ["eagle3", "eagle1", "mtp", "dflash", "draft-model"]
K = 5
OPTIONS = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts():
    """Three prompts of unequal lengths, padded on the left, and what `generate` makes of them."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines()[:3]
    rows = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines]
    columns = max(len(row) for row in rows)
    return {
        "inputs": torch.tensor([[0] * (columns - len(row)) + row for row in rows]),
        "attention_mask": torch.tensor([[0] * (columns - len(row)) + [1] * len(row) for row in rows]),
    }


@pytest.fixture(scope="module")
def expected(model, prompts):
    return model.generate(**prompts, **OPTIONS)


def folder_of(name: str) -> Path:
    return EAGLE3 if name == "eagle3" else EXAMPLE / "drafters" / name


def decoded(name: str, prompts) -> AcceptanceMetrics:
    """Acceptance of the same prompts in specgraph's own decoder, with its own model as the target, run eagerly."""
    target = load_target(TARGET, dtype=torch.float32, max_model_len=256)
    config = DraftConfig(num_speculative_tokens=K, max_num_requests=3, max_model_len=256, decode="eager")
    rows = zip(prompts["inputs"].tolist(), prompts["attention_mask"].sum(1).tolist(), strict=True)
    requests = [Request(prompt_token_ids=row[-length:], max_tokens=OPTIONS["max_new_tokens"]) for row, length in rows]
    with torch.inference_mode():
        decoder = SpeculativeDecoder(target, load_drafter(folder_of(name), target), open_platform("cpu"), config)
        decoder.generate(requests)
    return decoder.metrics


@pytest.mark.parametrize("name", NAMES)
def test_a_trained_drafter(name, model, prompts, expected):
    """The drafts that are accepted are those of the decoder: hidden states, positions and KV are the right ones."""
    draft = speculative(
        folder_of(name), K, max_num_requests=3, max_model_len=256, capture_sizes=[3], prefill_sizes=[64]
    )
    assert torch.equal(model.generate(**prompts, **OPTIONS, custom_generate=draft), expected)
    assert draft.drafter.resolution.lowering == "merged"
    theirs = decoded(name, prompts)
    assert (draft.metrics.num_drafts, draft.metrics.accepted) == (theirs.num_drafts, theirs.accepted)
    assert draft.metrics.mean_acceptance_length > 1.5
    draft.close()
