"""Sampling parameters on the device against a float64 loop over tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from served_distribution import served
from specgraph_run.decoder import ops

VOCAB, PROMPT = 7, st.lists(st.integers(0, 6), min_size=1, max_size=4)
PARAMETERS = st.fixed_dictionaries(
    {
        "top_k": st.sampled_from([0, 1, 2, 4, 7, 50]),
        "top_p": st.sampled_from([1.0, 0.9, 0.51, 0.1]),
        "min_p": st.sampled_from([0.0, 0.07, 0.3, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.7]),
        "presence_penalty": st.sampled_from([0.0, 0.8, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.6, -0.3]),
        "logit_bias": st.sampled_from([{}, {2: 3.0}, {0: -100.0, 6: 1.0}]),
    }
)
REQUEST = st.tuples(PARAMETERS, st.sampled_from([0.0, 0.4, 1.0, 1.7]), PROMPT, st.lists(st.integers(0, 6), max_size=5))


@settings(max_examples=120, deadline=None)
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=4),
    steps=st.integers(0, 3),
    seed=st.integers(0, 99),
    tree=st.booleans(),
)
def test_against_float64(requests, steps, seed, tree):
    """Return each row's context: the drafts before it in a chain, those on the way to it in a tree."""
    g = torch.Generator().manual_seed(seed)
    n = len(requests)
    logits = torch.randn(n * (steps + 1), VOCAB, generator=g) * 2
    drafts = torch.randint(-1, VOCAB, (n, steps), generator=g)

    paths, ancestors = [[list(range(i)) for i in range(steps + 1)]] * n, None  # per row the columns of its drafts
    if tree:
        paths, bits = [], []
        for _ in range(n):
            own, set_bits = [[]], [1]
            for row in range(1, steps + 1):
                parent = int(torch.randint(0, row, (), generator=g))
                own.append([*own[parent], row - 1])
                set_bits.append(set_bits[parent] | 1 << row)
            paths.append(own)
            bits += set_bits
        ancestors = torch.tensor(bits)

    def column(name, dtype=torch.float32):
        return torch.tensor([parameters[name] for parameters, *_ in requests], dtype=dtype)

    bias, counts, prompt = torch.zeros(n, VOCAB), torch.zeros(n, VOCAB).int(), torch.zeros(n, VOCAB, dtype=torch.bool)
    for row, (parameters, _, tokens, output) in enumerate(requests):
        for token, value in parameters["logit_bias"].items():
            bias[row, token] = value
        prompt[row, tokens] = True
        for token in output:
            counts[row, token] += 1
    before = counts.clone()
    temperature = torch.tensor([t for _, t, *_ in requests])
    asked = ops.SamplingParameters(
        column("top_k", torch.int64), column("top_p"), column("min_p"), column("repetition_penalty"),
        column("presence_penalty"), column("frequency_penalty"), bias, counts, prompt,
    )  # fmt: skip
    got = ops.adjust_logits(logits, temperature, asked, drafts, ancestors)
    assert torch.equal(counts, before)
    for row, (parameters, t, tokens, output) in enumerate(requests):
        for i in range(steps + 1):
            now = got[row * (steps + 1) + i]
            context = [*output, *[d for d in drafts[row, paths[row][i]].tolist() if d >= 0]]
            wanted = torch.tensor(served(logits[row * (steps + 1) + i].tolist(), tokens, context, t, **parameters))
            if t == 0:
                assert int(now.argmax()) == int(wanted.argmax())
            else:
                torch.testing.assert_close(torch.softmax(now / t, -1), wanted.float(), rtol=1e-4, atol=1e-6)


def test_of_equal_tokens_at_the_cut_the_lower_ids_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, 3.0, 0.0]])
    zero, one = torch.zeros(1), torch.ones(1)
    asked = ops.SamplingParameters(
        torch.tensor([3]), one, zero, one, zero, zero, torch.zeros(1, VOCAB), torch.zeros(1, VOCAB).int(),
        torch.zeros(1, VOCAB, dtype=torch.bool),
    )  # fmt: skip
    got = ops.adjust_logits(logits, one, asked, torch.zeros(1, 0).long())
    assert (got[0] > -1e29).nonzero()[:, 0].tolist() == [1, 3, 4]
