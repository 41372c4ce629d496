"""A model that is shortened attends as one that was made for so few positions."""

from dataclasses import fields, replace

import pytest
import torch

from specgraph.models.draft_model import DraftModelHead
from specgraph.models.llama import LlamaTarget
from specgraph.models.rotary import RotaryConfig
from specgraph.tools.rounds import random_target
from specgraph.tools.shapes import SHAPES, random_head

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
