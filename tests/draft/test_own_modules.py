"""The example with modules and paged attention of its own: its texts and every draft, against dense attention."""

from __future__ import annotations

import pytest
import torch
from example_module import EXAMPLES, example_module


@pytest.fixture(scope="module")
def example():
    with example_module("embed/own_modules.py") as module:
        yield module


def dense(example):
    """Causal attention over rows 0, 1, ... of one request; no cache and no blocks."""

    def attend(query, key, value):
        rows = len(query)
        positions = torch.arange(rows)
        query, key = example.rotate(query, positions), example.rotate(key, positions)
        key, value = (x.repeat_interleave(example.HEADS // example.KV_HEADS, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) / example.HEAD_DIM**0.5
        scores.masked_fill_(torch.ones(rows, rows, dtype=torch.bool).triu(1), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)

    return attend


def alone(example, target, prompt, count):
    """Greedy tokens of the target over the whole text each time."""
    tokens = list(prompt)
    for _ in range(count):
        logits, _ = target(torch.tensor(tokens), [dense(example)] * example.LAYERS)
        tokens.append(int(logits[-1].argmax()))
    return tokens[len(prompt) :]


def drafts_after(example, target, draft, tokens):
    """K drafts after `tokens`, every one from a pass of the head over all rows."""
    _, aux = target(torch.tensor(tokens[:-1]), [dense(example)] * example.LAYERS)
    hidden, following = draft.fc(aux), tokens[1:]
    for _ in range(example.K):
        states = draft(torch.tensor(following), hidden, dense(example))
        following = [*following, int(draft.lm_head(draft.norm(states[-1])).argmax())]
        hidden = torch.cat((hidden, states[-1:]))
    return following[-example.K :]


@pytest.mark.parametrize("seed", [3, 4])
def test_texts_and_drafts_are_those_of_dense_attention(example, seed):
    torch.manual_seed(seed)
    target = example.TargetModel()
    draft = example.EagleModel(target)
    prompts = [torch.randint(0, example.VOCAB, (length,)).tolist() for length in (5, 17, 1, 40, 9, 2)]
    engine = example.Engine(target, draft)  # from no grad mode in particular, as a caller may forget
    with torch.inference_mode():
        generated, length = engine.generate(prompts, max_tokens=16)
        assert generated == [alone(example, target, prompt, 16) for prompt in prompts]
        assert length > 1
        assert sorted(engine.free) == list(range(1, example.NUM_BLOCKS))
        for (number, before), drafted in engine.drafts.items():
            text = prompts[number] + generated[number]
            if before <= len(text):
                assert drafted == drafts_after(example, target, draft, text[:before])
    engine.drafter.close()


def test_it_uses_public_names_only():
    ours = [
        line
        for line in (EXAMPLES / "embed/own_modules.py").read_text().splitlines()
        if "specgraph" in line and "import" in line
    ]
    assert len(ours) == 1
    assert ours[0].startswith("from specgraph import")
