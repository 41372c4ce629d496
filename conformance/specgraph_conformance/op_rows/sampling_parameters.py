"""Rows of the ops of sampling parameters: the tokens that they keep, penalties, and log-probabilities."""

from __future__ import annotations

import torch
from specgraph_run.decoder import ops as decoder_ops
from torch import Tensor

from specgraph_conformance.op_table import FLOATS, HALVES, Run, Table, expect_reference
from specgraph_conformance.rig import expect_close

TABLE = Table()


def parameters(requests: int, vocab: int, **asked: Tensor) -> decoder_ops.SamplingParameters:
    """Return sampling parameters. The fields that are not in `asked` have values that change nothing."""
    zeros, ones = torch.zeros(requests), torch.ones(requests)
    nothing = decoder_ops.SamplingParameters(
        torch.zeros(requests, dtype=torch.int64), ones, zeros, ones, zeros, zeros, torch.zeros(requests, vocab),
        torch.zeros(requests, vocab, dtype=torch.int32), torch.zeros(requests, vocab, dtype=torch.bool),
    )  # fmt: skip
    return nothing._replace(**asked)


@TABLE.row(
    "sampling-parameters",
    "Penalties, bias, top_k, top_p and min_p leave each row of a verify the tokens and the logits that a host loop "
    "does; sampled tokens are counted, and have float64's log-probabilities.",
    hazard="top-k-of-the-last-row",
    cause="adjust_logits: drafts before a row that are not in its context, or another request's parameters",
)
def sampling_parameters(run: Run, g: torch.Generator) -> None:
    logits = torch.randn(4, 12, generator=g) * 2
    drafts = logits[1::2].argmax(-1, keepdim=True)  # the tokens whose logits the penalties change most
    many = torch.randint(-1, 12, (70, 5), generator=g)
    of_many = torch.zeros(70, 12, dtype=torch.int32)
    expect_reference(run, decoder_ops.count_tokens, many, of_many, written=[of_many])
    counts, new = torch.zeros(2, 12, dtype=torch.int32), torch.tensor([[3, 3], [1, -1]])
    prompt = torch.zeros(2, 12, dtype=torch.bool)
    prompt[:, 4] = True
    warm, bias = torch.tensor([1.0, 0.8]), torch.zeros(2, 12)
    bias[1, 9] = 2.0
    expect_reference(run, decoder_ops.count_tokens, new, counts, written=[counts])
    asked = parameters(
        2, 12, top_k=torch.tensor([4, 0]), top_p=torch.tensor([1.0, 0.6]), min_p=torch.tensor([0.0, 0.05]),
        repetition_penalty=torch.tensor([1.0, 1.5]), presence_penalty=torch.tensor([0.3, 0.0]),
        frequency_penalty=torch.tensor([0.5, 0.0]), bias=bias, output_counts=counts, in_prompt=prompt,
    )  # fmt: skip
    expect_reference(run, decoder_ops.adjust_logits, logits, warm, asked, drafts, tolerance=1e-4)
    logprobs = torch.full((2, 2), -7.0)
    run(decoder_ops.emitted_logprobs, logits, new, logprobs, written=[logprobs])
    exact = torch.log_softmax(logits.double(), -1)
    picked = torch.stack([exact[0, 3], exact[1, 3], exact[2, 1], torch.tensor(0.0)]).view(2, 2)
    expect_close(logprobs, picked, 1e-4, "logprobs")


@TABLE.row(
    "penalties-in-a-tree",
    "In a draft tree the context of a row is the output and the drafts on its own path, not its siblings.",
    cause="adjust_logits: bits of another row, or all drafts before a row as in a chain",
)
def penalties_in_a_tree(run: Run, g: torch.Generator) -> None:
    paths = [[], [0], [1], [0, 2], [1, 3], [0, 2, 4]]  # for each row, the columns of the drafts on its path
    logits = torch.randn(2 * len(paths), 12, generator=g)
    drafts = torch.tensor([[3, 5, 3, 5, 7], [8, 8, 2, -1, 8]])
    counts = torch.randint(0, 3, (2, 12), generator=g, dtype=torch.int32)
    frequency, presence = torch.tensor([0.7, 1.1]), torch.tensor([0.4, -0.3])
    bits = torch.tensor([sum(1 << (column + 1) for column in path) | 1 << i for i, path in enumerate(paths)] * 2)
    asked = parameters(2, 12, frequency_penalty=frequency, presence_penalty=presence, output_counts=counts)
    expect_reference(run, decoder_ops.adjust_logits, logits, torch.zeros(2), asked, drafts, bits, tolerance=1e-5)


