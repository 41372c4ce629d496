"""The shipped pair on its 64 held-out prompts: same tokens as the target alone, same acceptance in every lowering."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specgraph.checkpoints import load_drafter, load_target
from specgraph.device.cpu.platform import CpuPlatform
from specgraph.engine import AcceptanceMetrics, EngineConfig, Request, SpeculativeDecoder
from specgraph.engine.load import shipped_pair

pytestmark = pytest.mark.slow

PROMPTS = Path(__file__).parents[2] / "examples" / "tiny-python" / "prompts.jsonl"
STEPS, MAX_TOKENS, BATCH = 5, 32, 8


@dataclass(frozen=True)
class Run:
    """What one way of decoding gave for all prompts."""

    token_ids: list[list[int]]
    metrics: AcceptanceMetrics
    launches_per_propose: float


@pytest.fixture(scope="module")
def run():
    """`run(lowering)`, or `run(None)` for the target alone at the verify pass's shape; each is computed once."""
    target_folder, draft_folder = shipped_pair()
    target = load_target(target_folder, dtype=torch.float32, max_model_len=256)
    head = load_drafter(draft_folder, target)
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    requests = [Request(prompt_token_ids=tokenizer.encode(text).ids, max_tokens=MAX_TOKENS) for text in texts]
    assert len(requests) >= 64
    done: dict[str | None, Run] = {}

    def decode(lowering: str | None) -> Run:
        if lowering not in done:
            platform = CpuPlatform()
            config = EngineConfig(
                num_speculative_tokens=STEPS,
                max_num_requests=BATCH,
                max_model_len=256,
                capture_sizes=[BATCH],
                decode=lowering or "eager",
            )
            drafter = head if lowering else None
            decoder = SpeculativeDecoder(target, drafter, platform, config, query_len=STEPS + 1)
            decoder.capture()
            token_ids = [result.token_ids for result in decoder.generate(requests)]
            made = decoder.drafter
            launches = made.launches["propose"] / made.num_proposes if made else 0.0
            done[lowering] = Run(token_ids, decoder.metrics, launches)
            decoder.close()
            platform.close()
        return done[lowering]

    return decode


def test_speculative_output_is_the_targets_output(run):
    assert run("merged").token_ids == run(None).token_ids
    assert all(0 < len(ids) <= MAX_TOKENS for ids in run(None).token_ids)


@pytest.mark.parametrize("lowering", ["step", "merged"])
def test_tokens_and_acceptance_are_those_of_eager(run, lowering):
    assert run(lowering).token_ids == run("eager").token_ids
    assert run(lowering).metrics == run("eager").metrics


def test_drafting_pays(run):
    """A check that tokens alone can't make: a broken drafter changes no token, it only costs acceptance."""
    metrics = run("merged").metrics
    assert metrics.mean_acceptance_length >= 2.5
    per_position = metrics.acceptance_per_position
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[-1] > 0.15


def test_launches(run):
    assert run("merged").launches_per_propose == 1
    assert run("step").launches_per_propose == STEPS
