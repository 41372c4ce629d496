"""`examples/training`: a head learns from the states that transformers computes, for targets of any architecture; what
training says it accepts is what decoding accepts."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_targets import TARGETS
from specgraph_run import load_generator, shipped_pair

from specgraph import open_platform


@pytest.fixture
def scripts(monkeypatch):
    """`scripts(name)`: a module of examples/training, whose files import each other by their bare names."""
    names = ("target_pass", "lesson", "head", "dspark", "train", "hidden_states")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples" / "training")
    yield importlib.import_module
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", "gemma3_text", "deepseek_v3"])
def test_states_are_those_of_transformers(name, tmp_path, random_model, scripts):
    architecture, config = TARGETS[name]
    model = random_model(architecture, tmp_path, **config)
    target = scripts("target_pass").TargetPass(tmp_path, open_platform("cpu"), torch.float32)
    texts = [scripts("target_pass").Text(list(range(5, 5 + length)), 3) for length in (17, 24)]
    *three, last = *scripts("lesson").default_layers(target.sizes.num_layers), target.sizes.num_layers
    padded = torch.zeros(2, 24, dtype=torch.int64)
    for line, text in zip(padded, texts, strict=True):
        line[: len(text.tokens)] = torch.tensor(text.tokens)
    hidden, together = target.forward(padded, [*three, last])
    alone = list(scripts("hidden_states").hidden_states(target, texts, None))
    for row, (text, states) in enumerate(zip(texts, alone, strict=True)):
        length = len(text.tokens)
        with torch.no_grad():
            wanted = model(torch.tensor([text.tokens]), output_hidden_states=True)
        for place, layer in enumerate(three):
            torch.testing.assert_close(states[:, place], wanted.hidden_states[layer][0], rtol=0, atol=1e-4)
        for place, entering in enumerate(together):
            torch.testing.assert_close(entering[row, :length], states[:, place], rtol=0, atol=1e-4)
        logits = target.logits(hidden[row, :length])
        torch.testing.assert_close(logits, wanted.logits[0], rtol=0, atol=1e-4)


def test_head_for_a_qwen3(tmp_path, scripts, monkeypatch, capsys):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    folder, prompts, out = tmp_path / "target", tmp_path / "prompts.jsonl", tmp_path / "out"
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 3}
    config = transformers.Qwen3Config(
        vocab_size=2048, num_key_value_heads=1, head_dim=16, max_position_embeddings=96, initializer_range=0.1, **sizes
    )
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    shutil.copy(shipped_pair()[0] / "tokenizer.json", folder)
    texts = [f"def {name}(self):\n" for name in ("read", "write", "close", "flush", "seek", "tell", "name", "mode")]
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    train, seconds = scripts("train"), itertools.count()
    monkeypatch.setattr(scripts("lesson"), "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
    command = f"train.py {folder} --prompts {prompts} --held-out {prompts} --out {out} --platform cpu --requests 8 "
    command += "--max-tokens 24 --max-model-len 64 --temperature 0 --seconds 200 --steps 3 --rate 4e-3"
    for size in ("0", "2049"):
        monkeypatch.setattr(sys, "argv", [*command.split(), "--draft-vocab-size", size])
        with pytest.raises(SystemExit):
            train.main()
        assert f"--draft-vocab-size {size}: the target has 2048 tokens" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", command.split())
    train.main()
    lines = [line for line in capsys.readouterr().out.splitlines() if "held out" in line]
    first, last = (float(re.search(r"loss ([0-9.]+)", line)[1]) for line in (lines[1], lines[-1]))
    assert last < first < 7
    with load_generator(folder, out / "eagle3", platform="cpu", num_speculative_tokens=3, max_model_len=64) as made:
        made.generate([made.request(text, max_tokens=24) for text in texts])
        found = made.decoder.metrics.mean_acceptance_length
    assert found > 3
    assert found == pytest.approx(float(lines[-1].rsplit(" ", 1)[1]), abs=0.2)
