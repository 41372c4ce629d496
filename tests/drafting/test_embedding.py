"""The example engine drafts through the public names only, and generates what its target generates alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

PATH = Path(__file__).parents[2] / "examples" / "embed" / "engine.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("embed_engine", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def alone(example, engine, prompt, count):
    """Greedy tokens of the target over the whole sequence each time: no cache, no drafts."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = example.target_pass(engine.target, (), tokens, 0, {})
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def test_it_generates_the_targets_own_tokens_and_accepts_drafts(example):
    with torch.inference_mode():
        engine = example.Engine()
        g = torch.Generator().manual_seed(2)
        words = engine.target.vocab_size
        prompts = [torch.randint(0, words, (n,), generator=g).tolist() for n in (1, 7, 33)]
        for batch in (prompts, prompts[1:2]):
            generated, length = engine.generate(batch, max_tokens=24)
            assert generated == [alone(example, engine, prompt, 24) for prompt in batch]
            assert length > 1.3, "drafts of an intact hand-over are accepted"
        engine.drafter.close()


def test_it_uses_public_names_only():
    lines = PATH.read_text().splitlines()
    ours = [line for line in lines if line.startswith(("from specgraph", "import specgraph"))]
    assert len(ours) == 1
    assert ours[0].startswith("from specgraph import")
    assert sum(bool(line.strip()) for line in lines) < 140
