"""Drafters as they were trained, and as they draft: the same logits from one folder, of each step.

The training code is a second implementation: it unrolls all rows at once, in its own words. That of `examples/training`
is compared on the tiny-python EAGLE-3 head, whose folder has the same format, on a random DFlash head, and with
`speculators` for DSpark.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
import unrolled_heads
from changed_folders import FIXTURES
from safetensors.torch import load_file
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_run.text.load import shipped_pair

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny-python"
STEPS, TOLERANCE = 4, {"rtol": 0, "atol": 1e-4}


@pytest.fixture(scope="module")
def target():
    return load_target(shipped_pair()[0], dtype=torch.float32, max_model_len=64)


def round_of(target, head, length=14):
    """Tokens [T], and stand-ins for the target's hidden states [T, aux_size]."""
    g = torch.Generator().manual_seed(3)
    return torch.randint(1, target.vocab_size, (length,), generator=g), torch.randn(length, head.aux_size, generator=g)


@pytest.mark.parametrize(("folder", "kind"), [("eagle1", unrolled_heads.Eagle1Head), ("mtp", unrolled_heads.MtpModule)])
@torch.no_grad()
def test_chain(folder, kind, target, chain_logits):
    path = EXAMPLE / "drafters" / folder
    head = load_drafter(path, target)
    teacher = kind.load(path, target.lm_head)
    tokens, states = round_of(target, head)
    wanted = list(teacher.unroll(target.embed_tokens[tokens][None], states[None], STEPS))
    for row in (0, 4, 8):
        for step, logits in enumerate(chain_logits(head, tokens[1:], states, row, STEPS)):
            torch.testing.assert_close(logits, wanted[step][0, row], **TOLERANCE)


@torch.no_grad()
def test_chain_of_the_head_for_smollm2(target, monkeypatch, chain_logits):
    monkeypatch.syspath_prepend(EXAMPLE.parent / "training")
    path = shipped_pair()[1]
    head = load_drafter(path, target)
    teacher = importlib.import_module("head").Eagle3Head(json.loads((path / "config.json").read_text()))
    teacher.aux_scale.uniform_(0.5, 2)  # training divides the target's states, `load` multiplies `fc`
    teacher.load(path)
    tokens, states = round_of(target, head)
    unrolled = teacher.unroll(target.embed_tokens[tokens][None], states[None], STEPS)
    wanted = [teacher.lm_head(state) for state in unrolled]
    for row in (0, 4, 8):
        for step, logits in enumerate(chain_logits(head, tokens[1:], states, row, STEPS)):
            torch.testing.assert_close(logits, wanted[step][0, row], **TOLERANCE)


@torch.no_grad()
def test_blocks_of_the_dspark_head_for_smollm2(monkeypatch):
    """Blocks at three places of one sequence, as `speculators` computes them."""
    monkeypatch.syspath_prepend(EXAMPLE.parent / "training")
    folder, want = FIXTURES / "dspark", load_file(FIXTURES / "dspark.expected.safetensors")
    teacher = importlib.import_module("dspark").DSparkHead(json.loads((folder / "config.json").read_text()))
    teacher.aux_scale.uniform_(0.5, 2)
    teacher.load(folder)
    tokens, rows = want["token_ids"], want["rows"].view(3, 4)
    embedding = load_target(FIXTURES / "target", dtype=torch.float32).embed_tokens
    states = teacher.blocks(embedding, tokens[None], want["aux_hidden"][None], rows[:, 0][None], 4)[0].flatten(0, 1)
    before = tokens[rows.flatten()]
    torch.testing.assert_close(teacher.logits(states, before), want["logits"], **TOLERANCE)
    torch.testing.assert_close(teacher.confidence(states, before).sigmoid(), want["confidence"], **TOLERANCE)


@torch.no_grad()
def test_blocks_of_a_dflash_head_for_smollm2(monkeypatch, tmp_path, target, block_logits):
    """A head as training saves it, with a draft vocabulary; specgraph's are those of `speculators`."""
    monkeypatch.syspath_prepend(EXAMPLE.parent / "training")
    lesson = importlib.import_module("lesson")
    own = {"draft_vocab_size": 40, "mask_token_id": 7}
    sizes = lesson.layer_sizes(target.sizes)
    config = lesson.block_config(sizes, target.sizes.num_layers, "dflash", 4, own)
    torch.manual_seed(1)
    teacher = importlib.import_module("dspark").DFlashHead(config)
    teacher.begin(
        torch.arange(0, 80, 2),
        target.lm_head,
        torch.ones(sizes["hidden_size"]),
        torch.ones(1, 5 * sizes["hidden_size"]),
    )
    for parameter in teacher.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.1)
    teacher.save(tmp_path)
    teacher.load(tmp_path)
    head = load_drafter(tmp_path, target)
    assert (head.max_speculative_tokens, head.sample_from_anchor) == (4, False)
    tokens, states = round_of(target, head)
    anchors = torch.tensor([1, 6, 13])
    blocks = teacher.blocks(target.embed_tokens, tokens[None], states[None], anchors[None], 5)[0]
    for anchor, block in zip(anchors.tolist(), blocks, strict=True):
        got = block_logits(head, int(tokens[anchor]), states, anchor, 4)
        torch.testing.assert_close(got[1:], teacher.logits(block[1:], tokens[:4]), **TOLERANCE)


@pytest.mark.parametrize("drafts", [1, 5, 7])
@torch.no_grad()
def test_block(drafts, target, block_logits):
    path = EXAMPLE / "drafters" / "dflash"
    head = load_drafter(path, target)
    teacher = unrolled_heads.DFlashHead.load(path, target.embed_tokens)
    tokens, states = round_of(target, head)
    anchors = torch.tensor([1, 6, 13])
    wanted = teacher(tokens[None], states[None], anchors, drafts)[0]
    for anchor, logits in zip(anchors.tolist(), wanted, strict=True):
        got = block_logits(head, int(tokens[anchor]), states, anchor, drafts)
        torch.testing.assert_close(got[1:], logits, **TOLERANCE)