@TABLE.row(
    "parameters-of-a-drafter",
    "A drafter's logits follow bias, prompt, counts and penalties of the target's ids that its own ids stand for.",
    cause="adjust_logits: columns taken for target ids, or drafts of other rows counted",
)
def parameters_of_a_drafter(run: Run, g: torch.Generator) -> None:
    requests, vocab = 66, 20
    to_target = torch.tensor([1, 4, 5, 9, 13, 14, 19])
    logits = torch.randn(requests, len(to_target), generator=g) * 2
    drafted = torch.tensor([[4, 4, -1], [-1, -1, -1], [19, 9, 5]]).repeat(22, 1)
    counts = torch.randint(-6, 3, (requests, vocab), generator=g, dtype=torch.int32).clamp(min=0)
    prompt, bias = torch.rand(requests, vocab, generator=g) < 0.4, torch.randn(requests, vocab, generator=g)
    repetition, presence, frequency = (
        torch.tensor(each).repeat(22) for each in ([1.5, 1.0, 0.8], [0.3, -0.4, 0.0], [0.2, 0.9, 1.1])
    )
    asked = parameters(
        requests, vocab, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency,
        bias=bias, output_counts=counts, in_prompt=prompt,
    )  # fmt: skip
    offsets = to_target - torch.arange(len(to_target))
    given = logits, torch.zeros(requests), asked, drafted, torch.full((requests,), -1), offsets
    expect_reference(run, decoder_ops.adjust_logits, *given, tolerance=1e-5)


@TABLE.row(
    "parameters-of-a-large-vocabulary",
    "Over 131,072 tokens top_k, top_p and min_p keep the tokens that a host sort keeps, the lower ids among equals, "
    "with penalties of tokens that were given up to 70,000 times.",
    hazard="large-vocabulary",
    cause="adjust_logits: equals at the cut of several blocks, a sort by block, a fixed number of candidates, or "
    "counts in few bits",
    large=True,
    dtype=HALVES,
)
def parameters_of_a_large_vocabulary(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    vocab = 131_072
    logits = (torch.randn(4, vocab, generator=g) * 3).to(dtype)
    logits[1, torch.randperm(vocab, generator=g)[:60]] = 14.0  # more equal tokens than top_k keeps
    top_k, top_p, min_p = [3000, 25, 0, 300], [1.0, 1.0, 0.4, 0.8], [0.0, 0.0, 0.0, 0.02]
    warm, frequency = torch.tensor([0.7, 1.0, 0.6, 0.5]), torch.tensor([0.0, 0.01, 0.01, 1e-4])
    counts = torch.zeros(4, vocab, dtype=torch.int32)
    counts[:, 1::2] = torch.tensor([1, 255, 256, 70_000], dtype=torch.int32)[:, None]
    asked = parameters(
        4, vocab, top_k=torch.tensor(top_k), top_p=torch.tensor(top_p), min_p=torch.tensor(min_p),
        frequency_penalty=frequency, output_counts=counts,
    )  # fmt: skip
    out = run(decoder_ops.adjust_logits, logits, warm, asked, torch.zeros(4, 0, dtype=torch.int64))
    adjusted = logits.double() - frequency[:, None].double() * counts
    for r in range(4):
        p = (adjusted[r] / float(warm[r])).softmax(-1)
        order = torch.sort(-adjusted[r].float(), stable=True).indices  # of equal tokens the lower id comes first
        order = order[p[order] >= min_p[r] * p.max()][: top_k[r] or vocab]
        share = p[order]
        before = share.cumsum(0) - share
        kept = order[before < top_p[r] * share.sum()] if top_p[r] < 1 else order
        now = (out[r] > -1e29).nonzero()[:, 0]
        differ = set(now.tolist()) ^ set(kept.tolist())
        # The rounding of a sum decides about the last token of the top_p share, and with equal tokens about one more.
        allowed = 2 if top_p[r] < 1 else 0
        assert len(differ) <= allowed, f"row {r} keeps {len(now)} tokens instead of {len(kept)}; {len(differ)} differ"
        both = kept[out[r][kept] > -1e29]
        expect_close(out[r][both], adjusted[r][both], 1e-5, f"logits kept in row {r}")


@TABLE.row(
    "logprobs-in-float32",
    "Log-probabilities over 5,000 tokens are float64's of the logits as they are given, in every dtype.",
    cause="emitted_logprobs: a log_softmax in the dtype of the logits",
    dtype=FLOATS,
)
def logprobs_in_float32(run: Run, g: torch.Generator, dtype: torch.dtype) -> None:
    logits = (torch.randn(120, 5000, generator=g) * 3 + 20).to(dtype)
    ids = torch.randint(0, 5000, (40, 3), generator=g)
    ids[2::4, 1:] = -1
    out = torch.full((40, 3), -7.0)
    run(decoder_ops.emitted_logprobs, logits, ids, out, written=[out])
    wanted = torch.log_softmax(logits.double(), -1).gather(1, ids.clamp(min=0).view(-1, 1)).view(40, 3)
    expect_close(out, wanted.where(ids >= 0, torch.zeros_like(wanted)), 1e-4, "log-probabilities")
