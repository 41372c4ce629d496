"""Every drafter of the tiny-python target: its format is found, it drafts what the target accepts, it changes no token.

A broken drafter changes no token either: it only costs acceptance. So each has a floor, about half way between nothing
accepted (1.0) and what was measured on these four prompts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from specgraph_models.checkpoints import drafter_format, load_drafter, load_target
from specgraph_run.decoder import AcceptanceMetrics, Request, SpeculativeDecoder
from specgraph_run.text.load import shipped_pair
from tokenizers import Tokenizer

from specgraph.config import DraftConfig
from specgraph.cpu.platform import CpuPlatform

TARGET, EAGLE3 = shipped_pair()
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-python"
PROMPTS = EXAMPLE / "prompts.jsonl"
STEPS = 5
FLOORS = {
    "eagle1": ("eagle", 1.5),
    "eagle3": ("eagle3", 2.5),
    "mtp": ("mtp", 1.65),
    "dflash": ("dflash", 1.58),
    "draft-model": ("draft_model", 1.72),
}


def folder_of(name: str) -> Path:
    return EAGLE3 if name == "eagle3" else EXAMPLE / "drafters" / name


@pytest.fixture(scope="module")
def target():
    return load_target(TARGET, dtype=torch.float32, max_model_len=256)


@pytest.fixture(scope="module")
def decode(target):
    """`decode(name, n)`: tokens of the first n prompts, and metrics; None is the target alone."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    requests = [Request(prompt_token_ids=tokenizer.encode(text).ids, max_tokens=32) for text in texts]

    def run(name: str | None, prompts: int = 4) -> tuple[list[list[int]], AcceptanceMetrics]:
        head = load_drafter(folder_of(name), target) if name else None
        platform, together = CpuPlatform(), min(prompts, 8)
        config = DraftConfig(
            num_speculative_tokens=STEPS,
            max_num_requests=together,
            max_model_len=256,
            capture_sizes=[together],
            decode="merged",
            prefill="eager",
        )
        with torch.inference_mode():
            decoder = SpeculativeDecoder(target, head, platform, config, query_len=STEPS + 1)
            decoder.capture()
            tokens = [result.token_ids for result in decoder.generate(requests[:prompts])]
            decoder.close()
        platform.close()
        return tokens, decoder.metrics

    return run


@pytest.fixture(scope="module")
def target_only(decode):
    """The tokens of eight prompts."""
    return decode(None, 8)[0]


def test_every_drafter_is_listed():
    folders = [*TARGET.parent.iterdir(), *(EXAMPLE / "drafters").iterdir()]
    assert {folder.name for folder in folders if folder.is_dir()} == {"target", *FLOORS}


def test_target_and_eagle3_alone_are_shipped():
    assert {folder.name for folder in TARGET.parent.iterdir() if folder.is_dir()} == {"target", "eagle3"}


@pytest.mark.parametrize("name", FLOORS)
def test_format_is_found(name):
    assert drafter_format(folder_of(name)).algorithm == FLOORS[name][0]


@pytest.mark.parametrize("name", FLOORS)
def test_at_most_two_mebibytes(name):
    assert sum(file.stat().st_size for file in folder_of(name).iterdir()) <= 2 * 2**20


@pytest.mark.parametrize("name", [name for name in FLOORS if name != "eagle3"])
def test_drafts_are_accepted_and_change_no_token(name, decode, target_only):
    tokens, metrics = decode(name)
    assert tokens == target_only[:4]
    assert metrics.mean_acceptance_length >= FLOORS[name][1]


@pytest.mark.slow
def test_the_shipped_pair_on_more_held_out_prompts(decode, target_only):
    tokens, metrics = decode("eagle3", 8)
    assert tokens == target_only
    assert len(tokens) == 8
    assert metrics.mean_acceptance_length >= FLOORS["eagle3"][1]
    per_position = metrics.acceptance_per_position
    assert per_position == sorted(per_position, reverse=True)
    assert per_position[-1] > 0.15
