"""The example engine drafts through the public names only, and generates what its target generates alone."""

from __future__ import annotations

import pytest
import torch
from example_module import EXAMPLES, example_module

from specgraph import EngineConfig, Request, SpeculativeDecoder, shipped_pair
from specgraph.device.cpu import CpuPlatform


@pytest.fixture(scope="module")
def example():
    with example_module("embed/engine.py") as module:
        yield module


def alone(example, engine, prompt, count):
    """Greedy tokens of the target over the whole sequence each time: no cache, no drafts."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = example.target_pass(engine.target, (), tokens, 0, {})
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def prompts():
    """Code, of which the drafter guesses much right after a prompt if the prompt reached it."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(shipped_pair()[0] / "tokenizer.json"))
    code = (
        "import os\nimport sys\n\n\nclass Counter(dict):\n    def __init__(self, iterable=None):\n        self.update("
    )
    ids = tokenizer.encode(code).ids
    return [ids, ids[:1], ids[:19]]


def test_it_generates_the_targets_own_tokens(example, prompts):
    with torch.inference_mode():
        engine = example.Engine()
        for batch in (prompts, prompts[1:2]):
            generated, _ = engine.generate(batch, max_tokens=24)
            assert generated == [alone(example, engine, prompt, 24) for prompt in batch]
        engine.drafter.close()


def test_it_accepts_what_our_own_decoder_accepts(example, prompts):
    """A prompt that reached the drafter wrongly costs acceptance in the first rounds, and nothing else tells."""
    with torch.inference_mode():
        engine = example.Engine()
        config = EngineConfig(
            num_speculative_tokens=example.K,
            max_num_requests=1,
            max_model_len=example.MAX_LEN,
            block_size=example.BLOCK,
            prefill_sizes=[16],
        )
        engine.chunk = 16
        for prompt in prompts:
            decoder = SpeculativeDecoder(engine.target, engine.head, CpuPlatform(), config)
            decoder.capture()
            decoder.generate([Request(prompt_token_ids=prompt, max_tokens=9)])
            _, length = engine.generate([prompt], max_tokens=9)
            assert length == decoder.metrics.mean_acceptance_length
            decoder.close()
        engine.drafter.close()


def test_it_uses_public_names_only():
    lines = (EXAMPLES / "embed/engine.py").read_text().splitlines()
    ours = [line for line in lines if line.startswith(("from specgraph", "import specgraph"))]
    assert len(ours) == 1
    assert ours[0].startswith("from specgraph import")
    assert sum(bool(line.strip()) for line in lines) < 140
