"""`examples/hidden_states.py`: the states that a head learns from are those that transformers computes."""

from __future__ import annotations

import pytest
import torch
from example_module import example_module

from specgraph import load_generator, shipped_pair


def test_states_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(shipped_pair()[0], dtype=torch.float32)
    texts = [(list(range(5, 5 + length)), 3) for length in (40, 17, 64)]  # a shorter one after a longer one
    settings = {"speculate": False, "platform": "cpu", "decode": "eager", "max_model_len": 64}
    with load_generator(shipped_pair()[0], **settings) as made, example_module("hidden_states.py") as script:
        found = list(script.hidden_states(made, texts, None))
    for (tokens, _), states in zip(texts, found, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
            last = model.model.norm(states[:, 3])
        assert tuple(states.shape) == (len(tokens), 4, model.config.hidden_size)
        for place, layer in enumerate((2, 4, 5)):
            torch.testing.assert_close(states[:, place], wanted[layer][0], rtol=0, atol=1e-3)
        torch.testing.assert_close(last, wanted[-1][0], rtol=0, atol=1e-3)
