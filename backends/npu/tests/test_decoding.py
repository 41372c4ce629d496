"""Whole rounds on npu: verify, accept, propose. The same text as on the cpu platform."""

from __future__ import annotations

import shutil

import pytest
import torch
from specgraph_models.checkpoints import load_drafter, load_target
from specgraph_npu.attention import make_attention
from specgraph_run import load_generator, shipped_pair
from specgraph_run.decoder import Request, SpeculativeDecoder

import tiny_checkpoints
from specgraph.config import DraftConfig
from specgraph.cpu import CpuPlatform
from tiny_checkpoints import VOCAB, write_eagle3, write_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target"), write_eagle3(root / "eagle3")


def generate(
    folders, platform, lowering, k, attention=None, *, block=4, max_len=64, lengths=(3, 9, 1, 14, 5), times=1,
    before=lambda number: None,
):  # fmt: skip
    """Generate the requests `times` times; return tokens and acceptance. `before(i)` is called before run i."""
    target = load_target(folders[0], dtype=torch.float32, device=platform.device)
    head = load_drafter(folders[1], target)
    config = DraftConfig(
        num_speculative_tokens=k, max_num_requests=3, max_model_len=max_len, block_size=block, decode=lowering
    )
    decoder = SpeculativeDecoder(target, head, platform, config, attention=attention)
    g = torch.Generator().manual_seed(9)
    prompts = [torch.randint(0, VOCAB, (n,), generator=g).tolist() for n in lengths]
    with torch.inference_mode():
        decoder.capture()
        results = []
        for number in range(times):
            before(number)
            asked = [Request(prompt_token_ids=p, max_tokens=8 + 3 * i) for i, p in enumerate(prompts)]
            results.append([result.token_ids for result in decoder.generate(asked)])
    decoder.close()
    assert all(tokens == results[0] for tokens in results)
    return results[0], decoder.metrics.acceptance_per_position


def test_text_and_acceptance_as_on_cpu(npu, runtime, folders):
    """In one lowering; the merged one is below, under random schedules."""
    expected = generate(folders, CpuPlatform(), "eager", 4)
    assert len(expected[0]) == 5
    assert generate(folders, npu, "step", 4, make_attention(npu, "fia")) == expected


def test_blocks_of_128_tokens(npu, runtime, tmp_path, monkeypatch):
    """Head_dim and blocks as a device takes them; the requests run over the end of their first or second block."""
    monkeypatch.setattr(tiny_checkpoints, "HEAD_DIM", 128)
    folders = write_target(tmp_path / "target", max_position=512), write_eagle3(tmp_path / "eagle3")
    runtime.strict("fia-head-dim", "fia-block-size")
    sizes = {"block": 128, "max_len": 300, "lengths": (126, 128, 250)}
    expected = generate(folders, CpuPlatform(), "eager", 3, **sizes)
    assert [len(tokens) for tokens in expected[0]] == [8, 11, 14]
    for name in ("fia", "fia-v2"):
        assert generate(folders, npu, "merged", 3, make_attention(npu, name), **sizes) == expected, name


def test_folders_in_shapes_of_a_device(npu, runtime, all_limits, tmp_path, monkeypatch):
    """Head_dim 128 in bfloat16 with every limit on: `auto` takes the device's op, and graphs give eager's text."""
    monkeypatch.setattr(tiny_checkpoints, "HEAD_DIM", 128)
    folders = write_target(tmp_path / "target", vocab=2048), write_eagle3(tmp_path / "eagle3", vocab=2048)
    shutil.copy(shipped_pair()[0] / "tokenizer.json", folders[0])
    texts = {}
    for lowering in ("eager", "merged"):
        made = load_generator(*folders, platform=npu, dtype="bfloat16", decode=lowering, num_speculative_tokens=3)
        assert made.decoder.target.attention.name == made.decoder.drafter.attention.name == "fia"
        texts[lowering] = made.text(["import os"], max_tokens=20)
        made.close()
    assert all(text == texts["eager"] and text[0] for text in texts.values()), texts


def test_text_under_random_schedules(npu, runtime, folders):
    expected = generate(folders, CpuPlatform(), "eager", 3)
    seen = generate(
        folders, npu, "merged", 3, make_attention(npu, "fia"), times=3,
        before=lambda seed: runtime.schedule(seed, 300, 30),
    )  # fmt: skip
    assert seen[0] == expected[0]
