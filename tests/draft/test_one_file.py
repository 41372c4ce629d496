"""`examples/one_file.py`, the first thing to read: it runs, and drafts and generates what our own decoder does."""

from __future__ import annotations

import re

import pytest
import specgraph_models
import torch
from example_module import EXAMPLES, example_module
from specgraph_run import shipped_pair
from specgraph_run.decoder import Request, SpeculativeDecoder
from tokenizers import Tokenizer

import specgraph
from specgraph.config import DraftConfig
from specgraph.cpu import CpuPlatform


@pytest.fixture(scope="module")
def example():
    with example_module("one_file.py") as module:
        yield module


@pytest.fixture(scope="module")
def prompts():
    """Code, of which the drafter guesses much right after a prompt if the prompt reached it."""
    tokenizer = Tokenizer.from_file(str(shipped_pair()[0] / "tokenizer.json"))
    code = (
        "import os\nimport sys\n\n\nclass Counter(dict):\n    def __init__(self, iterable=None):\n        self.update("
    )
    ids = tokenizer.encode(code).ids
    return [ids, ids[:1], ids[:19]]


@torch.inference_mode()
def test_it_generates_and_accepts_what_our_own_decoder_does(example, prompts):
    """A prompt that reached the drafter wrongly costs acceptance in the first rounds, and nothing else tells."""
    engine, target = example.Engine(CpuPlatform(), len(prompts)), specgraph_models.load_target(shipped_pair()[0])
    config = DraftConfig(
        num_speculative_tokens=example.K, max_num_requests=1, max_model_len=example.MAX_LEN, decode="eager"
    )
    decoder = SpeculativeDecoder(
        target, specgraph_models.load_drafter(shipped_pair()[1], target), CpuPlatform(), config
    )
    asked = [Request(prompt_token_ids=prompt, max_tokens=24) for prompt in prompts]
    expected, metrics = [result.token_ids for result in decoder.generate(asked)], decoder.metrics
    assert engine.generate(prompts, 24) == (expected, metrics.num_drafts * example.K, sum(metrics.accepted))
    assert engine.generate(prompts[1:2], 24)[0] == expected[1:2]  # a smaller batch, in rows that had other requests
    assert engine.plain(prompts[2], 24) == expected[2]
    engine.drafter.close()


def test_it_says_what_was_accepted(example, monkeypatch, capsys):
    monkeypatch.delenv("SPECGRAPH_PLATFORM", raising=False)
    example.main()
    said = capsys.readouterr().out
    drafted, accepted = map(int, re.search(r"(\d+) tokens drafted, (\d+) accepted", said).groups())
    assert 0.5 < accepted / drafted < 1
    assert said.endswith("the same tokens as plain greedy decoding: yes\n")


def test_it_is_short_and_uses_public_names():
    text = (EXAMPLES / "one_file.py").read_text()
    assert len(text.splitlines()) <= 200
    assert set(re.findall(r"^(?:import|from) specgraph.*", text, flags=re.MULTILINE)) == {
        "import specgraph",
        "import specgraph_models",
        "import specgraph_run",
    }
    used = re.findall(r"(?<!`)\bspecgraph\.(\w+)", text)
    assert set(used) <= set(specgraph.__all__)
