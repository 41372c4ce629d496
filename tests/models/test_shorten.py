"""A model that is shortened attends as one that was made for so few positions."""

import shutil
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from changed_folders import change_config
from specgraph_models import decoder
from specgraph_models.draft_model import DraftModelHead
from specgraph_models.llama import LlamaTarget
from specgraph_models.rotary import RotaryConfig
from specgraph_run.text.load import load_generator, shipped_pair
from specgraph_run.tools.rounds import random_target
from specgraph_run.tools.shapes import SHAPES, random_head

TINY = replace(SHAPES["eagle3-tiny-python"], hidden_size=64, intermediate_size=96, num_heads=4, head_dim=16)
CPU = torch.device("cpu")


def same(left, right):
    for one, other in zip(left.attention_layers, right.attention_layers, strict=True):
        for field in fields(one):
            a, b = getattr(one, field.name), getattr(other, field.name)
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b, field.name


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp", "dflash"])
def test_heads(kind):
    aux = 3 if kind in ("eagle3", "dflash") else 0
    shape = replace(TINY, kind=kind, draft_vocab_size=TINY.vocab_size, num_aux=aux)
    head, short = (random_head(shape, CPU, torch.float32, length) for length in (64, 16))
    head.shorten(16)
    same(head, short)


def test_targets_and_draft_models_whose_table_and_windows_depend_on_the_length():
    """LongRoPE has other factors for short texts, and a window that hides nothing is None."""
    rotary = RotaryConfig(
        kind="longrope", original_max_position_embeddings=32, short_factors=(1.0,) * 8, long_factors=(3.0,) * 8
    )
    models: list[LlamaTarget] = []
    for length in (64, 16):
        model = random_target(replace(TINY, num_layers=2), CPU, torch.float32, length)
        config = replace(model.sizes, rotary=rotary, sliding_window=32, sliding=(True, False))
        models.append(LlamaTarget(config, model.embed_tokens, model.layers, model.norm, model.lm_head))
    model, short = models
    assert model.attention_layers[0].window == 32
    head = DraftModelHead(model, 64)
    head.shorten(16)
    assert model.max_model_len == 16
    same(model, short)
    same(head, short)


def test_no_table_is_made_before_the_length_is_known(monkeypatch, tmp_path):
    """A configuration of a long context whose keys do not fit in memory: its tables would have gigabytes."""
    rows: list[int] = []
    table = decoder.rotary_table
    monkeypatch.setattr(decoder, "rotary_table", lambda *args: rows.append(args[1]) or table(*args))
    folders = [Path(shutil.copytree(folder, tmp_path / str(i))) for i, folder in enumerate(shipped_pair())]
    change_config(folders[0], max_position_embeddings=1 << 20)
    with load_generator(*folders, max_num_requests=1, kv_memory=0.02, capture_sizes=[1], prefill="eager") as generator:
        length = generator.decoder.config.max_model_len
        generator.text("def ", max_tokens=3)
    assert length < 1 << 16
    assert set(rows) == {0, length}
