"""Ops that only some models and requests need, against float64: windows and sinks, experts, sampling parameters."""

from __future__ import annotations

import pytest
import torch
from specgraph import ops
from specgraph.device import Platform

from specgraph_conformance.case import case
from specgraph_conformance.rig import WAYS, expect_close, expect_equal, on_host, run_op


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.sampling-parameters",
    "Penalties, bias, top_k, top_p and min_p leave each row of a verify the tokens and the logits that a host loop "
    "does; sampled tokens are counted, and have float64's log-probabilities.",
    cause="adjust_logits: drafts before a row that are not in its context, or another request's parameters",
)
def test_sampling_parameters(platform: Platform, way: str, seed: int) -> None:
    g, device = torch.Generator().manual_seed(seed), platform.device
    logits = torch.randn(4, 12, generator=g) * 2
    drafts = logits[1::2].argmax(-1, keepdim=True)  # the tokens that being in the context changes most
    counts, new = torch.zeros(2, 12, dtype=torch.int32), torch.tensor([[3, 3], [1, -1]])
    prompt = torch.zeros(2, 12, dtype=torch.bool)
    prompt[:, 4] = True
    frequency, top_k, top_p, min_p = [0.5, 0.0], [4, 0], [1.0, 0.6], [0.0, 0.05]
    bias = torch.zeros(2, 12)
    bias[1, 9] = 2.0
    host = [
        logits, drafts, torch.tensor([1.0, 0.8]), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p),
        torch.tensor([1.0, 1.5]), torch.tensor([0.3, 0.0]), torch.tensor(frequency), bias, counts, prompt, new,
    ]  # fmt: skip
    *there, new_ids = (tensor.to(device) for tensor in host)
    out, logprobs = torch.zeros(4, 12, device=device), torch.zeros(2, 2, device=device)

    def work() -> None:
        there[-2].zero_()
        ops.count_tokens(new_ids, there[-2])
        out.copy_(ops.adjust_logits(*there))
        ops.emitted_logprobs(there[0], new_ids, logprobs)

    run_op(platform, way, work, [out, logprobs, there[-2]])
    counted = [[0, 0, 0, 2, *[0] * 8], [0, 1, *[0] * 10]]
    expect_equal(on_host(there[-2]), torch.tensor(counted, dtype=torch.int32), "counts")
    exact = torch.log_softmax(logits.double(), -1)
    picked = torch.stack([exact[0, 3], exact[1, 3], exact[2, 1], torch.tensor(0.0)]).view(2, 2)
    expect_close(on_host(logprobs).double(), picked, 1e-4, "logprobs")
    for row in range(4):
        r, seen = row // 2, list(counted[row // 2])
        if row % 2:
            seen[int(drafts[r])] += 1
        x = logits[row].double() + bias[r]
        for token in range(12):
            if r == 1 and (seen[token] or token == 4):
                x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
            x[token] -= frequency[r] * seen[token] + (0.3 if r == 0 and seen[token] else 0.0)
        p = torch.softmax(x / (1.0, 0.8)[r], -1)
        order = [token for token in p.argsort(descending=True).tolist() if p[token] >= min_p[r] * p.max()]
        order = order[: top_k[r] or 12]
        total = sum(float(p[token]) for token in order)
        kept = [t for i, t in enumerate(order) if not i or sum(float(p[k]) for k in order[:i]) < top_p[r] * total]
        now = on_host(out)[row].double()
        assert sorted((now > -1e29).nonzero()[:, 0].tolist()) == sorted(kept), f"tokens kept in row {row}"
        expect_close(now[kept], x[kept], 1e-4, f"logits of row {row}")


@pytest.mark.parametrize("way", WAYS)
@case(
    "kernels.penalties-in-a-tree",
    "In a draft tree the context of a row is the output and the drafts on its own path, not its siblings.",
    cause="adjust_logits: bits of another row, or all drafts before a row as in a chain",
)
def test_penalties_in_a_tree(platform: Platform, way: str, seed: int) -> None:
    paths = [[], [0], [1], [0, 2], [1, 3], [0, 2, 4]]  # per row the columns of the drafts on its path
    g, device, requests = torch.Generator().manual_seed(seed), platform.device, 2
    logits = torch.randn(requests * len(paths), 12, generator=g)
    drafts = torch.tensor([[3, 5, 3, 5, 7], [8, 8, 2, -1, 8]])
    counts = torch.randint(0, 3, (requests, 12), generator=g, dtype=torch.int32)
    frequency, presence = torch.tensor([0.7, 1.1]), torch.tensor([0.4, -0.3])
    bits = torch.tensor([sum(1 << (column + 1) for column in path) | 1 << i for i, path in enumerate(paths)] * requests)
    none, ones = torch.zeros(requests), torch.ones(requests)
    arguments = [
        logits, drafts, none, torch.zeros(requests, dtype=torch.int64), ones, none, ones, presence, frequency,
        torch.zeros(requests, 12), counts, torch.zeros(requests, 12, dtype=torch.bool), bits,
    ]  # fmt: skip
    there = [tensor.to(device) for tensor in arguments]
    out = torch.zeros_like(there[0])
    run_op(platform, way, lambda: out.copy_(ops.adjust_logits(*there)), [out])
    wanted = logits.double().clone()
    for r in range(requests):
        for i, path in enumerate(paths):
            seen = [int(count) for count in counts[r]]
            for column in path:
                if drafts[r, column] >= 0:
                    seen[int(drafts[r, column])] += 1
            for token, times in enumerate(seen):
                wanted[r * len(paths) + i, token] -= float(frequency[r]) * times + float(presence[r]) * bool(times)
    expect_close(on_host(out).double(), wanted, 1e-5, "logits")
